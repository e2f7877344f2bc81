"""Rotary position embedding, and two ways to read sequences longer than training's without training again.

A query at m and a key at n are turned by m theta and n theta, so that their inner product depends on m - n. For a
sequence of L' tokens, where training had at most L:

    interpolation   m becomes m L / L' (Chen et al.: all positions lie within training's)
    ntk             the base grows by (L' / L)^(d / (d - 2)): the slowest pair turns as if interpolated, the fastest as
                    ever (bloc97's NTK-aware base, with the "dynamic" scale L' / L of emozilla)

L' is the room a sequence is read in (`Stream.capacity`), so a chunk is turned as the whole would be. In common code the
dynamic base is that of the tokens so far, and keys cached earlier keep an older one; ours is the same for all.

Dimensions: batch; heads; query = tokens of this chunk; features = a head's width; pairs = half of it.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream, tokens_in_training
from prism.rotary import check_pairs, frequencies, turn
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig

Scaling = Literal["none", "interpolation", "ntk"]
BATCH_WIDTH = 8  # a GPU's batches are padded to a multiple of this: what pads a trained length is no longer sequence


@dataclass(frozen=True)
class RopeConfig(Settings):
    """Every preset fills in `trained`. Where it is 0, nothing is known of the training, and nothing is scaled."""

    base: float = setting(10_000.0, above=0)
    scaling: Scaling = "none"  # outside training, of sequences longer than `trained`
    trained: int = setting(0, low=0)  # tokens of the longest training sequence; 0: unknown


@dataclass(frozen=True)
class RopeInterpolatedConfig(RopeConfig):
    """RoPE's, with interpolation on."""

    scaling: Scaling = "interpolation"


@dataclass(frozen=True)
class RopeNtkConfig(RopeConfig):
    """RoPE's, with the growing base on."""

    scaling: Scaling = "ntk"


class Rope(Encoding):
    """Turns queries and keys by angles proportional to their positions."""

    name = "rope"
    summary = "rotary: queries and keys turn with their positions"
    citation = "Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021"
    extrapolates = False
    Config = RopeConfig
    config: RopeConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: RopeConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        check_pairs(self.name, self.head_width)

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        assert isinstance(base.positions, RopeConfig)
        known = dataclasses.replace(base.positions, trained=tokens_in_training(base))
        return dataclasses.replace(base, positions=known)

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        base, pace = self._scaled(stream.capacity)
        positions = stream.positions(x.device).double() * pace
        stream.memory["angles"] = (positions[:, None] * frequencies(self.head_width, base, x.device))[None, None]
        return x

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        angles = stream.memory["angles"]
        return turn(query, angles), turn(key, angles)

    def _scaled(self, length: int) -> tuple[float, float]:
        """The base, and how far positions lie apart, for sequences of this length."""
        base, trained, scaling = self.config.base, self.config.trained, self.config.scaling
        shown = -(-trained // BATCH_WIDTH) * BATCH_WIDTH
        if self.training or not trained or length <= shown or scaling == "none":
            return base, 1.0
        if scaling == "interpolation":
            return base, trained / length
        if self.head_width == 2:  # one pair, whose frequency is 1 whatever the base
            return base, 1.0
        return float(base * (length / trained) ** (self.head_width / (self.head_width - 2))), 1.0


class RopeInterpolated(Rope):
    """RoPE with position interpolation beyond the training length, without fine-tuning."""

    foresees = True
    name = "rope_interpolated"
    summary = "rotary; beyond the training length positions are squeezed into it"
    citation = "Chen et al., Extending Context Window of Large Language Models via Positional Interpolation, 2023"
    extrapolates = True  # no distance is longer than training's
    Config = RopeInterpolatedConfig


class RopeNtk(Rope):
    """RoPE whose base grows with the sequence beyond the training length, without fine-tuning."""

    foresees = True
    name = "rope_ntk"
    summary = "rotary; beyond the training length slow pairs turn more slowly (dynamic NTK)"
    citation = ("bloc97, NTK-Aware Scaled RoPE, and emozilla, Dynamically Scaled RoPE, 2023; "
                "Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023")
    extrapolates = True  # no pair meets an angle that training has not shown, but for the grid they lie on
    Config = RopeNtkConfig
