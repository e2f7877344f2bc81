"""Gate logits -> branch weights in one pass each way, for a GPU; `branch_weights` in histogram.py is the reference.

Dimensions: batch; time; cursors; gates = logits of increment, keep, decrement and reset.
"""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
from typing import Any, no_type_check

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK = 512


@triton.jit
@no_type_check
def _probabilities(logits, at, inside):
    """Softmax of the action's three logits, and the sigmoid of reset's."""
    up = tl.load(logits + at, inside, 0.0).to(tl.float32)
    stay = tl.load(logits + at + 1, inside, 0.0).to(tl.float32)
    down = tl.load(logits + at + 2, inside, 0.0).to(tl.float32)
    x = tl.load(logits + at + 3, inside, 0.0).to(tl.float32)
    top = tl.maximum(tl.maximum(up, stay), down)
    up, stay, down = tl.exp(up - top), tl.exp(stay - top), tl.exp(down - top)
    total = up + stay + down
    small = tl.exp(-tl.abs(x))  # so that neither reset nor 1 - reset loses its digits where it is near 0
    reset = tl.where(x >= 0, 1.0, small) / (1.0 + small)
    no_reset = tl.where(x >= 0, small, 1.0) / (1.0 + small)
    return up / total, stay / total, down / total, reset, no_reset


@triton.jit
@no_type_check
def _forward(logits, no_copy, out, rows, cursors, stride, COPY: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * cursors
    at = place // cursors * stride + place % cursors * 4
    up, stay, down, reset, no_reset = _probabilities(logits, at, inside)
    if COPY:
        kept = tl.load(no_copy + place, inside, 0.0)
        reset, no_reset = reset * kept, no_reset * kept
    out += place * 6
    tl.store(out, reset * up, inside)
    tl.store(out + 1, reset * stay, inside)
    tl.store(out + 2, reset * down, inside)
    tl.store(out + 3, no_reset * up, inside)
    tl.store(out + 4, no_reset * stay, inside)
    tl.store(out + 5, no_reset * down, inside)


@triton.jit
@no_type_check
def _backward(logits, no_copy, upstream, of_logits, of_no_copy, rows, cursors, stride, COPY: tl.constexpr,
              BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * cursors
    at = place // cursors * stride + place % cursors * 4
    up, stay, down, reset, no_reset = _probabilities(logits, at, inside)
    g = upstream + place * 6
    g_reset_up, g_reset_stay, g_reset_down = (
        tl.load(g, inside, 0.0), tl.load(g + 1, inside, 0.0), tl.load(g + 2, inside, 0.0))
    g_up, g_stay, g_down = tl.load(g + 3, inside, 0.0), tl.load(g + 4, inside, 0.0), tl.load(g + 5, inside, 0.0)
    if COPY:
        kept = tl.load(no_copy + place, inside, 0.0)
        tl.store(of_no_copy + place, reset * (g_reset_up * up + g_reset_stay * stay + g_reset_down * down)
                 + no_reset * (g_up * up + g_stay * stay + g_down * down), inside)
        reset_kept, no_reset_kept = reset * kept, no_reset * kept
    else:
        kept = 1.0
        reset_kept, no_reset_kept = reset, no_reset
    d_up = g_reset_up * reset_kept + g_up * no_reset_kept
    d_stay = g_reset_stay * reset_kept + g_stay * no_reset_kept
    d_down = g_reset_down * reset_kept + g_down * no_reset_kept
    mean = d_up * up + d_stay * stay + d_down * down
    d_reset = kept * ((g_reset_up - g_up) * up + (g_reset_stay - g_stay) * stay + (g_reset_down - g_down) * down)
    out = of_logits + place * 4
    tl.store(out, up * (d_up - mean), inside)
    tl.store(out + 1, stay * (d_stay - mean), inside)
    tl.store(out + 2, down * (d_down - mean), inside)
    tl.store(out + 3, d_reset * reset * no_reset, inside)


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(logits.shape[0] * logits.shape[1] * logits.shape[2], BLOCK),)


def _row_stride(logits: Tensor) -> int:
    """Between tokens; a slice of the cursors is read where it is."""
    batch, time = logits.shape[:2]
    if logits.stride()[2:] != (4, 1) or (batch > 1 and logits.stride(0) != time * logits.stride(1)):
        return 0
    return logits.stride(1)


@torch.library.custom_op("prism::gate_weights", mutates_args=())
def gate_weights(logits: Tensor, no_copy: Tensor | None) -> Tensor:
    """Branch weights [batch time cursors 6] from logits [batch time cursors 4], scaled by what is not copied."""
    logits = logits if _row_stride(logits) else logits.contiguous()
    batch, time, cursors, _ = logits.shape
    out = logits.new_empty(batch, time, cursors, 6, dtype=torch.float32)
    if out.numel():
        kept = None if no_copy is None else no_copy.contiguous()
        with torch.cuda.device_of(logits):
            _forward[_grid(logits)](
                logits, logits if kept is None else kept, out, batch * time, cursors, _row_stride(logits),
                COPY=kept is not None, BLOCK=BLOCK,
            )
    return out


@gate_weights.register_fake
def _(logits: Tensor, no_copy: Tensor | None) -> Tensor:
    return logits.new_empty(*logits.shape[:3], 6, dtype=torch.float32)


@torch.library.custom_op("prism::gate_weights_backward", mutates_args=())
def gate_weights_backward(logits: Tensor, no_copy: Tensor | None, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of logits and no_copy (empty where there is none)."""
    logits = logits if _row_stride(logits) else logits.contiguous()
    batch, time, cursors, _ = logits.shape
    of_logits = logits.new_empty(logits.shape, dtype=torch.float32)
    of_no_copy = of_logits.new_empty((batch, time, cursors) if no_copy is not None else (0,))
    if of_logits.numel():
        kept = None if no_copy is None else no_copy.contiguous()
        with torch.cuda.device_of(logits):
            _backward[_grid(logits)](
                logits, logits if kept is None else kept, upstream.contiguous(), of_logits, of_no_copy, batch * time,
                cursors, _row_stride(logits), COPY=kept is not None, BLOCK=BLOCK,
            )
    return of_logits, of_no_copy


@gate_weights_backward.register_fake
def _(logits: Tensor, no_copy: Tensor | None, upstream: Tensor) -> tuple[Tensor, Tensor]:
    of_logits = logits.new_empty(logits.shape, dtype=torch.float32)
    return of_logits, of_logits.new_empty(logits.shape[:3] if no_copy is not None else (0,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
    logits, no_copy = ctx.saved_tensors
    of_logits, of_no_copy = gate_weights_backward(logits, no_copy, upstream)
    return of_logits.to(logits.dtype), None if no_copy is None else of_no_copy


gate_weights.register_autograd(_gradients, setup_context=_setup)
