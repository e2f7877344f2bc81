"""ALiBi with distances drawn at random (Ruoss et al., 2023).

As in the authors' code it is the distances that are drawn, so that every query finds its n-th predecessor equally far.
That code is for encoders, and takes half a place off all distances to the left, to tell them from those to the right; a
decoder has no right, and nothing is taken off here.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; width = of the residual stream.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.alibi import slope_exponents
from prism.encodings.encoding import Stream
from prism.random_positions import RandomPositions, RandomPositionsConfig

if TYPE_CHECKING:
    from prism.config import RunConfig


class RandomizedAlibi(RandomPositions):
    """Takes from each score a head's slope times the drawn distance."""

    foresees = True  # its draw is one for the room of a sequence
    name = "randomized_alibi"
    summary = "scores fall linearly with distance, at a slope a head; distances drawn from a long range"
    citation = ("Ruoss et al., Randomized Positional Encodings Boost Length Generalization of Transformers, 2023; "
                "Press et al., Train Short, Test Long, 2022")
    exponents: Tensor

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: RandomPositionsConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        # Not the slopes: exponents are exact in any precision a model is turned to.
        self.register_buffer("exponents", torch.tensor(slope_exponents(heads)), persistent=False)

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        base = super().preset(name, base)
        if name != "quick":
            return base
        # Two heads would have two slopes, 1/16 and 1/256. The same width makes the authors' eight, 1/2 to 1/256.
        model = dataclasses.replace(base.model, heads=8, head_width=8)  # type: ignore[call-arg]
        return dataclasses.replace(base, model=model)

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        distances = self.distances(x, stream)[:, stream.distances(x.device).clamp(min=0)]
        slopes = torch.exp2(-self.exponents.to(x.dtype))
        stream.memory["bias"] = -slopes[:, None, None] * distances[:, None]
        return x

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "#batch heads query key"]:
        bias: Tensor = stream.memory["bias"]
        return bias

    def footprint(self, capacity: int) -> int:
        return self.heads * capacity  # the bias, where sequences differ in their draws
