"""Methods that cannot stand in one table with the others: what they are told, or when they see it, is another problem.

One file each, found by looking. `run` trains and tests one; what it returns says what the method was told.
"""

import sys
from functools import cache

from prism.discovery import choose, discover
from prism.separate.contract import Method, run

__all__ = ["Method", "all_methods", "find_method", "run"]


@cache
def all_methods() -> dict[str, type[Method]]:
    """Name -> class of every method in this folder."""
    return discover(sys.modules[__name__], Method)


def find_method(name: str) -> type[Method]:
    """The method called `name`, or an error that offers the nearest name."""
    return choose("method", name, all_methods())
