"""Abacus: a learned vector for a digit's place in its number, shifted at random in training (McLeish et al., 2024).

    8 2 9 + 0 3 =
    1 2 3 0 1 2 0    place in the run of digits; 0 for what is no digit
    5 6 7 0 5 6 0    the same with a shift of 4: rows of the table

As in the authors' code (mcleish7/arithmetic, abacus.py): one shift for a whole batch, uniform in 0..99, so that numbers
start at rows 1..100; none outside training; row 0 stands for everything that is no digit and is never shifted. Where
their code would fail, for a number longer than the table, ours gives the last row to the rest of it.

There is no other positional encoding: this is the paper's "Abacus" with NoPE, not its combination with FIRE. The paper
wants numbers written least significant digit first, which holds for addition here and not for multiplication.

Dimensions: batch; query = tokens of this chunk; width = of the residual stream.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.errors import UserError
from prism.hints import told
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class AbacusConfig(Settings):
    """The paper's table has as many rows as its longest sequence has tokens."""

    shift: int = setting(99, low=0)  # in training places move by as much, at most
    draws: Literal["batch", "sequence"] = "batch"  # what has a shift of its own
    places: int = setting(2_048, low=1)  # of the table, beside the one for what is no digit

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shift >= self.places:
            raise UserError(f"places must be more than shift, or no digit has one; got {self.places} and {self.shift}")


class Abacus(Encoding):
    """Adds a vector per place, so that digits of one significance look alike in every number."""

    name = "abacus"
    summary = "Abacus: learned places of digits within their numbers, shifted at random in training"
    citation = "McLeish et al., Transformers Can Do Arithmetic with the Right Embeddings, 2024"
    extrapolates = False  # a number longer than training's and the shift together meets rows that never learned
    hint = "digits"
    Config = AbacusConfig
    config: AbacusConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: AbacusConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.table = nn.Embedding(self.config.places + 1, width)  # entries of size 1, as token embeddings have

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """A shift that reaches the longest test: the paper's k is what decides how long a number can become.

        The quick preset draws a shift per sequence: with one a batch, its few steps hardly ever show the first rows,
        which an unshifted text reads.
        """
        assert isinstance(base.positions, AbacusConfig)
        shift = max(base.positions.shift, max(base.test_lengths()) - base.max_length)
        places = max(base.positions.places, shift + base.max_length + 1)  # a sum has a digit more
        positions = dataclasses.replace(base.positions, shift=shift, places=places)
        if name == "quick":
            positions = dataclasses.replace(positions, draws="sequence")
        return dataclasses.replace(base, positions=positions)

    def longest(self) -> int | None:
        """Told of numbers, it can read any sequence of them; told nothing, every token is a place."""
        return self.config.places if self.hints is None else None

    def start(self, capacity: int) -> Stream:
        stream = super().start(capacity)
        stream.memory["shift"] = None
        return stream

    def embed(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Float[Tensor, "batch query width"]:
        place = told(self, x.shape[0], stream, x.device)[:, -stream.time :]
        row = place
        if self.training and self.config.shift:
            if stream.memory["shift"] is None:
                draws = 1 if self.config.draws == "batch" else x.shape[0]
                stream.memory["shift"] = torch.randint(0, self.config.shift + 1, (draws, 1), device=x.device)
            row = place + stream.memory["shift"] * (place > 0)
        return x + self.table(row.clamp_max(self.config.places))
