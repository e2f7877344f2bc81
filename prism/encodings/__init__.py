"""The positional encodings: one file each, found by looking, named by their class."""

import sys
from functools import cache

from prism.discovery import choose, discover
from prism.encodings.encoding import Encoding, NoOptions, Stream

__all__ = ["Encoding", "NoOptions", "Stream", "all_encodings", "find_encoding"]


@cache
def all_encodings() -> dict[str, type[Encoding]]:
    """Name -> class of every encoding in this folder."""
    return discover(sys.modules[__name__], Encoding)


def find_encoding(name: str) -> type[Encoding]:
    """The encoding called `name`, or an error that offers the nearest name."""
    return choose("encoding", name, all_encodings())
