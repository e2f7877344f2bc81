"""CABLE: biases that grow by a step each token decides on, at a rate each query decides on.

    b_ij = -s_i sum_{l=j+1..i} r_l,    r_l = relu(w x_l + c),    s_i = softplus(v x_i + e)

a head. The authors' first release (March 2025) has no rate s, and softplus in place of relu: `form="plain"`. Since
-softplus(z) = log sigmoid(-z), that is the Forgetting Transformer with weights of the other sign, so the arena gains
nothing by it. The weighted form is what later public code under the method's name has. Both read what queries and keys
are made of; as in the GPT-2 they sit in, weights start normal with deviation 0.02 and biases at zero.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; width = of the residual stream.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.encodings.forgetting import differences, linear_per_layer, summed_so_far
from prism.settings import Settings, setting


@dataclass(frozen=True)
class CableConfig(Settings):
    """Which of the two published forms, and where it starts."""

    form: Literal["weighted", "plain"] = "weighted"
    deviation: float = setting(0.02, low=0)  # of the weights at the start


class Cable(Encoding):
    """Adds a distance measured in learned, context-aware steps."""

    name = "cable"
    summary = "context-aware biases: a learned step a token, summed, at a learned rate a query (CABLE)"
    citation = "Veisi, Amirzadeh and Mansourian, Context-aware Biases for Length Extrapolation, 2025"
    extrapolates = True
    Config = CableConfig
    config: CableConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: CableConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.steps = linear_per_layer(layers, width, heads, self.config.deviation)
        if self.config.form == "weighted":
            self.rates = linear_per_layer(layers, width, heads, self.config.deviation)

    def attention_input(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        step = self.steps[layer](x)
        if self.config.form == "plain":
            summed_so_far("steps", F.logsigmoid(-step), layer, stream)
            return
        summed_so_far("steps", -F.relu(step), layer, stream)
        stream.memory["rate", layer] = -F.logsigmoid(-self.rates[layer](x)).transpose(1, 2)  # softplus, exactly

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "batch heads query key"]:
        summed = differences(stream.memory["steps", layer], stream.time)
        return summed if self.config.form == "plain" else stream.memory["rate", layer][..., None] * summed

    def footprint(self, capacity: int) -> int:
        return self.heads * (2 * capacity + 2 * self.layers)
