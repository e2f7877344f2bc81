"""PRISM: relative positions as distributions that learned gates move, for PyTorch Transformers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prism.cursors import PrismConfig
    from prism.encodings.prism import Prism
    from prism.ops.histogram import histogram_scan
    from prism.transformer import Transformer

__all__ = ["Prism", "PrismConfig", "Transformer", "histogram_scan"]
__version__ = "0.1.0"

_HOME = {
    "Prism": "prism.encodings.prism",
    "PrismConfig": "prism.cursors",
    "Transformer": "prism.transformer",
    "histogram_scan": "prism.ops.histogram",
}


def __getattr__(name: str) -> Any:
    # Late, because these bring torch with them and `prism tasks` should not wait for it.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'prism' has no attribute '{name}'")
