"""Writing that survives a power cut, and strict JSON: a failure says where, and how many bytes were needed."""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from prism.errors import RunError


class BrokenFile(RunError):
    """A file is not what was once written: never to be used, and reason enough to try an older checkpoint."""


@contextmanager
def explained(action: str, path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns an operating system's refusal into one sentence with the path and the bytes asked for."""
    try:
        yield
    except OSError as error:
        room = "" if needed is None else f" ({needed} bytes needed)"
        raise RunError(f"could not {action} {path}{room}: {error.strerror or error}") from error


def open_plain(path: Path) -> BufferedReader:
    """A planted link or pipe would lead elsewhere or wait for ever."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise BrokenFile(f"{path.name} is not a plain file")
    return open(path, "rb")


def write_synced(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Writes a new file through to the disk; returns its size and hash as the manifest records them."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"sha256": digest.hexdigest(), "size": size}


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """The file holds either its old content or all of the new, never a part."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with explained("write", path, len(data)):
        try:
            temporary.unlink(missing_ok=True)
            write_synced(temporary, [data])
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def to_json(value: Any, where: str, indent: int | None = None) -> bytes:
    """JSON that reads back as it was given (tuples as lists); NaN, infinities and non-text keys are refused."""
    _check_plain(value, where)
    return json.dumps(value, allow_nan=False, indent=indent).encode()


def from_json(data: bytes) -> Any:
    """Strict JSON: every way of being wrong is a ValueError, nonstandard numbers and repeated keys among them."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key is repeated")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def check_step(step: Any, where: str) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 10**18:
        raise RunError(f"{where} needs a step, a whole number from 0: got {step!r}")


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise RunError(f"{where} has the key {key!r}: JSON would turn it into a text")
            _check_plain(inner, f"{where}, {key}")
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise RunError(f"{where} is {value!r}: only finite numbers can be stored")
    elif not (value is None or isinstance(value, str | int | float)):
        raise RunError(f"{where} is a {type(value).__name__}: only numbers, texts, lists and dicts can be stored")
