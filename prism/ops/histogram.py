"""The histogram filter: how a distribution over offsets moves when one more token is read.

Dimensions: batch; cursors; time; bins = 2P + 1 offsets -P..P with 0 in the middle; branches = the six of `Branch`.

Four forms of one update live behind `histogram_scan`. `histogram_step` is Algorithm 1 line by line, for reading and
as the oracle; "reference" loops over it under autograd; "adjoint" (histogram_adjoint.py) carries a backward derived
by hand and is what a CPU trains with; "triton" (histogram_triton.py) is for GPUs.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from prism.ops.dispatch import has_triton, interpreted, takes_triton
from prism.ops.histogram_adjoint import scan_with_adjoint

Method = Literal["auto", "reference", "adjoint", "triton"]

MOST_BINS = 1408  # what a warp's registers hold, and so the widest support whose kernel has a gradient


class Branch(IntEnum):
    """The six ways mass can move in one step: from the origin after a reset, or from where it stands."""

    RESET_INCREMENT = 0
    RESET_KEEP = 1
    RESET_DECREMENT = 2
    INCREMENT = 3
    KEEP = 4
    DECREMENT = 5


def branch_weights(
    reset: Float[Tensor, "*chains"],
    action: Float[Tensor, "*chains 3"],
    no_copy: Float[Tensor, "*chains"] | None = None,
) -> Float[Tensor, "*chains 6"]:
    """Gate probabilities -> the weight of each `Branch`. `action` is ordered increment, keep, decrement.

    Algorithm 1, parts (2) and (3): reset and action are independent; part (4): what is not copied scales them all.
    """
    weights = torch.cat((reset.unsqueeze(-1) * action, (1 - reset).unsqueeze(-1) * action), dim=-1)
    return weights if no_copy is None else weights * no_copy.unsqueeze(-1)


def histogram_step(
    histogram: Float[Tensor, "*chains bins"],
    weights: Float[Tensor, "*chains 6"],
    gamma: Float[Tensor, "*chains"],
    copied: Float[Tensor, "*chains bins"] | None = None,
    epsilon: float = 1e-8,
) -> Float[Tensor, "*chains bins"]:
    """One token: h_t -> h_{t+1} (Algorithm 1, alg:histogram)."""
    bins = histogram.shape[-1]
    middle, last = bins // 2, bins - 1
    total = histogram.sum(-1)  # (1) aggregate mass

    moved = torch.zeros_like(histogram)  # (2) reset: re-centre at offset 0, then take one step
    for target, branch in (
        (min(middle + 1, last), Branch.RESET_INCREMENT),
        (middle, Branch.RESET_KEEP),
        (max(middle - 1, 0), Branch.RESET_DECREMENT),
    ):
        moved[..., target] = moved[..., target] + total * weights[..., branch]

    increment, keep, decrement = (  # (3) no reset: step from where the mass stands, clamped at both ends
        histogram * weights[..., branch, None] for branch in (Branch.INCREMENT, Branch.KEEP, Branch.DECREMENT)
    )
    moved = moved + keep
    moved[..., 1:] = moved[..., 1:] + increment[..., :-1]
    moved[..., last] = moved[..., last] + increment[..., last]
    moved[..., :-1] = moved[..., :-1] + decrement[..., 1:]
    moved[..., 0] = moved[..., 0] + decrement[..., 0]

    if copied is not None:  # (4) copy: jump to where the paired key cursor stood
        moved = moved + copied
    return sharpen(moved, gamma, epsilon)


def sharpen(
    mass: Float[Tensor, "*chains bins"], gamma: Float[Tensor, "*chains"], epsilon: float = 1e-8
) -> Float[Tensor, "*chains bins"]:
    """(mass + epsilon)^gamma, normalised (Algorithm 1 (5)).

    As a softmax of gamma * log, which is the same number and cannot underflow in every bin at once, as the power
    does for gamma above about 17 at 171 bins.
    """
    return torch.softmax(gamma.unsqueeze(-1) * torch.log(mass + epsilon), dim=-1)


def histogram_scan(
    start: Float[Tensor, "batch cursors bins"],
    weights: Float[Tensor, "batch cursors time 6"],
    gamma: Float[Tensor, " cursors"],
    copied: Float[Tensor, "batch cursors time bins"] | None = None,
    epsilon: float = 1e-8,
    method: Method = "auto",
) -> Float[Tensor, "batch cursors time bins"]:
    """The histograms after each token of a sequence, from the one before the first token.

    Token t's own gates are already in histogram t. The last one is the `start` of a later chunk, and chunks give
    what the whole would.
    """
    given = [one for one in (start, weights, gamma, copied) if one is not None]
    if takes_triton(method, get_args(Method), start.is_cuda, _triton_refuses(given)):
        if start.shape[-1] > MOST_BINS:
            from prism.ops.histogram_long import scan_long

            return scan_long(start, weights, gamma, copied, epsilon).transpose(1, 2)
        from prism.ops.histogram_triton import scan_with_triton

        return scan_with_triton(start, weights, gamma, copied, epsilon)
    if method == "reference":
        return scan_step_by_step(start, weights, gamma, copied, epsilon)
    return scan_with_adjoint(start, weights, gamma, copied, epsilon)


def _triton_refuses(given: list[Tensor]) -> str | None:
    """Why the kernels cannot take a scan of these, for the end of a sentence, or None if they can."""
    start = given[0]
    if not has_triton():
        return "needs the package triton, which is not installed"
    if not (start.is_cuda or interpreted()):
        return f"needs CUDA tensors, got one on {start.device.type} (TRITON_INTERPRET=1 runs it there, slowly)"
    if odd := [str(one.dtype) for one in given if one.dtype != torch.float32]:
        return f"needs float32, got {odd[0]}".replace("torch.", "")
    learning = torch.is_grad_enabled() and any(one.requires_grad for one in given)
    if learning and start.shape[-1] > MOST_BINS:
        return (f"has a gradient for supports of at most {MOST_BINS} bins, sequences of {MOST_BINS // 2 - 1} tokens, "
                f"got {start.shape[-1]}")
    return None


def scan_step_by_step(
    start: Float[Tensor, "batch cursors bins"],
    weights: Float[Tensor, "batch cursors time 6"],
    gamma: Float[Tensor, " cursors"],
    copied: Float[Tensor, "batch cursors time bins"] | None = None,
    epsilon: float = 1e-8,
    step: Callable[..., Tensor] = histogram_step,
) -> Float[Tensor, "batch cursors time bins"]:
    """`histogram_step` in a loop, under autograd: the reference the faster forms are held against.

    `step` may be the same, compiled.
    """
    histograms, histogram = [], start
    per_chain = gamma.expand(start.shape[:2])
    for t, now in enumerate(weights.unbind(2)):  # unbound: a slice a step would have a gradient of the whole each
        histogram = step(histogram, now, per_chain, None if copied is None else copied[:, :, t], epsilon)
        histograms.append(histogram)
    return torch.stack(histograms, dim=2) if histograms else start.unsqueeze(2)[:, :, :0]


def one_hot_start(
    batch: int, cursors: int, capacity: int, *, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "batch cursors bins"]:
    """All mass at offset 0 of the symmetric support -capacity..capacity."""
    start = torch.zeros(batch, cursors, 2 * capacity + 1, dtype=dtype, device=device)
    start[..., capacity] = 1
    return start


def displacement(
    earlier: Float[Tensor, "*chains bins"], later: Float[Tensor, "*chains bins"]
) -> Float[Tensor, "*chains displacements"]:
    """P(D = d) for d in -(bins-1)..bins-1: the cross-correlation of two histograms (eq:rel-dist-pmf-path).

    This treats the two positions as independent. The paper calls it the exact path sum; in general it is not, only
    for instance when `earlier` is one-hot and no reset lies between (PAPER.md, section 8).
    """
    bins = earlier.shape[-1]
    rows = earlier.reshape(1, -1, bins)
    padded = torch.nn.functional.pad(later.reshape(1, -1, bins), (bins - 1, bins - 1))
    correlated = torch.nn.functional.conv1d(padded, rows.transpose(0, 1), groups=rows.shape[1])
    return correlated.reshape(*earlier.shape[:-1], 2 * bins - 1)


def edge_mass(histogram: Float[Tensor, "*chains bins"]) -> Float[Tensor, "*chains"]:
    """The mass in the two outermost bins, where the clamps pile up what would have left the support."""
    return histogram[..., 0] + histogram[..., -1]
