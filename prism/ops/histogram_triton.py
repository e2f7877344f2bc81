"""`histogram_scan` by the Triton kernels of histogram_kernels.py, as operators that autograd and the compiler see.

Dimensions: batch; cursors; time; bins; slots = cursors that share a tensor of rows, of which a scan fills those it
is told; columns = bins in the order of the kernel's lanes, padded.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Float32, Int
from torch import Tensor

from prism.errors import UserError
from prism.ops.histogram_kernels import scan_backward, scan_forward

INTERPRETED = not isinstance(scan_forward, triton.JITFunction)  # TRITON_INTERPRET=1: for tests without a GPU
LEAST = 1e-37  # stands in for an epsilon of 0 on the way back, where 0 times its logarithm would be NaN
PER_LANE = 24  # bins a thread holds while registers last; the backward needs about seven numbers for each


class Layout(NamedTuple):
    """How the bins of a chain are dealt out: `per_lane` neighbouring ones to each of `lanes` threads."""

    bins: int
    lanes: int
    per_lane: int
    half: bool  # rows are kept in 16 bits

    @property
    def columns(self) -> int:
        return self.lanes * self.per_lane

    @property
    def chains(self) -> int:
        return 32 // self.lanes

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.half else torch.float32


@lru_cache(maxsize=256)
def layout(bins: int, half: bool) -> Layout:
    """The fewest lanes that hold a support, so that the least is lost to what crosses between them."""
    lanes = next((lanes for lanes in (4, 8, 16) if bins <= lanes * PER_LANE), 32)
    per_lane = -(-bins // lanes)
    return Layout(bins, lanes, per_lane + per_lane % 2 * half, half)


def row_order(form: Layout) -> Int[Tensor, " columns"]:
    """The bin that stands in each column of a row; `bins` where a column is padding."""
    column = torch.arange(form.columns)
    if form.half:  # a lane's bins 2j and 2j + 1 share a 32-bit word
        word, second = column // 2, column % 2
        bin_ = word % form.lanes * form.per_lane + word // form.lanes * 2 + second
    else:
        bin_ = column % form.lanes * form.per_lane + column // form.lanes
    return bin_.clamp_max(form.bins)


@cache  # for good: a CUDA graph knows it by its address alone
def _columns_of_bins(form: Layout, device: torch.device) -> Int[Tensor, " bins"]:
    return row_order(form).argsort(stable=True)[: form.bins].to(device)


def scan_with_triton(
    start: Float32[Tensor, "batch cursors bins"],
    weights: Float32[Tensor, "batch cursors time 6"],
    gamma: Float32[Tensor, " cursors"],
    copied: Float32[Tensor, "batch cursors time bins"] | None = None,
    epsilon: float = 1e-8,
) -> Float32[Tensor, "batch cursors time bins"]:
    """`histogram_scan`, fused. For training prefer what never makes full-width histograms: position_bias.py."""
    form = layout(start.shape[-1], half=False)
    rows, _ = scan(start, weights.transpose(1, 2), gamma, copied, 0, epsilon, form.half)
    return rows.index_select(3, _columns_of_bins(form, rows.device)).transpose(1, 2)


def run_forward(
    start: Float32[Tensor, "batch cursors bins"],
    weights: Float32[Tensor, "batch time cursors 6"],
    gamma: Float32[Tensor, " cursors"],
    copied: Float32[Tensor, "batch cursors time width"] | None,
    first: int,
    epsilon: float,
    form: Layout,
    rows: Float[Tensor, "batch time slots columns"],
    places: Int[Tensor, " cursors"],
) -> Float32[Tensor, "batch time cursors"]:
    """Fills the rows at `places`; returns log2 of each step's normaliser. `copied` stands at bin `first` and after."""
    batch, time, cursors, _ = weights.shape
    normalisers = weights.new_empty(batch, time, cursors)
    if normalisers.numel() == 0:
        return normalisers
    start, gamma = start.contiguous(), gamma.contiguous()
    chains = batch * cursors
    with torch.cuda.device_of(start):
        scan_forward[(triton.cdiv(chains, form.chains),)](
            start, weights, gamma, start if copied is None else copied, places, rows, normalisers,
            chains, cursors, rows.shape[2], time, weights.stride(0), weights.stride(2), weights.stride(1),
            weights.stride(3), *_copy_arguments(copied, first), epsilon,
            L=form.bins, K=form.per_lane, LANES=form.lanes, CHAINS=form.chains, COPY=copied is not None,
            HALF=form.half, FAST=not INTERPRETED, num_warps=1,
        )
    return normalisers


