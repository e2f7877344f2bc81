"""Scores from content and from position: Algorithm 4 and the hybrid score; and the attention they steer.

`attend` and `all_position_scores` have a form in plain PyTorch here and one in Triton beside it (attention_triton.py).
Method "auto" takes Triton where it can on a GPU, "reference" and "triton" insist.

Dimensions: heads; query, key = tokens asking and asked; cursors per head; columns = of the position vectors;
features, values = a head's content width; all_heads = heads of all the layers that one PRISM layer serves;
all_cursors = their cursors, in the same order.
"""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from prism.ops.dispatch import has_triton, interpreted, takes_triton

Method = Literal["auto", "reference", "triton"]
WIDEST = 128  # a head's width above which Triton's tiles no longer fit a multiprocessor
MOST_COLUMNS = 256  # the same, of position vectors
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def position_scores(
    query: Float[Tensor, "batch heads query cursors columns"],
    key: Float[Tensor, "batch heads key cursors columns"],
    alpha: Float[Tensor, "heads cursors"],
    width: int,
) -> Float[Tensor, "batch heads query key"]:
    """sum_c |alpha_c| <e_q, e_k> / sqrt(c d) (Algorithm 4, eq:alpha-coeff). `width` is d_pe, whatever the columns."""
    cursors = query.shape[3]
    per_cursor = torch.einsum("bhqcw,bhkcw->bhcqk", query, key) * alpha.abs()[None, :, :, None, None]
    return per_cursor.sum(2) / math.sqrt(cursors * width)


def hybrid_scores(
    content: Float[Tensor, "batch heads query key"],
    position: Float[Tensor, "batch heads query key"],
    mu: Float[Tensor, " heads"],
) -> Float[Tensor, "batch heads query key"]:
    """mu <q, k> + (1 - mu) position (eq:hybrid-score, with its missing sum over cursors). `content` is scaled."""
    share = mu[:, None, None]
    return share * content + (1 - share) * position


def extend(
    query: Float[Tensor, "batch heads query features"],
    key: Float[Tensor, "batch heads key features"],
    query_position: Float[Tensor, "batch heads query cursors columns"],
    key_position: Float[Tensor, "batch heads key cursors columns"],
    alpha: Float[Tensor, "heads cursors"],
    mu: Float[Tensor, " heads"] | None,
    width: int,
) -> tuple[Float[Tensor, "batch heads query extended"], Float[Tensor, "batch heads key extended"]]:
    """Queries and keys whose plain inner product is the hybrid score: any attention kernel can take them.

    `query` is already divided by the square root of the head width. mu None: positions only, content dropped.
    """
    cursors = query_position.shape[3]
    weight = alpha.abs() / math.sqrt(cursors * width)
    if mu is not None:
        weight = weight * (1 - mu)[:, None]
    asked = (query_position * weight[:, None, :, None]).flatten(-2)
    if mu is None:
        return asked, key_position.flatten(-2)
    return torch.cat((query * mu[:, None, None], asked), -1), torch.cat((key, key_position.flatten(-2)), -1)


def visible(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "query key"]:
    """Which keys a query may see: itself and all before it. The queries are the last of the keys."""
    asking = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device)[None, :] <= asking[:, None]


def attend(
    query: Float[Tensor, "batch heads query features"],
    key: Float[Tensor, "batch heads key features"],
    value: Float[Tensor, "batch heads key values"],
    bias: Float[Tensor, "#batch #heads query key"] | None = None,
    method: Method = "auto",
) -> Float[Tensor, "batch heads query values"]:
    """Causal softmax attention with scores <q, k> + bias. The query comes scaled; the queries are the last keys."""
    if takes_triton(method, get_args(Method), query.is_cuda, _attend_refuses(query, key, value, bias)):
        from prism.ops.attention_triton import attend as fused

        if bias is not None:  # a view: the kernel reads broadcast entries where they are
            bias = bias.expand(*query.shape[:3], key.shape[2])
        return fused(query.to(value.dtype), key.to(value.dtype), value, bias)[0]
    scores = query @ key.mT
    if bias is not None:
        scores = scores + bias
    seen = visible(query.shape[2], key.shape[2], query.device)
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return weights.to(value.dtype) @ value


def all_position_scores(
    query: Float[Tensor, "batch query all_cursors columns"],
    key: Float[Tensor, "batch key all_cursors columns"],
    weight: Float[Tensor, "all_heads cursors"],
    method: Method = "auto",
) -> Float[Tensor, "batch all_heads query key"]:
    """sum_c weight_c <e_q, e_k> for all heads that one PRISM layer serves (Algorithm 4); 0 where a key is not visible.

    `weight` is |alpha_c| / sqrt(c d) times whatever the vectors still lack: (1 - mu), their norm. The scores have its
    dtype, and so should its gradient's sums: vectors may be half precision, weights should not.
    """
    if takes_triton(method, get_args(Method), query.is_cuda, _scores_refuse(query, key, weight)):
        from prism.ops.attention_triton import position_scores as fused

        return fused(query, key, weight)
    # Heads before tokens, and a head's cursors side by side: one matrix product then sums over both.
    q, k = (x.to(weight.dtype).unflatten(2, weight.shape).transpose(1, 2) for x in (query, key))
    scores = (q * weight[:, None, :, None]).flatten(-2) @ k.flatten(-2).mT
    return scores.masked_fill(~visible(query.shape[1], key.shape[1], query.device), 0.0)


def _refuses(dtypes: tuple[torch.dtype, ...], example: Tensor) -> str | None:
    """Why the kernels cannot run on tensors like these, for the end of a sentence."""
    if not has_triton():
        return "needs the package triton, which is not installed"
    if not (example.is_cuda or interpreted()):
        return f"needs CUDA tensors, got one on {example.device.type} (TRITON_INTERPRET=1 runs it there, slowly)"
    if odd := [str(dtype) for dtype in dtypes if dtype not in KERNEL_DTYPES]:
        return f"needs float32, float16 or bfloat16, got {odd[0].removeprefix('torch.')}"
    return None


def _attend_refuses(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> str | None:
    if max(query.shape[3], value.shape[3]) > WIDEST:
        return f"takes heads up to {WIDEST} wide, got {max(query.shape[3], value.shape[3])}"
    fits = key.shape == (*query.shape[:2], key.shape[2], query.shape[3]) and value.shape[:3] == key.shape[:3]
    if not fits or not 0 < query.shape[2] <= key.shape[2]:
        return (f"needs [batch heads tokens width] with at least as many keys as queries, got query {[*query.shape]}, "
                f"key {[*key.shape]}, value {[*value.shape]}")
    return _refuses((query.dtype, key.dtype, value.dtype) + (() if bias is None else (bias.dtype,)), query)


def _scores_refuse(query: Tensor, key: Tensor, weight: Tensor) -> str | None:
    fits = key.shape == (query.shape[0], key.shape[1], *query.shape[2:]) and query.shape[2] == weight.numel()
    if not fits or not 0 < query.shape[1] <= key.shape[1] or query.dtype != key.dtype:
        return (f"needs [batch tokens cursors columns] of one dtype, a cursor for each weight and at least as many "
                f"keys as queries, got {query.dtype} query {[*query.shape]}, {key.dtype} key {[*key.shape]}, "
                f"weight {[*weight.shape]}")
    if query.shape[3] > MOST_COLUMNS:
        return f"takes position vectors of up to {MOST_COLUMNS} columns, got {query.shape[3]}"
    return _refuses((query.dtype, weight.dtype), query)
