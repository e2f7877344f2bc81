"""The scan of Algorithm 1 with its backward derived by hand: what a CPU trains with.

With u the mass after the branches, x = u + eps, h' = x^gamma / sum x^gamma and g the gradient of h':

    d    = g - <g, h'>                     the normalisation removes what is constant over bins
    a    = gamma (h' / x) d                gradient of u; a copied histogram gets just this
    dh_i = w_keep a_i + w_inc a_{i+1} + w_dec a_{i-1}, clamped at both ends
    dgamma = sum_i h'_i ln(x_i) d_i

The gradient through the total mass of h is the same for every bin, and the normalisation one step earlier removes it;
only `start`, which no normalisation precedes, receives it.

Support grows. From a start with all its mass near offset 0, mass is one bin further out after each token; what lies
beyond holds one floor value, epsilon's, the same in every bin. So a step computes the bins that mass can have
reached, and fills in the floor: half the work of a sequence. The floor's own gradients are dropped; they are of the
order of epsilon, as is what a clamped edge bin's floor differs by. Where that would show (in float64, with a large
epsilon, or for a cursor that hardly sharpens, whose floor rises), and where mass can be anywhere (in a later chunk, by
a copy, from a start that is learned), all bins are computed.

Dimensions: time; bins; n = a block of chains (batch x cursors). Tensors are kept [time, bins, n], so that a shift by
one bin is a row offset and every inner loop runs over contiguous chains. The backward makes x and its logarithm again
from the histograms: keeping them costs more, in pages of memory first touched, than it saves. Chains are taken in
blocks, so that a few of these tensors fit in the cache and are still large enough to divide among threads.
"""

import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

FLOOR_WEIGHT = 1e-6  # how much the bins beyond the support may hold, times their logarithm: float32 cannot tell
BLOCK_ELEMENTS = 1 << 19  # bins x chains worked on at once: 2 MiB of float32 (measured: smaller blocks thread badly)

# Bytes from which the C library gives freed memory back at once; getting it again costs more than half a scan where
# the system is slow to hand out pages. So up to SPARES such blocks are kept, and used again once nobody holds them.
LARGE, SPARES = 32 << 20, 2
_spares: list[torch.UntypedStorage] = []
_choosing = threading.Lock()

Weights = Float[Tensor, "6 n"]
Row = Float[Tensor, "bins n"]


def scan_with_adjoint(
    start: Float[Tensor, "batch cursors bins"],
    weights: Float[Tensor, "batch cursors time 6"],
    gamma: Float[Tensor, " cursors"],
    copied: Float[Tensor, "batch cursors time bins"] | None = None,
    epsilon: float = 1e-8,
) -> Float[Tensor, "batch cursors time bins"]:
    """`histogram_scan` by the hand-derived autograd function. The result is a view of [time, bins, chains] storage."""
    batch, cursors, bins = start.shape
    time = weights.shape[2]
    histograms = _Scan.apply(
        start.permute(2, 0, 1).reshape(bins, batch * cursors).contiguous(),
        weights.permute(2, 3, 0, 1).reshape(time, 6, batch * cursors).contiguous(),
        gamma.expand(batch, cursors).reshape(batch * cursors),
        None if copied is None else copied.permute(2, 3, 0, 1).reshape(time, bins, batch * cursors),
        epsilon,
    )
    return histograms.view(time, bins, batch, cursors).permute(2, 3, 0, 1)


