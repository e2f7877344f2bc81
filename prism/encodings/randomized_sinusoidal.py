"""Sinusoidal absolute positions, drawn at random (Ruoss et al., 2023).

Dimensions: batch; query = tokens of this chunk; width = of the residual stream.
"""

from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Stream
from prism.ops.superposition import sinusoid
from prism.random_positions import RandomPositions


class RandomizedSinusoidal(RandomPositions):
    """Adds sin/cos of a token's drawn place to its embedding."""

    foresees = True  # its draw is one for the room of a sequence
    name = "randomized_sinusoidal"
    summary = "sinusoidal absolute positions, drawn in order from a long range"
    citation = "Ruoss et al., Randomized Positional Encodings Boost Length Generalization of Transformers, 2023"

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        return x + sinusoid(self.positions(x, stream).to(x.dtype), self.width)
