"""The scan of Algorithm 1 with its backward derived by hand: what a CPU trains with.

With u the mass after the branches, x = u + eps, h' = x^gamma / sum x^gamma and g the gradient of h':

    d    = g - <g, h'>                     the normalisation removes what is constant over bins
    a    = gamma (h' / x) d                gradient of u; a copied histogram gets just this
    dh_i = w_keep a_i + w_inc a_{i+1} + w_dec a_{i-1}, clamped at both ends
    dgamma = sum_i h'_i ln(x_i) d_i

The gradient through the total mass of h is the same for every bin, and the normalisation one step earlier removes it;
only `start`, which no normalisation precedes, receives it.

Dimensions: time; bins; n = a block of chains (batch x cursors). Tensors are kept [time, bins, n], so that a shift by
one bin is a row offset and every inner loop runs over contiguous chains. Beside the histograms, ln x is kept for the
backward: the logarithm is the dearest operation here, and x itself is cheaper to make again. Chains are taken in
blocks, so that a few of these tensors fit in the cache and are still large enough to divide among threads.
"""


import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

BLOCK_ELEMENTS = 1 << 19  # bins x chains worked on at once: 2 MiB of float32 (measured: smaller blocks thread badly)

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


def _blocks(bins: int, chains: int) -> list[slice]:
    # Few, even blocks: a last block of a handful of chains would cost as many kernel launches as a full one.
    count = max(1, round(bins * chains / BLOCK_ELEMENTS))
    size = max(1, -(-chains // count))
    return [slice(first, min(first + size, chains)) for first in range(0, chains, size)]


def _move(out: Row, histogram: Row, weights: Weights, copied: Row | None, epsilon: Tensor) -> None:
    """out = u + eps: every branch of Algorithm 1 applied to a histogram whose total mass is 1."""
    reset_increment, reset_keep, reset_decrement, increment, keep, decrement = weights
    bins = out.shape[0]
    middle, last = bins // 2, bins - 1
    torch.addcmul(epsilon, histogram, keep, out=out)
    out[1:].addcmul_(histogram[:-1], increment)
    out[last].addcmul_(histogram[last], increment)
    out[:-1].addcmul_(histogram[1:], decrement)
    out[0].addcmul_(histogram[0], decrement)
    out[min(middle + 1, last)].add_(reset_increment)
    out[middle].add_(reset_keep)
    out[max(middle - 1, 0)].add_(reset_decrement)
    if copied is not None:
        out.add_(copied)


def _move_adjoint(out: Row, gradient: Row, weights: Weights, upstream: Row | None) -> None:
    """out = upstream + the gradient of the histogram, given that of the moved mass: the transpose of `_move`."""
    _, _, _, increment, keep, decrement = weights
    if upstream is None:
        torch.mul(gradient, keep, out=out)
    else:
        torch.addcmul(upstream, gradient, keep, out=out)
    out[:-1].addcmul_(gradient[1:], increment)
    out[-1].addcmul_(gradient[-1], increment)
    out[1:].addcmul_(gradient[:-1], decrement)
    out[0].addcmul_(gradient[0], decrement)


def _weight_gradients(out: Weights, gradient: Row, histogram: Row, scratch: Row) -> None:
    """out = the gradient of the six branch weights, for a histogram whose total mass is 1."""
    bins = gradient.shape[0]
    middle, last = bins // 2, bins - 1
    out[0] = gradient[min(middle + 1, last)]
    out[1] = gradient[middle]
    out[2] = gradient[max(middle - 1, 0)]
    torch.mul(gradient[1:], histogram[:-1], out=scratch[1:])
    torch.mul(gradient[last], histogram[last], out=scratch[0])
    torch.sum(scratch, 0, out=out[3])
    torch.mul(gradient, histogram, out=scratch)
    torch.sum(scratch, 0, out=out[4])
    torch.mul(gradient[:-1], histogram[1:], out=scratch[:-1])
    torch.mul(gradient[0], histogram[0], out=scratch[last])
    torch.sum(scratch, 0, out=out[5])


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
        histograms = start.new_empty(time, bins, chains)
        scaled, eps = _with_total(weights, start.sum(0)), start.new_tensor(epsilon)
        for block in _blocks(bins, chains):
            previous, exponent = start[:, block], gamma[block]
            moved = torch.empty_like(previous)
            for t in range(time):
                _move(moved, previous, scaled[t, :, block], None if copied is None else copied[t, :, block], eps)
                torch.log(moved, out=moved).mul_(exponent)
                previous = torch.softmax(moved, 0, out=histograms[t, :, block])  # see `sharpen`
        ctx.save_for_backward(start, weights, gamma, copied, histograms)  # type: ignore[attr-defined, arg-type]
        ctx.epsilon = epsilon  # type: ignore[attr-defined]
        return histograms

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: FunctionCtx, upstream: Float[Tensor, "time bins n"]) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        start, weights, gamma, copied, histograms = ctx.saved_tensors  # type: ignore[attr-defined]
        eps = start.new_tensor(ctx.epsilon)  # type: ignore[attr-defined]
        total = start.sum(0)
        scaled = _with_total(weights, total)
        grad_start, grad_weights = torch.zeros_like(start), torch.empty_like(weights)
        grad_gamma = torch.zeros_like(gamma)
        grad_copied = None if copied is None else torch.empty_like(copied)
        for block in _blocks(*start.shape):
            _backward_block(
                _Block(start, scaled, copied, histograms, upstream, block), gamma[block], eps,
                grad_start[:, block], grad_weights[:, :, block], grad_gamma[block],
                None if grad_copied is None else grad_copied[:, :, block],
            )
        if weights.shape[0]:
            # The start's total mass feeds the reset branches of the first step.
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
    gamma: Float[Tensor, " n"],
    eps: Tensor,
    grad_start: Row,
    grad_weights: Float[Tensor, "time 6 n"],
    grad_gamma: Float[Tensor, " n"],
    grad_copied: Float[Tensor, "time bins n"] | None,
) -> None:
    """Walks the block back in time; every gradient is written in place. Names follow the module's docstring."""
    time = scan.weights.shape[0]
    x, a, scratch = (torch.empty_like(scan.start) for _ in range(3))
    row = torch.empty_like(gamma)
    tiny = torch.finfo(x.dtype).tiny
    carried = scan.upstream[time - 1].clone() if time else torch.zeros_like(scan.start)
    for t in reversed(range(time)):
        histogram, previous = scan.histograms[t], scan.before(t)
        torch.mul(carried, histogram, out=scratch)
        torch.sum(scratch, 0, out=row)
        torch.addcmul(scratch, histogram, row, value=-1, out=a)  # h' d
        _move(x, previous, scan.weights[t], None if scan.copied is None else scan.copied[t], eps)
        if eps == 0:  # an empty bin has no logarithm, and no gradient
            x.clamp_min_(tiny)
        torch.log(x, out=scratch).mul_(a)
        torch.sum(scratch, 0, out=row)
        grad_gamma.add_(row)
        a.div_(x).mul_(gamma)
        _weight_gradients(grad_weights[t], a, previous, scratch)
        if grad_copied is not None:
            grad_copied[t] = a
        _move_adjoint(carried, a, scan.weights[t], scan.upstream[t - 1] if t else None)
    grad_start.copy_(carried)
