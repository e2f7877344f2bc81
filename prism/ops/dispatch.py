"""Which form of an operation runs: what asks and what can be had."""

import importlib.util
import os
import warnings
from collections.abc import Iterable
from functools import lru_cache

from prism.errors import UserError, unknown


@lru_cache
def has_triton() -> bool:
    """Whether Triton is installed: it comes with PyTorch's CUDA builds for Linux."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter was asked for: kernels then run on a CPU, slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def takes_triton(method: str, methods: Iterable[str], on_gpu: bool, refusal: str | None) -> bool:
    """Whether to use a kernel. `refusal` says why it can't be had; for `auto` on a GPU that is said, once."""
    if method not in methods:
        raise unknown("method", method, methods)
    if method == "triton" and refusal is not None:
        raise UserError(f"method 'triton' {refusal}; 'auto' or 'reference' takes this")
    if method == "auto" and on_gpu and refusal is not None:
        _say_once(refusal)
    return method == "triton" or (method == "auto" and on_gpu and refusal is None)


@lru_cache
def _say_once(refusal: str) -> None:
    warnings.warn(f"running without the fused kernel, which {refusal}", stacklevel=4)