def _memory_for_histograms(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory: that of earlier histograms, if it is large and they are gone, or new."""
    size = math.prod(shape) * like.element_size()
    holders: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    # In deterministic mode PyTorch fills new memory, so that nothing rests on what was there before.
    if size < LARGE or like.is_cuda or holders is None or torch.are_deterministic_algorithms_enabled():
        return like.new_empty(shape)
    with _choosing:
        free = [one for one in _spares if size <= one.nbytes() <= 2 * size and holders(one._cdata) == 1]
        storage = free[0] if free else torch.UntypedStorage(size)
        _spares[:] = [storage, *(one for one in _spares if one is not storage)][:SPARES]
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def _blocks(start: Row) -> list[slice]:
    bins, chains = start.shape
    if start.is_cuda:  # no cache to stay in, and every block is launches of its own
        return [slice(0, chains)]
    # Few, even blocks: a last block of a handful of chains would cost as many kernel launches as a full one.
    count = max(1, round(bins * chains / BLOCK_ELEMENTS))
    size = max(1, -(-chains // count))
    return [slice(first, min(first + size, chains)) for first in range(0, chains, size)]


class Window(NamedTuple):
    """The bins first..end-1 that mass can have reached, of all `bins`."""

    first: int
    end: int
    bins: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.end)

    @property
    def outside(self) -> int:
        return self.bins - (self.end - self.first)

    @property
    def with_lower(self) -> tuple[slice, slice]:
        """The bins that have a neighbour below, and those neighbours."""
        first = max(self.first, 1)
        return slice(first, self.end), slice(first - 1, self.end - 1)

    @property
    def with_upper(self) -> tuple[slice, slice]:
        """The bins that have a neighbour above, and those neighbours."""
        end = min(self.end, self.bins - 1)
        return slice(self.first, end), slice(self.first + 1, end + 1)


def _windows(reach: int, time: int, bins: int) -> list[Window]:
    """The window of each step, for a start with its mass within `reach` of the middle."""
    middle, furthest = bins // 2, range(reach + 1, reach + time + 1)
    return [Window(max(0, middle - far), min(bins, middle + far + 1), bins) for far in furthest]


def _reach(start: Row, gamma: Float[Tensor, " n"], epsilon: float, anywhere: bool) -> int:
    """How far from the middle the start has mass; all the way, where the floor is to be computed bin by bin."""
    bins = start.shape[0]
    if anywhere or start.dtype != torch.float32 or gamma.numel() == 0 or start.is_cuda:  # which would have to wait
        return bins
    floor = epsilon * bins  # to the power gamma: the mass of a floor under a histogram as flat as can be
    if floor >= 1 or (epsilon and -math.log(epsilon) * floor ** float(gamma.min()) > FLOOR_WEIGHT):
        return bins
    occupied = (start != 0).any(1).nonzero()
    return int((occupied - bins // 2).abs().max()) if occupied.numel() else 0


def _move(out: Row, histogram: Row, weights: Weights, copied: Row | None, epsilon: Tensor, window: Window) -> None:
    """out = u + eps in the window: every branch of Algorithm 1 applied to a histogram whose total mass is 1."""
    reset_increment, reset_keep, reset_decrement, increment, keep, decrement = weights
    middle, last = window.bins // 2, window.bins - 1
    torch.addcmul(epsilon, histogram[window.rows], keep, out=out[window.rows])
    upper, lower = window.with_lower
    out[upper].addcmul_(histogram[lower], increment)
    lower, upper = window.with_upper
    out[lower].addcmul_(histogram[upper], decrement)
    if window.end > last:
        out[last].addcmul_(histogram[last], increment)
    if window.first == 0:
        out[0].addcmul_(histogram[0], decrement)
    out[min(middle + 1, last)].add_(reset_increment)
    out[middle].add_(reset_keep)
    out[max(middle - 1, 0)].add_(reset_decrement)
    if copied is not None:
        out.add_(copied)


def _sharpen(
    out: Row, moved: Row, gamma: Float[Tensor, " n"], floor: Float[Tensor, " n"] | None, window: Window
) -> None:
    """out = moved^gamma / its sum: `moved` in the window, which is overwritten, and `floor` in each bin outside."""
    powers = torch.log2(moved[window.rows], out=moved[window.rows]).mul_(gamma)
    peak = powers.amax(0)  # the largest power becomes 1: nothing overflows, and not everything underflows
    total = powers.sub_(peak).exp2_().sum(0)
    if floor is not None:
        floor = floor.log2().mul_(gamma).sub_(peak).exp2_()  # too little for the total to notice
        floor.div_(total)
        out[: window.first] = floor
        out[window.end :] = floor
    torch.div(powers, total, out=out[window.rows])


def _move_adjoint(out: Row, gradient: Row, weights: Weights, upstream: Row | None, window: Window) -> None:
    """out = upstream + the gradient of the histogram in its window: `_move` transposed."""
    _, _, _, increment, keep, decrement = weights
    rows, last = window.rows, window.bins - 1
    if upstream is None:
        torch.mul(gradient[rows], keep, out=out[rows])
    else:
        torch.addcmul(upstream[rows], gradient[rows], keep, out=out[rows])
    lower, upper = window.with_upper
    out[lower].addcmul_(gradient[upper], increment)
    upper, lower = window.with_lower
    out[upper].addcmul_(gradient[lower], decrement)
    if window.end > last:
        out[last].addcmul_(gradient[last], increment)
    if window.first == 0:
        out[0].addcmul_(gradient[0], decrement)


def _weight_gradients(out: Weights, gradient: Row, histogram: Row, scratch: Row, window: Window) -> None:
    """out = the gradient of the six branch weights, for a histogram whose total mass is 1."""
    middle, last = window.bins // 2, window.bins - 1
    out[0] = gradient[min(middle + 1, last)]
    out[1] = gradient[middle]
    out[2] = gradient[max(middle - 1, 0)]
    upper, lower = window.with_lower
    torch.sum(torch.mul(gradient[upper], histogram[lower], out=scratch[upper]), 0, out=out[3])
    torch.sum(torch.mul(gradient[window.rows], histogram[window.rows], out=scratch[window.rows]), 0, out=out[4])
    lower, upper = window.with_upper
    torch.sum(torch.mul(gradient[lower], histogram[upper], out=scratch[lower]), 0, out=out[5])
    if window.end > last:
        out[3].addcmul_(gradient[last], histogram[last])
    if window.first == 0:
        out[5].addcmul_(gradient[0], histogram[0])


def _with_total(weights: Float[Tensor, "time 6 n"], total: Float[Tensor, " n"]) -> Float[Tensor, "time 6 n"]:
    """Weights whose first step carries the start's total mass in its reset branches; later totals are 1."""
    if weights.shape[0] == 0:
        return weights
    scaled = weights.clone()
    scaled[0, :3] *= total
    return scaled


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: FunctionCtx,
        start: Row,
        weights: Float[Tensor, "time 6 n"],
        gamma: Float[Tensor, " n"],
        copied: Float[Tensor, "time bins n"] | None,
        epsilon: float,
    ) -> Float[Tensor, "time bins n"]:
        time, (bins, chains) = weights.shape[0], start.shape
        histograms = _memory_for_histograms(start, time, bins, chains)
        scaled, eps = _with_total(weights, start.sum(0)), start.new_full((), epsilon)
        anywhere = copied is not None or ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        windows = _windows(_reach(start, gamma, epsilon, anywhere), time, bins)
        for block in _blocks(start):
            previous, exponent = start[:, block], gamma[block]
            moved = torch.empty_like(previous)
            for t, window in enumerate(windows):
                step, out = scaled[t, :, block], histograms[t, :, block]
                _move(moved, previous, step, None if copied is None else copied[t, :, block], eps, window)
                floor = torch.addcmul(eps, previous[0], step[3:].sum(0)) if window.outside else None
                _sharpen(out, moved, exponent, floor, window)
                previous = out
        ctx.save_for_backward(start, weights, gamma, copied, histograms)  # type: ignore[attr-defined, arg-type]
        ctx.epsilon, ctx.windows = epsilon, windows  # type: ignore[attr-defined]
        return histograms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, upstream: Float[Tensor, "time bins n"]) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        start, weights, gamma, copied, histograms = ctx.saved_tensors  # type: ignore[attr-defined]
        epsilon = ctx.epsilon  # type: ignore[attr-defined]
        total = start.sum(0)
        scaled = _with_total(weights, total)
        grad_weights, grad_gamma = torch.empty_like(weights), torch.zeros_like(gamma)
        grad_start = torch.empty_like(start) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        grad_copied = None if copied is None else torch.empty_like(copied)
        for block in _blocks(start):
            carried = _backward_block(
                _Block(start, scaled, copied, histograms, upstream, block), ctx.windows, gamma[block], epsilon,  # type: ignore[attr-defined]
                grad_weights[:, :, block], grad_gamma[block],
                None if grad_copied is None else grad_copied[:, :, block],
            )
            if grad_start is not None:
                grad_start[:, block] = carried
        if weights.shape[0]:
            # The start's total mass feeds the reset branches of the first step.
            if grad_start is not None:
                grad_start += (grad_weights[0, :3] * weights[0, :3]).sum(0)
            grad_weights[0, :3] *= total
        return grad_start, grad_weights, grad_gamma, grad_copied, None


