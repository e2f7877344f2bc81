"""The scan forward over supports too wide for a warp's registers: evaluation at thousands of tokens, on a GPU.

One program holds one chain and walks its row tile by tile, three passes a step, each thread over its own bins:

    y = gamma log2(u + epsilon), kept where the histogram will stand;  its maximum
    the sum of 2^(y - maximum)
    h' = 2^(y - maximum) / sum

Only the first reads what other threads have written, one step earlier: the barrier stands between steps. A row stays
in the cache from one step to the next. There is no backward: training keeps to supports that fit in registers
(histogram_kernels.py) or takes the adjoint.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
from typing import no_type_check

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from prism.errors import UserError
from prism.ops.histogram_kernels import _exp2, _log2
from prism.ops.histogram_triton import INTERPRETED

TILE, WARPS = 1024, 4


@triton.jit
@no_type_check
def _logarithms(previous, row, copied, w, exponent, epsilon, L, TILE: tl.constexpr, COPY: tl.constexpr,
                FAST: tl.constexpr):
    """y of every bin, stored; and the largest. `w` are the six weights."""
    top = tl.full([TILE], float("-inf"), tl.float32)
    middle = L // 2
    for first in range(0, L, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < L
        h = tl.load(previous + at, inside, 0.0)
        u = w[4] * h + epsilon
        u += w[3] * tl.load(previous + at - 1, inside & (at > 0), 0.0)
        u += w[5] * tl.load(previous + at + 1, at < L - 1, 0.0)
        u += tl.where(at == 0, w[5] * h, 0.0) + tl.where(at == L - 1, w[3] * h, 0.0)  # the clamps
        u += tl.where(at == tl.minimum(middle + 1, L - 1), w[0], 0.0)
        u += tl.where(at == middle, w[1], 0.0)
        u += tl.where(at == tl.maximum(middle - 1, 0), w[2], 0.0)
        if COPY:
            u += tl.load(copied + at, inside, 0.0)
        y = exponent * _log2(u, FAST)
        top = tl.where(inside, tl.maximum(top, y), top)
        tl.store(row + at, y, inside)
    return tl.max(top, 0)


@triton.jit
@no_type_check
def _scan_rows(start, weights, gamma, copied, rows, cursors, time, weight_b, weight_c, weight_t, weight_6,
               copied_b, copied_c, copied_t, epsilon, L, TILE: tl.constexpr, COPY: tl.constexpr, FAST: tl.constexpr):
    chain = tl.program_id(0).to(tl.int64)
    batch, cursor = chain // cursors, chain % cursors
    exponent = tl.load(gamma + cursor)
    weight = weights + batch * weight_b + cursor * weight_c
    copying = copied + batch * copied_b + cursor * copied_c
    previous = start + chain * L
    row = rows + (batch * time * cursors + cursor) * L
    mass = tl.zeros([TILE], tl.float32)
    for first in range(0, L, TILE):
        at = first + tl.arange(0, TILE)
        mass += tl.load(previous + at, at < L, 0.0)
    total = tl.sum(mass, 0)
    for _ in range(time):
        w = (tl.load(weight) * total, tl.load(weight + weight_6) * total, tl.load(weight + 2 * weight_6) * total,
             tl.load(weight + 3 * weight_6), tl.load(weight + 4 * weight_6), tl.load(weight + 5 * weight_6))
        top = _logarithms(previous, row, copying, w, exponent, epsilon, L, TILE, COPY, FAST)
        powers = tl.zeros([TILE], tl.float32)
        for first in range(0, L, TILE):
            at = first + tl.arange(0, TILE)
            powers += _exp2(tl.load(row + at, at < L, float("-inf")) - top, FAST)
        inverse = 1.0 / tl.sum(powers, 0)
        for first in range(0, L, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(row + at, _exp2(tl.load(row + at, at < L, 0.0) - top, FAST) * inverse, at < L)
        tl.debug_barrier()  # the next step's neighbours are other threads' bins
        total = 1.0
        previous = row
        row += cursors * L
        weight += weight_t
        copying += copied_t


@torch.library.custom_op("prism::scan_long", mutates_args=())
def scan_long(start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, epsilon: float) -> Tensor:
    """Histograms [batch, time, cursors, bins] after each token; weights are [batch, cursors, time, 6]."""
    batch, cursors, time, _ = weights.shape
    bins = start.shape[2]
    rows = start.new_empty(batch, time, cursors, bins)
    if rows.numel():
        start, gamma = start.contiguous(), gamma.contiguous()
        given = start if copied is None else copied.contiguous()
        copied_strides = (0, 0, 0) if copied is None else given.stride()[:3]
        with torch.cuda.device_of(start):
            _scan_rows[(batch * cursors,)](
                start, weights, gamma, given, rows, cursors, time, *weights.stride(), *copied_strides, epsilon, bins,
                TILE=TILE, COPY=copied is not None, FAST=not INTERPRETED, num_warps=WARPS,
            )
    return rows


@scan_long.register_fake
def _(start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, epsilon: float) -> Tensor:
    batch, cursors, time, _ = weights.shape
    return start.new_empty(batch, time, cursors, start.shape[2])


def _no_gradient(ctx, inputs, output):  # type: ignore[no-untyped-def]
    raise UserError("the scan over long supports has no gradient; method 'adjoint' has")


scan_long.register_autograd(lambda ctx, upstream: None, setup_context=_no_gradient)
