"""The long short-term memory: a recurrent network with nothing but its state to remember by.

One layer, as in Delétang et al., Neural Networks and the Chomsky Hierarchy, 2023. Their LSTM begins with a forget gate
that is open (a bias of 1), and so does this one. Embedding and read-out are the Transformer's, tied.

Dimensions: batch; time = tokens of this chunk; width = of embedding and hidden state alike; layers.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.architectures.recurrent import Recurrent
from prism.settings import SizeConfig, setting

State = tuple[Tensor, Tensor]  # hidden and cell states, each [layers, batch, width]


@dataclass(frozen=True)
class LstmConfig(SizeConfig):
    """The LSTM: `width` is that of each layer's state as well."""

    width: int = setting(256, low=2, high=65_536)
    layers: int = setting(1, low=1, high=1_024)


class Lstm(Recurrent):
    """i, f, g, o = sigmoid, sigmoid, tanh, sigmoid of W x + U h + b;  c <- f c + i g;  h <- o tanh(c)."""

    name = "lstm"
    summary = "long short-term memory: all it remembers is a vector"
    citation = "Hochreiter and Schmidhuber, Long Short-Term Memory, 1997"
    Config = LstmConfig
    config: LstmConfig

    def __init__(self, config: LstmConfig) -> None:
        super().__init__(config)
        self.lstm = nn.LSTM(config.width, config.width, config.layers, batch_first=True)
        with torch.no_grad():
            for layer in range(config.layers):
                inner, outer = (getattr(self.lstm, f"bias_{kind}_l{layer}") for kind in ("hh", "ih"))
                inner.zero_()
                outer.zero_()
                outer[config.width : 2 * config.width] = 1  # the forget gate's

    def unroll(
        self, x: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch time"], state: State | None
    ) -> tuple[Float[Tensor, "batch time width"], State]:
        return self.lstm(x, state)  # type: ignore[no-any-return]

    def numbers_per_token(self, time: int) -> int:
        return max(4 * self.config.width, self.config.vocabulary)

    def numbers_kept(self, time: int) -> int:
        return 2 * self.config.layers * self.config.width
