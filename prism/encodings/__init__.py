"""The positional encodings: one file each, found by looking, named by their class; and those in users' own files."""

import re
import sys
from functools import cache
from pathlib import Path

from prism.discovery import discover, load_file
from prism.encodings.encoding import Encoding, NoOptions, Stream
from prism.errors import UserError, unknown

__all__ = ["Encoding", "NoOptions", "Stream", "add_encoding", "all_encodings", "find_encoding", "own_file"]

_own: dict[str, tuple[Path, type[Encoding]]] = {}  # of this process: files named on its command line


@cache
def all_encodings() -> dict[str, type[Encoding]]:
    """Name -> class of every encoding in this folder."""
    return discover(sys.modules[__name__], Encoding)


def find_encoding(name: str) -> type[Encoding]:
    """The encoding called `name`, or an error that offers the nearest name."""
    if name in _own:
        return _own[name][1]
    if name not in all_encodings():
        error = unknown("encoding", name, all_encodings())
        raise UserError(f"{error}; one in a file of your own goes by its path: --encoding path/to/file.py")
    return all_encodings()[name]


def add_encoding(path: str | Path) -> type[Encoding]:
    """The encoding in a file of the user's, known by its name from here on. It is held to the contract first."""
    from prism.contract import check_encoding

    path = Path(path)
    kind = load_file(path, "encoding", Encoding)
    _refuse_name(kind, path)
    if kind.name in _own and _own[kind.name][0].resolve() != path.resolve():
        raise UserError(f"{path} and {_own[kind.name][0]} both call their encoding '{kind.name}'")
    check_encoding(kind, str(path))
    _own[kind.name] = path, kind
    return kind


def _refuse_name(kind: type[Encoding], path: Path) -> None:
    from prism.architectures import all_architectures

    if not re.fullmatch("[a-z][a-z0-9_]*", kind.name) or kind.name == "all":
        raise UserError(f"{path}: a name is made of small letters, digits and _, and is not 'all'; got {kind.name!r}")
    if kind.name in all_encodings() or kind.name in all_architectures():
        raise UserError(f"{path}: {kind.__name__} is called '{kind.name}', which is the name of one of prism's own")


def own_file(name: str) -> Path | None:
    """The file that an encoding of the user's came from; None for one of prism's own."""
    return _own[name][0] if name in _own else None
