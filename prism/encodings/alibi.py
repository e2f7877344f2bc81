"""ALiBi: scores fall with distance, along a line whose slope each head has from the start (Press et al., 2022).

    score(i, j) = <q_i, k_j> / sqrt(d) - m_h (i - j),   nothing is learned

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings

if TYPE_CHECKING:
    from prism.config import RunConfig


def slope_exponents(heads: int) -> list[float]:
    """e with slopes m = 2^-e: 8/n, 16/n, ..., 8 for n heads.

    Where n is no power of two, as in the authors' code: those of the power of two below it, then every other one of
    the power above it.

    >>> slope_exponents(8)
    [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    >>> slope_exponents(6)
    [2.0, 4.0, 6.0, 8.0, 1.0, 3.0]
    """
    below = 1 << (heads.bit_length() - 1)
    whole = [8 * place / below for place in range(1, below + 1)]
    between = [8 * place / (2 * below) for place in range(1, 2 * below, 2)]
    return whole + between[: heads - below]


class AlibiBias(torch.nn.Module):
    """-m_h (i - j)."""

    exponents: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        # Exponents are exact in any precision a model is turned to; slopes would keep the rounding of the first.
        self.register_buffer("exponents", torch.tensor(slope_exponents(heads)), persistent=False)

    def forward(self, stream: Stream) -> Float[Tensor, "heads query key"]:
        slopes = torch.exp2(-self.exponents)
        return -slopes[:, None, None] * stream.distances(slopes.device)


class Alibi(Encoding):
    """Adds one fixed penalty per head, the same in every layer."""

    name = "alibi"
    summary = "ALiBi: a fixed linear penalty on distance, steeper in some heads"
    citation = "Press, Smith and Lewis, Train Short, Test Long: Attention with Linear Biases, 2022"
    extrapolates = True

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """Two heads would have the slopes 1/16 and 1/256, almost no positions at all: eight, as wide together."""
        if name != "quick":
            return base
        return dataclasses.replace(base, model=dataclasses.replace(base.model, heads=8, head_width=8))  # type: ignore[call-arg]

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: Settings | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.penalty_of_distance = AlibiBias(heads)

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        bias: Tensor = self.penalty_of_distance(stream)
        return bias[None]
