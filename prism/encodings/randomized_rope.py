"""Rotary position embedding with positions drawn at random (Ruoss et al., 2023).

Dimensions: batch; heads; query = tokens of this chunk; width = of the residual stream; features = a head's width.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Stream
from prism.random_positions import RandomPositions, RandomPositionsConfig
from prism.rotary import check_pairs, frequencies, turn
from prism.settings import setting


@dataclass(frozen=True)
class RandomizedRopeConfig(RandomPositionsConfig):
    """The range of the places, and RoPE's base."""

    base: float = setting(10_000.0, above=0)


class RandomizedRope(RandomPositions):
    """Turns queries and keys by angles proportional to their drawn places."""

    foresees = True  # its draw is one for the room of a sequence
    name = "randomized_rope"
    summary = "rotary, with positions drawn in order from a long range"
    citation = "Ruoss et al., Randomized Positional Encodings Boost Length Generalization of Transformers, 2023"
    Config = RandomizedRopeConfig
    config: RandomizedRopeConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: RandomizedRopeConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        check_pairs(self.name, self.head_width)

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        places = self.positions(x, stream).double()
        theta = frequencies(self.head_width, self.config.base, x.device)
        stream.memory["angles"] = (places[..., None] * theta)[:, None]
        return x

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        angles = stream.memory["angles"]
        return turn(query, angles), turn(key, angles)
