"""The safetensors format, written in one pass and read with nothing taken on trust.

Written and read here instead of by the safetensors library because the library neither syncs nor hashes, gives its
files mode 0600, and hides a full disk's errno. The tests hold both to the same files. The format cannot execute
anything: eight bytes of length, a JSON header, raw numbers.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch

from prism.disk import BrokenFile, from_json, open_plain
from prism.errors import RunError

MAX_HEADER_BYTES, MAX_TENSORS, MAX_DIMENSIONS, MAX_SPAN = 8 << 20, 100_000, 32, 1 << 48

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}

Expected = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]  # in the order of the bytes


class Content:
    """What a file of these tensors will hold; made, and refused, before anything is written."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        for name, tensor in tensors.items():
            unfit = tensor.layout is not torch.strided or tensor.is_meta or name == "__metadata__"
            if unfit or tensor.dtype not in CODES:
                raise RunError(f"the tensor {name!r} ({tensor.dtype}, {tensor.layout}) cannot be stored")
        # Widest first, so that every tensor is aligned for readers that map the file into memory.
        self._ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
        entries, end = {}, 0
        for name, tensor in self._ordered:
            begin, end = end, end + tensor.nbytes
            entries[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        try:
            _check_header(header, end)
        except ValueError as error:
            raise RunError(f"these tensors could not be read back: {error}") from error
        self._head = len(header).to_bytes(8, "little") + header
        self.size = len(self._head) + end

    def chunks(self) -> Iterator[bytes | memoryview]:
        """One tensor at a time, so that a checkpoint of a GPU model never stands in main memory as a whole."""
        yield self._head
        for _, tensor in self._ordered:
            yield _bytes_of(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


def read(path: Path, expected: Expected | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, bit for bit; no memory is taken before the header has been checked."""
    tensors = {}
    try:
        with open_plain(path) as file:
            layout = _read_layout(file, path.name)
            _check_expected(layout, expected, path)
            for name, (dtype, shape) in layout.items():
                tensors[name] = torch.empty(shape, dtype=dtype)
                view = _bytes_of(tensors[name])
                if file.readinto(view) != len(view):
                    raise BrokenFile(f"{path.name} became shorter while it was read")
    except OSError as error:
        raise BrokenFile(f"{path.name}: {error.strerror or error}") from error
    return tensors


def _read_layout(file: BufferedReader, name: str) -> Layout:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
        raise BrokenFile(f"{name} announces a header of {length} bytes (file: {size}, limit: {MAX_HEADER_BYTES})")
    try:
        return _check_header(file.read(length), size - 8 - length)
    except ValueError as error:
        raise BrokenFile(f"{name} has a bad header: {error}") from error


def _check_header(header: bytes, data_size: int) -> Layout:
    """Known dtypes, sane shapes, and bytes side by side from first to last: no gap to hide in, no overlap."""
    entries = from_json(header)
    if not isinstance(entries, dict):
        raise ValueError("not a JSON object")
    entries.pop("__metadata__", None)
    if len(header) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise ValueError(f"{len(entries)} tensors in {len(header)} bytes of header are too many")
    spans = sorted(_check_entry(name, entry) for name, entry in entries.items())
    end = 0
    for begin, stop, name, code, shape in spans:
        if begin != end or stop - begin != math.prod(shape) * DTYPES[code].itemsize:
            raise ValueError(f"{name[:80]!r} does not cover its bytes exactly")
        end = stop
    if end != data_size:
        raise ValueError(f"it describes {end} bytes of tensors, the file has {data_size}")
    return {name: (DTYPES[code], shape) for _, _, name, code, shape in spans}


def _check_entry(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name[:80]!r} must have dtype, shape and data_offsets")
    code, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name[:80]!r} has an unknown dtype")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS or math.prod(max(n, 1) for n in shape) > MAX_SPAN:
        raise ValueError(f"{name[:80]!r} has an impossible shape")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:80]!r} has impossible offsets")
    return offsets[0], offsets[1], name, code, tuple(shape)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)


def _check_expected(layout: Layout, expected: Expected | None, path: Path) -> None:
    if expected is None:
        return
    for name in sorted(expected.keys() | layout.keys()):
        if name not in layout:
            raise RunError(f"{path} lacks the tensor {name[:80]!r}")
        if name not in expected:
            raise RunError(f"{path} has the unknown tensor {name[:80]!r}")
        dtype, shape = expected[name]
        if layout[name] != (dtype, tuple(shape)):
            (found_dtype, found_shape), wanted_shape = layout[name], tuple(shape)
            raise RunError(f"{path} holds {name!r} as {found_dtype} {found_shape}, expected {dtype} {wanted_shape}")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
