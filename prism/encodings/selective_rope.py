"""Selective RoPE: how far a pair turns from one token to the next is learned from the tokens.

Where RoPE turns every query and key by t theta, here a rate phi_t takes the place of each 1 in t = 1 + 1 + ... + 1:

    angle_t = theta (phi_1 + ... + phi_t),    phi = conv(W_up W_down x / |x|)

x is what attention makes its queries of, the convolution causal and depthwise, theta_i = base^(-2i / d) and fixed. We
take it from the authors' code, github.com/timurcarstensen/selective-rope, as the settings of all their experiments have
it: rank 32, a window of 4, base 500,000, and neither the gate nor the bias that their module can add. There x is
normalised slice by slice, a head's share of the width at a time; where the heads do not divide the width, that is not
defined, and we normalise the whole, to the same size. Pairs are neighbours here and half a head apart there, which is
the same up to an order of the features.

Dimensions: batch; query = tokens of this chunk; time = the same; width = of the residual stream; heads;
features = a head's width; channels = heads times the pairs of a head.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from prism.encodings.encoding import Encoding, Stream
from prism.ops.running_sum import running_sum
from prism.rotary import check_pairs, frequencies, turn
from prism.settings import Settings, setting

NORM_FLOOR = 1e-6  # added to the squared norm, as in the authors' code


@dataclass(frozen=True)
class SelectiveRopeConfig(Settings):
    """The values of the authors' experiments. `start` makes all rates tiny at first: the start is almost NoPE."""

    rank: int = setting(32, low=1, high=65_536)  # between the two projections
    window: int = setting(4, low=1, high=1_024)  # tokens of the convolution
    base: float = setting(500_000.0, above=0)
    start: float = setting(0.02, above=0)  # standard deviation of all weights at first


class SelectiveRope(Encoding):
    """Turns queries and keys by sums of learned rates."""

    name = "selective_rope"
    summary = "rotary, with learned rates: tokens decide how far queries and keys turn"
    citation = "Movahedi et al., Selective Rotary Position Embedding, 2025"
    extrapolates = False  # the sums, and with them the angles between tokens, grow with the sequence
    Config = SelectiveRopeConfig
    config: SelectiveRopeConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: SelectiveRopeConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        check_pairs(self.name, self.head_width)
        channels, rank = heads * self.head_width // 2, self.config.rank
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False) for _ in range(layers))
        self.up = nn.ModuleList(nn.Linear(rank, channels, bias=False) for _ in range(layers))
        self.taps = nn.Parameter(torch.empty(layers, self.config.window, channels))  # the oldest token's first
        for weights in self.parameters():
            nn.init.normal_(weights, std=self.config.start)

    def attention_input(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        rates = self._convolved(self.up[layer](self.down[layer](self._normalised(x))), layer, stream)
        turned = running_sum(rates.mT).mT
        if ("turned", layer) in stream.memory:
            turned = turned + stream.memory["turned", layer]
        stream.memory["turned", layer] = turned[:, -1:]
        theta = frequencies(self.head_width, self.config.base, x.device).to(x.dtype)
        stream.memory["angles"] = turned.unflatten(-1, (self.heads, -1)).transpose(1, 2) * theta

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        angles = stream.memory["angles"]
        return turn(query, angles), turn(key, angles)

    def _normalised(self, x: Float[Tensor, "batch query width"]) -> Float[Tensor, "batch query width"]:
        slices = self.heads if self.width % self.heads == 0 else 1
        parts = x.unflatten(-1, (slices, -1))
        norm = (parts.square().sum(-1, keepdim=True) + NORM_FLOOR).sqrt()
        return (parts / norm).flatten(-2) * math.sqrt(self.heads / slices)

    def _convolved(
        self, x: Float[Tensor, "batch query channels"], layer: int, stream: Stream
    ) -> Float[Tensor, "batch query channels"]:
        """A weighted sum over each token and those before it, with zeros before the first."""
        window, time = self.config.window, x.shape[1]
        before = stream.memory.get(("before", layer))
        x = pad(x, (0, 0, window - 1, 0)) if before is None else torch.cat((before, x), dim=1)
        stream.memory["before", layer] = x[:, time:]
        return torch.stack([self.taps[layer, tap] * x[:, tap : tap + time] for tap in range(window)]).sum(0)
