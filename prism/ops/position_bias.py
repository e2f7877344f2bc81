"""From branch weights to the position scores of all heads in one operator, so that no histogram outlives its use.

    scan -> rows of histograms (16 bits) -> superposition on a low-rank table -> position vectors (16 bits) -> scores

and back: gradients of the vectors, in 16 bits with a scale a row, since they span more than such a number does; from
them those of the histograms by one matrix product; then the scan's backward. What is kept between is private to the
operator: autograd would round a gradient to the precision of what it belongs to.

Dimensions: batch; time; cursors; slots = query cursors, then key cursors, in the order of their indices; columns =
bins in the order of the kernel's lanes; rank = columns of the low-rank table, padded.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from prism.ops.attention_triton import position_gradients, position_scores
from prism.ops.histogram_triton import Layout, layout, row_order, run_backward, run_forward
from prism.ops.superposition import low_rank_table


class Group(NamedTuple):
    """Cursors that are scanned together, and the slots they fill."""

    start: Float32[Tensor, "batch cursors bins"]
    weights: Float32[Tensor, "batch time cursors 6"]
    gamma: Float32[Tensor, " cursors"]
    places: Int[Tensor, " cursors"]


def position_bias(
    groups: Sequence[Group],
    score_weight: Float32[Tensor, "heads cursors_per_head"],
    pe_width: int,
    copied: Float32[Tensor, "batch cursors time width"] | None = None,
    fixed: Int[Tensor, " fixed"] | None = None,
    epsilon: float = 1e-8,
) -> Float32[Tensor, "batch heads time time"]:
    """sum_c weight_c <e_q, e_k> of every head (Algorithms 1, 2 and 4), 0 where a key is not visible.

    `copied` is mass the last group receives, its first column at the bin of token 0 (offset 1); `fixed` are slots of
    increment-only key cursors, which no group fills.
    """
    capacity = groups[0].start.shape[-1] // 2
    device = score_weight.device
    table = _table(capacity, pe_width, device)
    return _bias(
        *([*part] for part in zip(*groups, strict=True)), copied, fixed, score_weight, table,
        _increments(capacity, pe_width, groups[0].weights.shape[1], device), epsilon,
    )[0]


# Tables are kept for good: a CUDA graph knows them by their address alone. Each is a few hundred kilobytes.
@cache
@torch.inference_mode(False)
def _table(capacity: int, pe_width: int, device: torch.device) -> Float[Tensor, "columns rank"]:
    """The low-rank table with its rows in the kernel's order: zero for padding, and padded to whole tiles."""
    factor = _padded(capacity, pe_width)
    return factor[row_order(layout(2 * capacity + 1, half=True))].to(device, torch.float16)


@cache
@torch.inference_mode(False)
def _increments(capacity: int, pe_width: int, time: int, device: torch.device) -> Float[Tensor, "time rank"]:
    """The vectors of a cursor that always increments: one-hot at offset t + 1."""
    offsets = (torch.arange(time) + 1).clamp_max(capacity)
    return _padded(capacity, pe_width)[offsets + capacity].to(device, torch.float16)


def _padded(capacity: int, pe_width: int) -> Float[Tensor, "bins_and_one rank"]:
    factor = low_rank_table(capacity, pe_width)
    return torch.nn.functional.pad(factor, (0, -factor.shape[1] % 16, 0, 1))


def _form(start: Tensor) -> Layout:
    return layout(int(start.shape[-1]), half=True)


