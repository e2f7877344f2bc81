"""Hard-ALiBi: some heads see only the last few tokens, the others have no positions (Jelassi et al., 2024).

Head number m = 1 ... `masked` sees the last m tokens, itself among them, and nothing before; the remaining heads are
NoPE. In the paper's copying experiments these are 8 heads of 16, so half of a layer's heads is the default. The authors
add the least finite number to scores outside a window, we minus infinity: every token still sees itself.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.errors import UserError
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class HardAlibiConfig(Settings):
    """How many heads of a layer have windows."""

    masked: int | None = setting(None, low=0)  # none: half of the heads


class HardAlibi(Encoding):
    """Hides from some heads what lies outside a short window, in every layer the same."""

    name = "hard_alibi"
    summary = "Hard-ALiBi: heads that see only the last 1, 2, 3, ... tokens beside heads without positions"
    citation = "Jelassi et al., Repeat After Me: Transformers are Better than State Space Models at Copying, 2024"
    extrapolates = True
    Config = HardAlibiConfig
    config: HardAlibiConfig
    windows: Tensor

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: HardAlibiConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        masked = heads // 2 if self.config.masked is None else self.config.masked
        if masked > heads:
            raise UserError(f"masked must be at most {heads}, a layer's heads, got {masked}")
        windows = [float(m) for m in range(1, masked + 1)] + [math.inf] * (heads - masked)
        self.register_buffer("windows", torch.tensor(windows), persistent=False)

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        if name != "quick":
            return base
        # Half of two heads would be one that sees itself alone: no positions at all. The same width makes eight heads,
        # and six windows let the second layer match five digits in a row; two, as with three windows, are ambiguous in
        # most strings of 20.
        model = dataclasses.replace(base.model, heads=8, head_width=8)  # type: ignore[call-arg]
        return dataclasses.replace(base, model=model, positions=HardAlibiConfig(masked=6))

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        outside = stream.distances(self.windows.device) >= self.windows[:, None, None]
        nothing = torch.zeros_like(outside, dtype=self.windows.dtype)
        return nothing.masked_fill(outside, -math.inf)[None]
