"""The models: the Transformer, and what has no positional encoding, one file each, found by looking."""

import sys
from functools import cache

from prism.architectures.architecture import Architecture, count_parameters
from prism.discovery import choose, discover

__all__ = ["Architecture", "all_architectures", "count_parameters", "find_architecture"]

DEFAULT = "transformer"


@cache
def all_architectures() -> dict[str, type[Architecture]]:
    """Name -> class of the Transformer and of every architecture in this folder."""
    from prism.transformer import Transformer

    return {Transformer.name: Transformer, **discover(sys.modules[__name__], Architecture)}


def find_architecture(name: str) -> type[Architecture]:
    """The architecture called `name`, or an error that offers the nearest name."""
    return choose("architecture", name, all_architectures())
