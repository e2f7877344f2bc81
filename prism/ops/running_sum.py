"""Sums from the beginning or to the end, by doubling: log2(time) additions of tensors.

Not `torch.cumsum`, which CUDA refuses where deterministic algorithms are asked for, nor a product with a triangle of
ones, which a GPU in tf32 would round to ten bits.

Dimensions: time = the axis that is summed along, whatever it counts.
"""

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad


def running_sum(x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
    """Sums of what lies at a place or before it."""
    shift = 1
    while shift < x.shape[-1]:
        x = x + pad(x[..., :-shift], (shift, 0))
        shift *= 2
    return x


def sum_from_here(x: Float[Tensor, "*batch time"]) -> Float[Tensor, "*batch time"]:
    """Sums of what lies at a place or after it."""
    shift = 1
    while shift < x.shape[-1]:
        x = x + pad(x[..., shift:], (0, shift))
        shift *= 2
    return x
