"""Stick-breaking attention: from the latest token back, each key takes its share of what later ones have left.

    beta_ij = sigmoid(q_i k_j / sqrt(d)),    A_ij = beta_ij prod_{j<k<i} (1 - beta_ik)    for j < i

A token does not attend to itself. What is left of the stick, prod_{k<i} (1 - beta_ik), goes to its own value, as by
default in the code of the authors' language models (a later version scales it by a learned vector and norms each head).
Their kernels alone leave it to no one, so that the first token's output is zero: `remainder=False`.

All in logarithms, log A_ij = log sigmoid(s_ij) + sum_{j<k<i} log sigmoid(-s_ik), which no score is too large for.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.ops.running_sum import sum_from_here
from prism.settings import Settings


def stick_breaking_weights(
    scores: Float[Tensor, "batch heads query key"], distance: Int[Tensor, "query key"], remainder: bool
) -> Float[Tensor, "batch heads query key"]:
    """Weights from scores; `distance` says how far back a key lies."""
    earlier = distance > 0
    # Not softplus: PyTorch's is a straight line above 20, right for float32 only.
    kept = F.logsigmoid(-scores).masked_fill(~earlier, 0.0)
    left_from = sum_from_here(kept)
    left = F.pad(left_from[..., 1:], (0, 1))  # by the keys after this one
    weights = (F.logsigmoid(scores) + left).exp().masked_fill(~earlier, 0.0)
    return torch.where(distance == 0, left_from[..., :1].exp(), weights) if remainder else weights


@dataclass(frozen=True)
class StickBreakingConfig(Settings):
    """The language models' default; without the remainder, the kernels'."""

    remainder: bool = True  # whether a token's own value gets what is left of the stick


class StickBreaking(Encoding):
    """Replaces the softmax: order comes from who takes first."""

    name = "stick_breaking"
    summary = "stick-breaking attention: the nearest relevant keys take their share first"
    citation = "Tan et al., Scaling Stick-Breaking Attention: An Efficient Implementation and In-depth Study, ICLR 2025"
    extrapolates = True
    Config = StickBreakingConfig
    config: StickBreakingConfig

    def weigh(
        self,
        scores: Float[Tensor, "batch heads query key"],
        visible: Bool[Tensor, "query key"],
        layer: int,
        stream: Stream,
    ) -> Float[Tensor, "batch heads query key"]:
        return stick_breaking_weights(scores, stream.distances(scores.device), self.config.remainder)

    def footprint(self, capacity: int) -> int:
        return 6 * self.heads * capacity
