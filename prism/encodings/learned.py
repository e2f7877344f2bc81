"""Learned absolute positions: a vector for each place, added to the token's embedding (Radford et al., 2019: GPT-2).

There are as many as `longest` says, and longer sequences are refused. Training moves only the vectors of places it has
seen: at all others, those beyond the training length among them, a model reads what they started as, but for what
weight decay has taken. That is the method's well-known failure, and it is not hidden here.

Dimensions: batch; query = tokens of this chunk; width = of the residual stream.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting


@dataclass(frozen=True)
class LearnedConfig(Settings):
    """GPT-2's positions start half as large as its token embeddings; tokens here have entries of size 1."""

    longest: int = setting(2_048, low=1, high=1_000_000)  # places
    spread: float = setting(0.5, low=0)  # standard deviation of an entry at the start


class Learned(Encoding):
    """Adds a learned vector per place."""

    name = "learned"
    summary = "learned absolute positions, as in GPT-2"
    citation = "Radford et al., Language Models are Unsupervised Multitask Learners, 2019"
    extrapolates = False
    Config = LearnedConfig
    config: LearnedConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: LearnedConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.table = nn.Parameter(self.config.spread * torch.randn(self.config.longest, width))

    def longest(self) -> int:
        return self.config.longest

    def embed(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Float[Tensor, "batch query width"]:
        return x + self.table[stream.seen : stream.seen + x.shape[1]]
