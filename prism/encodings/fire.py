"""FIRE: a small network reads how far back a token lies, as a share of how far it could lie (Li et al., 2024).

    score(i, j) = <q_i, k_j> / sqrt(d) + f_h(psi(i - j) / psi(max(L, i))),   psi(x) = log(c x + 1)

f: 1 -> 32 -> heads, with a ReLU between; c and the threshold L are learned. As in the paper's listing, positions i
count from 0, c and L act by their absolute values, L is a fixed start times a learned multiplier, and 1e-6 is added to
the denominator. A set for each layer; sharing one is the paper's FIRE-S. The listing's last layer has a constant per
head, which no softmax sees: ours has none.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig

EPSILON = 1e-6  # the listing's, in the denominator


@dataclass(frozen=True)
class FireConfig(Settings):
    """The paper's values, for sequences of 2,048 tokens."""

    hidden: int = setting(32, low=1, high=65_536)
    scale: float = setting(0.1, above=0)  # where c starts
    threshold: float = setting(512.0, above=0)  # where L starts
    shared: bool = False  # one set for all layers


class FireBias(nn.Module):
    """f(psi(i - j) / psi(max(L, i)))."""

    def __init__(self, heads: int, hidden: int, scale: float, threshold: float, activation: nn.Module) -> None:
        super().__init__()
        self.threshold = threshold
        self.network = nn.Sequential(nn.Linear(1, hidden), activation, nn.Linear(hidden, heads, bias=False))
        self.scale = nn.Parameter(torch.tensor(scale))
        self.multiplier = nn.Parameter(torch.tensor(1.0))

    def forward(self, stream: Stream) -> Float[Tensor, "heads query key"]:
        device = self.scale.device
        distances = stream.distances(device).clamp(min=0)
        farthest = torch.maximum(stream.positions(device), (self.multiplier * self.threshold).abs())
        share = self._psi(distances) / (self._psi(farthest) + EPSILON)[:, None]
        bias: Tensor = self.network(share[..., None])
        return bias.permute(2, 0, 1)

    def _psi(self, x: Tensor) -> Tensor:
        return torch.log1p((self.scale * x).abs())


class Fire(Encoding):
    """Adds a learned function of the share of the past that lies between two tokens."""

    name = "fire"
    summary = "FIRE: a learned function of distance as a share of the position"
    citation = "Li et al., Functional Interpolation for Relative Positions Improves Long Context Transformers, 2024"
    extrapolates = True
    Config = FireConfig
    config: FireConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: FireConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.functions = nn.ModuleList(
            FireBias(heads, self.config.hidden, self.config.scale, self.config.threshold, nn.ReLU())
            for _ in range(1 if self.config.shared else layers)
        )

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """The paper's L is a quarter of its training length. In sequences that all end before L nothing is
        interpolated, and longer ones are read at shares that training has never shown: so L starts at the longest
        training example's length, which is half of its tokens or less."""
        return dataclasses.replace(base, positions=FireConfig(threshold=float(base.max_length)))

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        bias: Tensor = self.functions[0 if self.config.shared else layer](stream)
        return bias[None]
