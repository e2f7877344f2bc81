"""Position coupling: tokens that belong together share a learned position (Cho et al., 2024).

    8 2 9 + 0 3 = 8 0 0 8 , 2 3 0 5 , 9 0 0 9 → 8 5 9 .
    1 2 3 0 1 2 0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 0 1 2 3 -    what the task tells, as `coupling` of its file says
    5 6 7 4 5 6 4 5 5 5 5 5 6 6 6 6 6 7 7 7 7 4 5 6 7 0    rows of the table, for a start of 4

As in the authors' code (HanseulJo/position-coupling): a sequence's start is uniform in training among those that keep
it within the table, and 1 otherwise; row 0 is for the start token, the end token and what follows it. A digit carries
its own number, and the sign before a number (`+`, `=`) that of the step before its first digit. What the paper has no
example of, we number in its spirit: all symbols of a step of a chain of thought share their column's number, and the
comma after it is the sign before the next. Where their code would fail, for a number beyond the table, ours takes the
last row.

Dimensions: batch; query = tokens of this chunk; key = all tokens so far; width = of the residual stream.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.hints import told
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class PositionCouplingConfig(Settings):
    """The authors set max_pos so that their longest test fits: 202 for additions of 200 digits."""

    max_position: int = setting(202, low=2)


class PositionCoupling(Encoding):
    """Adds a learned vector per coupled position."""

    name = "position_coupling"
    summary = "position coupling: tokens that belong together share a learned position, with random starts in training"
    citation = ("Cho et al., Position Coupling: Improving Length Generalization of Arithmetic Transformers Using Task "
                "Structure, 2024")
    extrapolates = False  # beyond max_position there is nothing
    hint = "coupling"
    Config = PositionCouplingConfig
    config: PositionCouplingConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: PositionCouplingConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.table = nn.Embedding(self.config.max_position + 1, width)  # entries of size 1, as token embeddings have

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """As many positions as the longest test needs: its digits, a carry, and the sign before them."""
        return dataclasses.replace(base, positions=PositionCouplingConfig(max(base.test_lengths()) + 2))

    def longest(self) -> int | None:
        """Told of coupled positions, it can read any sequence of them; told nothing, every token has one."""
        return self.config.max_position - 1 if self.hints is None else None

    def start(self, capacity: int) -> Stream:
        stream = super().start(capacity)
        stream.memory["start"] = None
        return stream

    def embed(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Float[Tensor, "batch query width"]:
        numbers = told(self, x.shape[0], stream, x.device)
        if stream.memory["start"] is None:
            stream.memory["start"] = self._start_of(numbers)
        row = ((numbers + stream.memory["start"]) * (numbers >= 0)).clamp_max(self.config.max_position)
        return x + self.table(row[:, -stream.time :])

    def _start_of(self, numbers: Int[Tensor, "batch key"]) -> Int[Tensor, "batch 1"]:
        if not self.training:
            return torch.ones_like(numbers[:, :1])
        starts = (self.config.max_position - numbers.amax(1, keepdim=True)).clamp_min(1)  # how many would fit
        chance = torch.rand(starts.shape, dtype=torch.float64, device=numbers.device)
        return 1 + (chance * starts).long()
