"""KERPLE, the logarithmic variant: scores fall with the logarithm of distance (Chi et al., 2022).

    score(i, j) = <q_i, k_j> / sqrt(d) - r1 log(1 + r2 |i - j|),   r1, r2 > 0, learned for each head

The paper asks for positive r1 and r2. The authors' code starts them uniform in (0, 2) and (0, 1), and sets to 0.01
whatever training has moved below; it makes one set and hands it to all layers. Both are done here.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting


@dataclass(frozen=True)
class KerpleConfig(Settings):
    """The authors' values."""

    least: float = setting(0.01, above=0)  # neither r1 nor r2 falls below this
    shared: bool = True  # one set for all layers; false: a set for each


class KerpleBias(nn.Module):
    """-r1 log(1 + r2 (i - j))."""

    def __init__(self, heads: int, least: float) -> None:
        super().__init__()
        self.least = least
        self.strength = nn.Parameter(2 * torch.rand(heads))  # r1
        self.rate = nn.Parameter(torch.rand(heads))  # r2

    @torch.no_grad()
    def raise_to_least(self) -> None:
        """Moves what lies below the least value up to it. Done in training only, where the gradient could not: it
        is 0 below, and not 0 at the least value itself."""
        self.strength.clamp_(min=self.least)
        self.rate.clamp_(min=self.least)

    def forward(self, stream: Stream) -> Float[Tensor, "heads query key"]:
        strength, rate = (each.clamp(min=self.least)[:, None, None] for each in (self.strength, self.rate))
        distances = stream.distances(rate.device).clamp(min=0)  # to come: masked later, but NaN would leave a trace
        return -strength * torch.log1p(rate * distances)


class Kerple(Encoding):
    """Adds a learned logarithmic penalty on distance."""

    name = "kerple"
    summary = "KERPLE: a learned logarithmic penalty on distance"
    citation = "Chi, Fan, Ramadge and Rudnicky, KERPLE: Kernelized Relative Positional Embedding, 2022"
    extrapolates = True
    Config = KerpleConfig
    config: KerpleConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: KerpleConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        sets = 1 if self.config.shared else layers
        self.penalties = nn.ModuleList(KerpleBias(heads, self.config.least) for _ in range(sets))

    def start(self, capacity: int) -> Stream:
        if self.training:
            for penalty in self.penalties:
                penalty.raise_to_least()  # type: ignore[operator]
        return super().start(capacity)

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        bias: Tensor = self.penalties[0 if self.config.shared else layer](stream)
        return bias[None]
