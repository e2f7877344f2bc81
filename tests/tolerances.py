"""How close is close: the one table, and the one comparison made with it."""

import math

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

# ||out - ref|| / ||ref|| that rounding may explain in a chain of a few dozen operations.
RELATIVE_ERROR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}

# What the fused scan promises against float64: histograms, and gradients by the precision of the rows it keeps.
SCAN_HISTOGRAM = 1e-6
SCAN_GRADIENT = {torch.float32: 1e-5, torch.float16: 5e-4}
# Position scores made at once keep histograms, tables and vectors in 16 bits: what that may cost the logits.
FUSED = 1e-3
# ... and the gradients: alpha's is a small difference of large sums, since what all keys of a query share cancels.
FUSED_GRADIENT = 5e-2


def relative_error(actual: Tensor, expected: Tensor | ArrayLike) -> float:
    """||actual - expected|| / ||expected||, in float64; NaN if either holds one."""
    out = actual.detach().to("cpu", torch.float64).numpy()
    kept = expected.detach().to("cpu", torch.float64) if isinstance(expected, Tensor) else expected
    ref = np.asarray(kept, dtype=np.float64)
    assert out.shape == ref.shape, f"shapes differ: {out.shape} and {ref.shape}"
    distance, size = float(np.linalg.norm(out - ref)), float(np.linalg.norm(ref))
    return distance / size if size else distance


def assert_close(
    actual: Tensor, expected: Tensor | ArrayLike, *, dtype: torch.dtype | None = None, tolerance: float | None = None,
    what: str = "result",
) -> None:
    """`actual` is `expected` but for the rounding of its dtype, or of `dtype`. A NaN is never close to anything.

    `tolerance` stands in for the table where a promise, not rounding, sets the bound.
    """
    bound = RELATIVE_ERROR[dtype or actual.dtype] if tolerance is None else tolerance
    error = relative_error(actual, expected)
    assert math.isfinite(error), f"{what}: not finite"
    assert error <= bound, f"{what}: relative error {error:.3g}, allowed {bound:.3g}"
