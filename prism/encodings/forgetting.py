"""FoX, the Forgetting Transformer: a learned gate a token and head says how much of what lies before it is kept.

    f_t = sigmoid(w x_t + b),    D_ij = sum_{l=j+1..i} log f_l,    weights = softmax(q k / sqrt(d) + D)

As the authors run it: the gate reads what queries and keys are made of, weights start normal with deviation 0.02 and
biases at zero (a gate of one half), and there is no rotary encoding beside it. What their "Pro" block adds (norms of
queries and keys, output gates, shifted keys) is architecture, not position, and left out.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; width = of the residual stream.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, cat, nn

from prism.encodings.encoding import Encoding, Stream
from prism.ops.running_sum import running_sum
from prism.settings import Settings, setting


def linear_per_layer(layers: int, width: int, heads: int, deviation: float, bias: float = 0.0) -> nn.ModuleList:
    """A number a head from a token, in each layer."""
    gates = nn.ModuleList(nn.Linear(width, heads) for _ in range(layers))
    for gate in gates:
        nn.init.normal_(gate.weight, std=deviation)  # type: ignore[arg-type]
        nn.init.constant_(gate.bias, bias)  # type: ignore[arg-type]
    return gates


def summed_so_far(
    name: str, steps: Float[Tensor, "batch query heads"], layer: int, stream: Stream
) -> Float[Tensor, "batch heads key"]:
    """c_t = sum_{l<=t} steps_l of all tokens so far: this chunk's are added to what `stream` remembers under `name`."""
    sums = running_sum(steps.transpose(1, 2))
    if (name, layer) in stream.memory:
        before = stream.memory[name, layer]
        sums = cat((before, before[..., -1:] + sums), dim=-1)
    stream.memory[name, layer] = sums
    return sums


def differences(sums: Float[Tensor, "batch heads key"], query: int) -> Float[Tensor, "batch heads query key"]:
    """c_i - c_j = the sum over j < l <= i, for the last `query` tokens i; to be masked where j > i."""
    return sums[..., sums.shape[-1] - query :, None] - sums[..., None, :]


@dataclass(frozen=True)
class ForgettingConfig(Settings):
    """The authors' starting values."""

    deviation: float = setting(0.02, low=0)  # of the gates' weights at the start
    bias: float = setting(0.0)  # of the gates at the start: 0 keeps a half


class Forgetting(Encoding):
    """Adds the logarithm of what forget gates between key and query let through."""

    name = "forgetting"
    summary = "forget gates: attention decays by a learned, data-dependent factor a token (FoX)"
    citation = "Lin et al., Forgetting Transformer: Softmax Attention with a Forget Gate, ICLR 2025"
    extrapolates = True
    Config = ForgettingConfig
    config: ForgettingConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None,
        config: ForgettingConfig | None = None,
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.gates = linear_per_layer(layers, width, heads, self.config.deviation, self.config.bias)

    def attention_input(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        summed_so_far("log forget", F.logsigmoid(self.gates[layer](x)), layer, stream)

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "batch heads query key"]:
        return differences(stream.memory["log forget", layer], stream.time)

    def footprint(self, capacity: int) -> int:
        return self.heads * (capacity + self.layers)
