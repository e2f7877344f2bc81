"""CoPE: a position is how many of the tokens since then the query deems worth counting.

    g_ij = sigmoid(q_i k_j),    p_ij = min(sum_{k=j..i} g_ik, n - 1)
    score_ij = q_i k_j + q_i e[p_ij],    e between two whole positions: interpolated

Each layer has one table of n embeddings, starting at zero, for all its heads: the listing in the paper's appendix and
the authors' code agree. Both let the gates see scores divided by the square root of the head's width, and count
nothing after the query. They differ in what meets the embeddings: the listing's queries are not divided by that root,
the code's, by default, are, as in the formula above, where one query meets key and embedding together. We take that.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; features = a head's width; places = n.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream, tokens_in_training
from prism.ops.running_sum import sum_from_here
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


def contextual_scores(
    query: Float[Tensor, "batch heads query features"],
    scores: Float[Tensor, "batch heads query key"],
    visible: Bool[Tensor, "query key"],
    table: Float[Tensor, "places features"],
) -> Float[Tensor, "batch heads query key"]:
    """q_i e[p_ij]; what it is where a key is not visible means nothing."""
    gates = torch.sigmoid(scores).masked_fill(~visible, 0.0)
    position = sum_from_here(gates).clamp_max(table.shape[0] - 1)
    whole = query @ table.mT
    below, above = position.detach().floor(), position.detach().ceil()
    share = position - below
    return whole.gather(-1, below.long()) * (1 - share) + whole.gather(-1, above.long()) * share


@dataclass(frozen=True)
class CopeConfig(Settings):
    """The paper's language models have 64 places, far fewer than tokens."""

    places: int = setting(64, low=1, high=100_000)  # n: what counts further than n - 1 is all at n - 1


class Cope(Encoding):
    """Adds how a query likes the position it gives to each key."""

    name = "cope"
    summary = "contextual positions: gates decide which tokens count, counts are embedded (CoPE)"
    citation = "Golovneva et al., Contextual Position Encoding: Learning to Count What's Important, 2024"
    extrapolates = True  # a count never exceeds the last place
    Config = CopeConfig
    config: CopeConfig

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """No more places than training can count to: the last one is then trained, and stands for what is beyond."""
        assert isinstance(base.positions, CopeConfig)
        return dataclasses.replace(base, positions=CopeConfig(min(base.positions.places, tokens_in_training(base) + 1)))

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: CopeConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.tables = nn.ParameterList(
            torch.zeros(self.config.places, self.head_width) for _ in range(layers)
        )

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        stream.memory["query"] = query
        return query, key

    def score(
        self, scores: Float[Tensor, "batch heads query key"], layer: int, stream: Stream
    ) -> Float[Tensor, "batch heads query key"]:
        visible = stream.distances(scores.device) >= 0
        return scores + contextual_scores(stream.memory.pop("query"), scores, visible, self.tables[layer])

    def footprint(self, capacity: int) -> int:
        # Gates, positions, both neighbours as numbers and as 64-bit indices, and what is read there.
        return self.heads * (12 * capacity + self.config.places)