@torch.library.custom_op("prism::position_bias", mutates_args=())
def _bias(
    starts: list[Tensor], weights: list[Tensor], gammas: list[Tensor], places: list[Tensor], copied: Tensor | None,
    fixed: Tensor | None, score_weight: Tensor, table: Tensor, increments: Tensor, epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The scores; and, for the backward, rows, vectors and the groups' normalisers."""
    batch, time = weights[0].shape[:2]
    form, slots = _form(starts[0]), 2 * score_weight.numel()
    rows = table.new_empty(batch, time, slots, form.columns)
    normalisers = [
        run_forward(
            starts[i], weights[i], gammas[i], copied if i + 1 == len(starts) else None, starts[i].shape[-1] // 2 + 1,
            epsilon, form, rows, places[i],
        )
        for i in range(len(starts))
    ]
    vectors = (rows.view(-1, form.columns) @ table).view(batch, time, slots, -1)
    if fixed is not None:
        vectors[:, :, fixed] = increments[:, None]
    query, key = vectors.chunk(2, dim=2)
    return position_scores(query, key, score_weight), rows, vectors, normalisers


@_bias.register_fake
def _(starts: list[Tensor], weights: list[Tensor], gammas: list[Tensor], places: list[Tensor], copied: Tensor | None,
      fixed: Tensor | None, score_weight: Tensor, table: Tensor, increments: Tensor,
      epsilon: float) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    batch, time = weights[0].shape[:2]
    columns, rank = table.shape
    slots = 2 * score_weight.numel()
    return (
        score_weight.new_empty(batch, score_weight.shape[0], time, time), table.new_empty(batch, time, slots, columns),
        table.new_empty(batch, time, slots, rank), [one.new_empty(one.shape[:3]) for one in weights],
    )


@torch.library.custom_op("prism::position_bias_backward", mutates_args=())
def _bias_backward(
    upstream: Tensor, starts: list[Tensor], weights: list[Tensor], gammas: list[Tensor], places: list[Tensor],
    copied: Tensor | None, score_weight: Tensor, table: Tensor, rows: Tensor, vectors: Tensor,
    normalisers: list[Tensor], epsilon: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """Gradients of starts, weights, gammas, copied (empty where nothing is) and score_weight."""
    form = _form(starts[0])
    query, key = vectors.chunk(2, dim=2)
    of_vectors, scales, of_score_weight = position_gradients(upstream, query, key, score_weight)
    of_rows = (of_vectors.view(-1, vectors.shape[3]) @ table.T).view(rows.shape)
    del of_vectors
    of_starts, of_weights, of_gammas, of_copied = [], [], [], upstream.new_empty(0)
    for i, start in enumerate(starts):
        mine = copied if i + 1 == len(starts) else None
        s, w, g, c = run_backward(
            start, weights[i], gammas[i], mine, start.shape[-1] // 2 + 1, epsilon, form, rows, places[i],
            normalisers[i], of_rows, scales,
        )
        of_starts.append(s)
        of_weights.append(w)
        of_gammas.append(g)
        if c is not None:
            of_copied = c.contiguous()
    return of_starts, of_weights, of_gammas, of_copied, of_score_weight


@_bias_backward.register_fake
def _(upstream: Tensor, starts: list[Tensor], weights: list[Tensor], gammas: list[Tensor], places: list[Tensor],
      copied: Tensor | None, score_weight: Tensor, table: Tensor, rows: Tensor, vectors: Tensor,
      normalisers: list[Tensor], epsilon: float) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    return (
        [torch.empty_like(one, memory_format=torch.contiguous_format) for one in starts],
        [one.new_empty(one.shape) for one in weights], [torch.empty_like(one) for one in gammas],
        upstream.new_empty(0 if copied is None else copied.shape), torch.empty_like(score_weight),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    starts, weights, gammas, places, copied, _, score_weight, table, _, ctx.epsilon = inputs
    _, rows, vectors, normalisers = output
    ctx.groups = len(starts)
    ctx.save_for_backward(*starts, *weights, *gammas, *places, *normalisers, copied, score_weight, table, rows, vectors)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if upstream is None:
        none = [None] * ctx.groups
        return none, none, none, none, None, None, None, None, None, None
    *groups, copied, score_weight, table, rows, vectors = ctx.saved_tensors
    starts, weights, gammas, places, normalisers = (
        groups[first : first + ctx.groups] for first in range(0, len(groups), ctx.groups)
    )
    of_starts, of_weights, of_gammas, of_copied, of_score_weight = _bias_backward(
        upstream, starts, weights, gammas, places, copied, score_weight, table, rows, vectors, normalisers, ctx.epsilon
    )
    return (of_starts, of_weights, of_gammas, [None] * ctx.groups, None if copied is None else of_copied, None,
            of_score_weight, None, None, None)


_bias.register_autograd(_backward, setup_context=_setup)
