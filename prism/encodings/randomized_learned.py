"""Learned absolute positions, drawn at random (Ruoss et al., 2023).

Dimensions: batch; query = tokens of this chunk; width = of the residual stream.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding

from prism.encodings.encoding import Stream
from prism.random_positions import RandomPositions, RandomPositionsConfig


class RandomizedLearned(RandomPositions):
    """Adds a learned vector for a token's drawn place to its embedding."""

    foresees = True  # its draw is one for the room of a sequence
    name = "randomized_learned"
    summary = "learned absolute positions, drawn in order from a long range"
    citation = "Ruoss et al., Randomized Positional Encodings Boost Length Generalization of Transformers, 2023"

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: RandomPositionsConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.table = nn.Parameter(torch.empty(self.config.places, width))
        nn.init.trunc_normal_(self.table, std=1.0, a=-2.0, b=2.0)  # what the authors' library does unless told

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        return x + embedding(self.positions(x, stream), self.table)
