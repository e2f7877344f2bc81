"""DAPE: a small network reads all heads' scores and biases of a pair of tokens, and adds to them (Zheng et al., 2024).

    score(i, j) = s + b + f([s; b]),   s = <q_i, k_j> / sqrt(d) and b = the base's bias, both of all heads

f: 2 heads -> 32 -> heads, with a LeakyReLU between, and the base's parameters: a set of both for each layer, as in the
authors' code. There scores enter f scaled and unmasked, as here; a pair is read by itself, so masking before or after
is the same. Their last layer has a constant per head, which no softmax sees: ours has none. Within DAPE, their FIRE has
a LeakyReLU too. With f = 0 it is the base.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far; hidden = of f.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, linear

from prism.encodings.alibi import AlibiBias
from prism.encodings.encoding import Encoding, Stream
from prism.encodings.fire import FireBias, FireConfig
from prism.encodings.kerple import KerpleBias, KerpleConfig
from prism.settings import Settings, setting

Base = Literal["kerple", "alibi", "fire"]


@dataclass(frozen=True)
class DapeConfig(Settings):
    """The authors' values."""

    base: Base = "kerple"
    hidden: int = setting(32, low=1, high=65_536)
    threshold: float = setting(128.0, above=0)  # where FIRE's L starts, if it is the base: a quarter of their length


class Adjustment(nn.Module):
    """f: what is added to a pair's scores, from its scores and biases in all heads."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.read = nn.Linear(2 * heads, hidden)
        self.write = nn.Linear(hidden, heads, bias=False)

    def forward(
        self, scores: Float[Tensor, "batch heads query key"], bias: Float[Tensor, "heads query key"]
    ) -> Float[Tensor, "batch heads query key"]:
        of_scores, of_bias = self.read.weight.chunk(2, dim=1)
        # The same as reading both at once, but the bias is read once for all sequences of a batch.
        common = linear(bias.movedim(0, -1), of_bias, self.read.bias)
        hidden = leaky_relu(linear(scores.movedim(1, -1), of_scores) + common)
        added: Tensor = self.write(hidden)
        return added.movedim(-1, 1)


class Dape(Encoding):
    """Lets content decide what a distance means."""

    name = "dape"
    summary = "DAPE: biases that a small network adapts to the scores of all heads"
    citation = "Zheng et al., DAPE: Data-Adaptive Positional Encoding for Length Extrapolation, 2024"
    extrapolates = True
    Config = DapeConfig
    config: DapeConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: DapeConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.bases = nn.ModuleList(self._make_base() for _ in range(layers))
        self.adjustments = nn.ModuleList(Adjustment(heads, self.config.hidden) for _ in range(layers))

    def _make_base(self) -> nn.Module:
        if self.config.base == "alibi":
            return AlibiBias(self.heads)
        if self.config.base == "kerple":
            return KerpleBias(self.heads, KerpleConfig().least)
        fire = FireConfig()
        return FireBias(self.heads, self.config.hidden, fire.scale, self.config.threshold, nn.LeakyReLU())

    def start(self, capacity: int) -> Stream:
        if self.training:
            for base in self.bases:
                if isinstance(base, KerpleBias):
                    base.raise_to_least()
        return super().start(capacity)

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        """The base's; `score` adds it, and reads it too."""
        bias: Tensor = self.bases[layer](stream)
        return bias[None]

    def score(
        self, scores: Float[Tensor, "batch heads query key"], layer: int, stream: Stream
    ) -> Float[Tensor, "batch heads query key"]:
        bias = self.bias(layer, stream)[0]
        added: Tensor = self.adjustments[layer](scores, bias)
        return scores + bias + added

    def footprint(self, capacity: int) -> int:
        """What f holds for a token and each it may see: scores with their biases, f's hidden numbers, its answer."""
        return capacity * (2 * self.config.hidden + 3 * self.heads)
