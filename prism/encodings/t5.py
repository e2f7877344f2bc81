"""T5's relative position bias: a learned number for each head and each bucket of distances (Raffel et al., 2020).

    score(i, j) = <q_i, k_j> / sqrt(d) + table[bucket(i - j), h]

The causal half of it, as in T5's decoder: the first half of the buckets holds one distance each, the rest grow
logarithmically up to `max_distance`, and the last holds all that is farther. T5 itself does not divide by sqrt(d) but
starts its query weights smaller by as much; here scores are divided, and the bias is added as it is.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding

from prism.encodings.encoding import Encoding, Stream, tokens_in_training
from prism.errors import UserError
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class T5Config(Settings):
    """T5's own values."""

    buckets: int = setting(32, low=2, high=4_096)
    max_distance: int = setting(128, low=2, high=1_000_000)  # from here on, all distances share the last bucket

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_distance <= self.buckets // 2:
            raise UserError(f"max_distance must be greater than {self.buckets // 2}, half the buckets, "
                            f"got {self.max_distance}")


def bucket_starts(buckets: int, max_distance: int) -> list[int]:
    """The smallest distance of every bucket but the first, which starts at 0.

    T5 rounds logarithms down; powers of whole numbers say the same without rounding:
    floor(s log(n/m) / log(D/m)) >= k  <=>  n^s m^k >= D^k m^s.

    >>> bucket_starts(8, 32)
    [1, 2, 3, 4, 7, 12, 20]
    """
    alone = buckets // 2
    spread = buckets - alone

    def start(step: int) -> int:
        bound = max_distance**step * alone**spread
        return bisect_left(range(max_distance + 1), bound, key=lambda n: n**spread * alone**step)

    return [*range(1, alone + 1), *(start(step) for step in range(1, spread))]


class T5(Encoding):
    """One table for all layers, as in T5."""

    name = "t5"
    summary = "T5: learned biases for buckets of distances, shared by all layers"
    citation = "Raffel et al., Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer, 2020"
    extrapolates = True
    Config = T5Config
    config: T5Config
    starts: Tensor

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """T5's last bucket began within its training sequences: it does here too, so that what lies beyond is known."""
        assert isinstance(base.positions, T5Config)
        within = max(base.positions.buckets // 2 + 1, min(base.positions.max_distance, tokens_in_training(base) - 1))
        return dataclasses.replace(base, positions=dataclasses.replace(base.positions, max_distance=within))

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: T5Config | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        starts = bucket_starts(self.config.buckets, self.config.max_distance)
        self.register_buffer("starts", torch.tensor(starts), persistent=False)
        self.table = nn.Parameter(torch.empty(self.config.buckets, heads))
        nn.init.xavier_uniform_(self.table)  # T5X's: uniform, scaled by the mean of both sizes

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        distances = stream.distances(self.table.device).clamp(min=0)
        buckets = torch.bucketize(distances, self.starts, right=True)
        return embedding(buckets, self.table).permute(2, 0, 1)[None]
