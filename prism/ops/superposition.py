"""From a histogram over offsets to a position vector: Algorithm 2, Algorithm 3, and an exact shortcut.

Dimensions: bins = 2P + 1 offsets; width = d_pe; rank = columns of the low-rank factor; cursors = those of one head.
"""

import math
from functools import cache, lru_cache
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Norm = Literal["constant", "joint"]

SCORE_TOLERANCE = 1e-7  # of a position's inner product with itself, d_pe / 2


def sinusoid(positions: Float[Tensor, "*shape"], width: int) -> Float[Tensor, "*shape width"]:
    """f(z): sines in the even columns, cosines in the odd ones (section "Similarity via positional streams")."""
    frequency = torch.exp(
        torch.arange(0, width, 2, dtype=positions.dtype, device=positions.device) * (-math.log(10000.0) / width)
    )
    angle = positions.unsqueeze(-1) * frequency
    return torch.stack((torch.sin(angle), torch.cos(angle)), dim=-1).flatten(-2)[..., :width]


def sinusoid_table(capacity: int, width: int) -> Float[Tensor, "bins width"]:
    """E: f at the offsets -capacity..capacity, in float64."""
    return sinusoid(torch.arange(-capacity, capacity + 1, dtype=torch.float64), width)


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # what is kept must serve training too, whoever asks first
def low_rank_table(capacity: int, width: int, tolerance: float = SCORE_TOLERANCE) -> Float[Tensor, "bins rank"]:
    """R with R R^T = E E^T up to `tolerance` of the diagonal, in float64.

    E has tiny numerical rank (57 of 340 columns at 171 bins), and everything downstream uses inner products and
    norms alone, so h R says all that h E says. Two factors of different capacity do not mix: one per forward pass.
    """
    table = sinusoid_table(capacity, width)
    _, _, directions = torch.linalg.svd(table, full_matrices=False)
    factor = table @ directions.T
    # The largest row of what is cut off bounds every entry of E E^T - R R^T (Cauchy-Schwarz).
    kept = torch.cumsum(factor.square(), dim=1)
    missing = (table.square().sum(1, keepdim=True) - kept).amax(0)
    rank = int((missing > tolerance * width / 2).sum()) + 1
    return factor[:, :rank].contiguous()


@cache
@torch.inference_mode(False)
def table_on(
    capacity: int, width: int, low_rank: bool, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "bins columns"]:
    """E or its low-rank factor, where it is needed: copied there once, and kept for good, since a CUDA graph knows it
    by its address alone."""
    return (low_rank_table if low_rank else sinusoid_table)(capacity, width).to(device, dtype)


def superpose(
    histogram: Float[Tensor, "batch cursors time bins"], table: Float[Tensor, "bins columns"]
) -> Float[Tensor, "batch cursors time columns"]:
    """e_t = sum_k h_t[k] f(k) (eq:superposition, Algorithm 2), for the table E or its low-rank factor."""
    batch, cursors, time, bins = histogram.shape
    if histogram.stride(-1) == 1:  # rows, as the kernels write them
        return (histogram.transpose(1, 2) @ table).transpose(1, 2)
    # A CPU's scan keeps its histograms as [time, bins, chains]; multiplying from the left leaves them where they are.
    chains = histogram.permute(2, 3, 0, 1).reshape(time, bins, batch * cursors)
    mixed = torch.bmm(table.T.expand(time, -1, -1), chains)
    return mixed.view(time, table.shape[1], batch, cursors).permute(2, 3, 0, 1)


def at_expected_position(
    histogram: Float[Tensor, "batch cursors time bins"], width: int
) -> Float[Tensor, "batch cursors time width"]:
    """f(E[position]): what the paper argues against ("Why not average scalars first?"), kept as an ablation."""
    capacity = histogram.shape[-1] // 2
    offsets = torch.arange(-capacity, capacity + 1, dtype=histogram.dtype, device=histogram.device)
    return sinusoid(histogram @ offsets, width)


def normalise(
    encoding: Float[Tensor, "*rows cursors columns"], width: int, norm: Norm
) -> Float[Tensor, "*rows cursors columns"]:
    """Algorithm 3, step (2): the concatenation of a head's cursors gets norm sqrt(d_pe).

    "constant" divides by the norm that one-hot histograms would have (a sinusoid's is sqrt(d_pe / 2)); "joint" by the
    norm there is, so that a blurred cursor counts as much as a sharp one.
    """
    cursors = encoding.shape[-2]
    if norm == "constant":
        return encoding * math.sqrt(2 / cursors)
    joint = encoding.flatten(-2).norm(dim=-1)[..., None, None]
    return encoding * (math.sqrt(width) / joint.clamp_min(torch.finfo(encoding.dtype).tiny))