class _Block:
    """The tensors of a scan seen through one block of chains."""

    def __init__(
        self, start: Row, weights: Tensor, copied: Tensor | None, histograms: Tensor, upstream: Tensor,
        block: slice,
    ) -> None:
        self.start, self.weights = start[:, block], weights[:, :, block]
        self.copied = None if copied is None else copied[:, :, block]
        self.histograms, self.upstream = histograms[:, :, block], upstream[:, :, block]

    def before(self, t: int) -> Row:
        return self.histograms[t - 1] if t else self.start


def _backward_block(
    scan: _Block,
    windows: list[Window],
    gamma: Float[Tensor, " n"],
    epsilon: float,
    grad_weights: Float[Tensor, "time 6 n"],
    grad_gamma: Float[Tensor, " n"],
    grad_copied: Float[Tensor, "time bins n"] | None,
) -> Row:
    """Walks the block back in time to the gradient of its start, meaningful in the first window alone.

    The other gradients are written in place. Names follow the module's docstring.
    """
    time = len(windows)
    x, a, scratch = (torch.empty_like(scan.start) for _ in range(3))
    row = torch.empty_like(gamma)
    eps, tiny = x.new_full((), epsilon), torch.finfo(x.dtype).tiny
    carried = scan.upstream[time - 1].clone() if time else torch.zeros_like(scan.start)
    for t in reversed(range(time)):
        window, rows = windows[t], windows[t].rows
        histogram, previous = scan.histograms[t][rows], scan.before(t)
        torch.mul(carried[rows], histogram, out=scratch[rows])
        torch.sum(scratch[rows], 0, out=row)
        torch.addcmul(scratch[rows], histogram, row, value=-1, out=a[rows])  # h' d
        _move(x, previous, scan.weights[t], None if scan.copied is None else scan.copied[t], eps, window)
        if epsilon == 0:  # an empty bin has no logarithm, and no gradient
            x[rows].clamp_min_(tiny)
        torch.log(x[rows], out=scratch[rows]).mul_(a[rows])
        torch.sum(scratch[rows], 0, out=row)
        grad_gamma.add_(row)
        a[rows].div_(x[rows]).mul_(gamma)
        _weight_gradients(grad_weights[t], a, previous, scratch, window)
        if grad_copied is not None:
            grad_copied[t] = a
        _move_adjoint(carried, a, scan.weights[t], scan.upstream[t - 1] if t else None, windows[max(t - 1, 0)])
    return carried
