"""Files of one JSON record per line, which a kill can tear only at the end."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prism.disk import check_step, explained, from_json, replace_file, to_json
from prism.errors import RunError


class Journal:
    """A file of one JSON record per line. A kill can only tear the last line, and a torn line never counts."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        check_step(record.get("step"), f"a record of {self.path.name}")
        line = to_json(dict(record), f"{self.path.name}, step {record['step']}") + b"\n"
        with explained("append to", self.path, len(line)):
            if self._descriptor is None:
                self._descriptor = self._open_whole()
            end = os.fstat(self._descriptor).st_size
            try:
                while line:
                    line = line[os.write(self._descriptor, line) :]
            except BaseException:
                os.ftruncate(self._descriptor, end)  # half a line would swallow the next record
                raise

    def records(self) -> list[dict[str, Any]]:
        records = []
        for number, line in enumerate(self._lines(), start=1):
            try:
                record = from_json(line)
            except ValueError as error:
                raise RunError(f"{self.path}, line {number} is damaged: {error}") from error
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise RunError(f"{self.path}, line {number} is damaged: not a record with a step")
            records.append(record)
        return records

    def truncate(self, step: int) -> None:
        if not self.path.exists():
            return
        kept = [line for line, record in zip(self._lines(), self.records(), strict=True) if record["step"] <= step]
        self.close()
        replace_file(self.path, b"".join(line + b"\n" for line in kept))

    def sync(self) -> None:
        if self._descriptor is not None:
            with explained("sync", self.path):
                os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lines(self) -> list[bytes]:
        with explained("read", self.path):
            return self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []

    def _open_whole(self) -> int:
        """Opens for appending after the last complete line."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        os.ftruncate(descriptor, self.path.read_bytes().rfind(b"\n") + 1)
        return descriptor
