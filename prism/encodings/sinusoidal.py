"""Sinusoidal absolute positions, randomly shifted in training: the paper's baseline.

Dimensions: batch; time = tokens of this chunk; width = of the residual stream.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.ops.superposition import sinusoid
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class SinusoidalConfig(Settings):
    """The paper gives no range for the shift; ours covers copying and reversing at ten times 20 digits."""

    shift: int = setting(400, low=0)  # in training each sequence starts at a position uniform in 0..shift


class Sinusoidal(Encoding):
    """Adds sin/cos of the token's position to its embedding (Vaswani et al., 2017)."""

    name = "sinusoidal"
    summary = "sinusoidal absolute positions with random shifts in training (the paper's baseline)"
    citation = "Vaswani et al., Attention Is All You Need, 2017; shifts: McLeish et al., Abacus, 2024"
    extrapolates = False
    Config = SinusoidalConfig
    config: SinusoidalConfig

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        if name == "quick":  # with shifts, so small a model does not reach its training length in so few steps
            return dataclasses.replace(base, positions=SinusoidalConfig(shift=0))
        # The paper's baseline is wider than its PRISM model, so that size cannot be what decides.
        wider: dict[str, Any] = {"width": 512, "heads": 8, "head_width": 64}
        model = dataclasses.replace(base.model, **wider)
        return dataclasses.replace(base, positions=SinusoidalConfig(), model=model)

    def start(self, capacity: int) -> Stream:
        stream = super().start(capacity)
        stream.memory["shift"] = None
        return stream

    def embed(self, x: Float[Tensor, "batch time width"], stream: Stream) -> Float[Tensor, "batch time width"]:
        positions = torch.arange(stream.seen, stream.seen + x.shape[1], device=x.device, dtype=x.dtype)
        if self.training and self.config.shift:
            if stream.memory["shift"] is None:
                stream.memory["shift"] = torch.randint(0, self.config.shift + 1, (x.shape[0], 1), device=x.device)
            positions = positions + stream.memory["shift"]
        return x + sinusoid(positions, self.width)


class PlainSinusoidal(Sinusoidal):
    """The same without shifts, whatever the preset."""

    name = "sinusoidal_plain"
    summary = "sinusoidal absolute positions, never shifted"
    citation = "Vaswani et al., Attention Is All You Need, 2017"

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        return dataclasses.replace(base, positions=SinusoidalConfig(shift=0))


class ShiftedSinusoidal(Sinusoidal):
    """The same with shifts, whatever the preset."""

    name = "sinusoidal_shifted"
    summary = "sinusoidal absolute positions, in training from a random start"

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        return dataclasses.replace(base, positions=SinusoidalConfig())
