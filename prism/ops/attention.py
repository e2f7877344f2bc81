"""Scores from content and from position: Algorithm 4 and the hybrid score.

Dimensions: heads; query, key = tokens asking and asked; cursors per head; columns = of the position vectors;
features = a head's content width.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

Positions = Float[Tensor, "batch heads time cursors columns"]


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
