"""What the recurrent architectures share: how tokens come in, how logits come out, and how large a fair one is.

Tokens are embedded and logits read out as by the Transformer: an embedding, and its transpose after a layer norm.

Dimensions: batch; time = tokens of this chunk; width = of embedding and hidden state alike, so that they can be tied.
"""

import bisect
import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.architectures.architecture import Architecture, count_parameters
from prism.config import ModelConfig, RunConfig
from prism.encodings.nope import NoPE
from prism.settings import SizeConfig
from prism.transformer import Transformer

WIDEST = 1 << 16


@dataclass
class Cache:
    """The state after the tokens so far; None before the first."""

    state: Any | None = None


class Recurrent(Architecture):
    """Reads token after token into a state of its own; `unroll` says how."""

    config: SizeConfig
    token_by_token = True

    def __init__(self, config: SizeConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)

    @classmethod
    def preset(cls, name: str, base: RunConfig) -> SizeConfig:
        """As many parameters as the preset's Transformer has without positions: the width decides how many."""
        assert isinstance(base.model, ModelConfig)
        wanted = _transformer_parameters(base.model)
        default = cls.Config(vocabulary=base.model.vocabulary)

        def parameters(width: int) -> int:
            config = dataclasses.replace(base, architecture=cls.name, encoding=NoPE.name, positions=NoPE.Config(),
                                         model=dataclasses.replace(default, width=width))
            with torch.device("meta"):
                return count_parameters(cls.build(config))

        above = bisect.bisect_left(range(WIDEST), wanted, lo=3, key=parameters)
        width = min(above - 1, above, key=lambda width: abs(parameters(width) - wanted))
        return dataclasses.replace(default, width=width)

    def unroll(
        self, x: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch time"], state: Any | None
    ) -> tuple[Float[Tensor, "batch time width"], Any]:
        """The hidden state after each token, and what to go on from."""
        raise NotImplementedError

    def forward(
        self, tokens: Int[Tensor, "batch time"], cache: Cache | None = None
    ) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of the token after each of `tokens`. With a cache the tokens continue what it has seen."""
        x = self.embedding(tokens) * math.sqrt(self.config.width)
        hidden, state = self.unroll(x, tokens, None if cache is None else cache.state)
        if cache is not None:
            cache.state = state
        return self.norm(hidden) @ self.embedding.weight.T

    def new_cache(self, capacity: int) -> Cache:
        """For sequences of any length."""
        return Cache()


class Controller(nn.Module):
    """The vanilla RNN of Delétang et al. with what it reads from its memory beside the token, and what it says to it.

    h_t = relu(W x_t + U h_{t-1} + R r_{t-1} + b), where r is what lies under the head or on top of the stack.
    """

    def __init__(self, width: int, reads: int) -> None:
        super().__init__()
        self.take = nn.Linear(width, width)
        self.recur = nn.Linear(width + reads, width, bias=False)
        small_start(self.take, self.recur)

    def forward(
        self, taken: Float[Tensor, "batch width"], hidden: Float[Tensor, "batch width"],
        read: Float[Tensor, "batch reads"],
    ) -> Float[Tensor, "batch width"]:
        """The next hidden state; `taken` is `take` of the token, made for all tokens at once."""
        return torch.relu(taken + self.recur(torch.cat((hidden, read), dim=-1)))


def small_start(*layers: nn.Linear) -> None:
    """Delétang et al.'s start: normal weights cut at two deviations of fan_in^(-1/2), no bias."""
    for layer in layers:
        deviation = layer.in_features**-0.5
        nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def _transformer_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        nope = NoPE(model.width, model.layers, model.heads, model.head_width)
        return count_parameters(Transformer(model, nope))