def run_backward(
    start: Float32[Tensor, "batch cursors bins"],
    weights: Float32[Tensor, "batch time cursors 6"],
    gamma: Float32[Tensor, " cursors"],
    copied: Float32[Tensor, "batch cursors time width"] | None,
    first: int,
    epsilon: float,
    form: Layout,
    rows: Float[Tensor, "batch time slots columns"],
    places: Int[Tensor, " cursors"],
    normalisers: Float32[Tensor, "batch time cursors"],
    upstream: Float[Tensor, "batch time slots columns"],
    scales: Float32[Tensor, "batch time slots"] | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of start, weights, gamma and copied, from that of the rows; a 16-bit one comes with scales."""
    batch, time, cursors, _ = weights.shape
    grad_start = torch.empty_like(start, memory_format=torch.contiguous_format)
    grad_weights = weights.new_empty(weights.shape)
    grad_gamma = weights.new_empty(batch, cursors)
    grad_copied = None if copied is None else copied.new_empty(batch, time, cursors, copied.shape[3])
    if normalisers.numel() == 0:
        zeros = [torch.zeros_like(one) for one in (start, weights, gamma)]
        return zeros[0], zeros[1], zeros[2], None if copied is None else torch.zeros_like(copied)
    start, gamma = start.contiguous(), gamma.contiguous()
    chains = batch * cursors
    with torch.cuda.device_of(start):
        scan_backward[(triton.cdiv(chains, form.chains),)](
            start, weights, gamma, start if copied is None else copied, places, rows, normalisers,
            upstream, normalisers if scales is None else scales,
            grad_start, grad_weights, grad_gamma, grad_gamma if grad_copied is None else grad_copied,
            chains, cursors, rows.shape[2], time, weights.stride(0), weights.stride(2), weights.stride(1),
            weights.stride(3), *_copy_arguments(copied, first), max(epsilon, LEAST),
            L=form.bins, K=form.per_lane, LANES=form.lanes, CHAINS=form.chains, COPY=copied is not None,
            HALF=form.half, HALF_UPSTREAM=upstream.dtype == torch.float16, FAST=not INTERPRETED, num_warps=1,
        )
    return grad_start, grad_weights, grad_gamma.sum(0), None if grad_copied is None else grad_copied.transpose(1, 2)


def _copy_arguments(copied: Tensor | None, first: int) -> tuple[int, int, int, int, int]:
    if copied is None:
        return 0, 0, 0, 0, 0
    if copied.stride(3) != 1:
        raise UserError("the copied mass must be contiguous over its bins")
    return copied.stride(0), copied.stride(1), copied.stride(2), first, copied.shape[3]


@torch.library.custom_op("prism::scan", mutates_args=())
def scan(
    start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, first: int, epsilon: float, half: bool
) -> tuple[Tensor, Tensor]:
    """Rows of histograms [batch, time, cursors, columns], and log2 of the normalisers."""
    batch, time, cursors, _ = weights.shape
    form = layout(start.shape[-1], half)
    rows = weights.new_empty(batch, time, cursors, form.columns, dtype=form.dtype)
    places = torch.arange(cursors, dtype=torch.int32, device=start.device)
    copied = None if copied is None else copied.contiguous()
    return rows, run_forward(start, weights, gamma, copied, first, epsilon, form, rows, places)


@scan.register_fake
def _(start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, first: int, epsilon: float,
      half: bool) -> tuple[Tensor, Tensor]:
    form = layout(int(start.shape[-1]), half)  # compiled anew for each support: so are the kernels
    rows = weights.new_empty(*weights.shape[:3], form.columns, dtype=form.dtype)
    return rows, weights.new_empty(weights.shape[:3])


@torch.library.custom_op("prism::scan_backward", mutates_args=())
def scan_gradients(
    start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, rows: Tensor, normalisers: Tensor,
    upstream: Tensor, first: int, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of start, weights, gamma and copied (empty where nothing is copied)."""
    form = layout(start.shape[-1], rows.dtype == torch.float16)
    places = torch.arange(weights.shape[2], dtype=torch.int32, device=start.device)
    kept = None if copied is None else copied.contiguous()
    *found, of_copied = run_backward(
        start, weights, gamma, kept, first, epsilon, form, rows, places, normalisers, upstream.contiguous(), None
    )
    return found[0], found[1], found[2], start.new_empty(0) if of_copied is None else of_copied.contiguous()


@scan_gradients.register_fake
def _(start: Tensor, weights: Tensor, gamma: Tensor, copied: Tensor | None, rows: Tensor, normalisers: Tensor,
      upstream: Tensor, first: int, epsilon: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (torch.empty_like(start, memory_format=torch.contiguous_format), weights.new_empty(weights.shape),
            torch.empty_like(gamma), start.new_empty(0 if copied is None else copied.shape))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    start, weights, gamma, copied, ctx.first, ctx.epsilon, half = inputs
    if half:
        raise UserError("16-bit rows have no gradient of their own: it would underflow; use position_bias")
    ctx.save_for_backward(start, weights, gamma, copied, *output)
    ctx.set_materialize_grads(True)


def _backward(ctx, upstream, _):  # type: ignore[no-untyped-def]
    start, weights, gamma, copied, rows, normalisers = ctx.saved_tensors
    *found, of_copied = scan_gradients(
        start, weights, gamma, copied, rows, normalisers, upstream, ctx.first, ctx.epsilon
    )
    return (*found, None if copied is None else of_copied, None, None, None)


scan.register_autograd(_backward, setup_context=_setup)
