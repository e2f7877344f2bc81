"""BiPE: an absolute place within the segment, and a relative encoding of segments to one another (He et al., 2024).

    8 0 0 8 , 2 3 0 5 ,
    0 1 2 3 4 0 1 2 3 4    intra-segment place: a learned vector, added to the token's embedding
    0 0 0 0 0 1 1 1 1 1    segment: what ALiBi or RoPE count distances in

    BiPE-ALiBi    score(i, j) = <q_i, k_j> / sqrt(d) - m_h (segment_i - segment_j)
    BiPE-RoPE     q_i and k_j are turned by segment_i theta and segment_j theta

A segment ends with a mark, which is its last token; which tokens are marks, the task tells. As in the authors' code
(zhenyuhe00/BiPE): ALiBi's slopes times 96, to make up for segments being fewer than tokens; 1,024 learned places, and
a longer segment's remaining tokens share the last. The factor is the one for natural text, cut at sentences and lines;
where segments are as short as a column of an addition, `slope_scale` is the option to look at.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; features = a head's width;
width = of the residual stream.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.encodings.alibi import slope_exponents
from prism.encodings.encoding import Encoding, Stream
from prism.hints import told
from prism.ops.superposition import sinusoid
from prism.rotary import check_pairs, frequencies, turn
from prism.settings import Settings, setting


@dataclass(frozen=True)
class BipeConfig(Settings):
    """The authors' two kinds; theirs is learned within segments, and their framework allows any absolute encoding."""

    between: Literal["alibi", "rope"] = "alibi"  # segments
    within: Literal["learned", "sinusoidal"] = "learned"
    places: int = setting(1_024, low=1)  # of a segment, where they are learned
    slope_scale: float = setting(96.0, above=0)  # alibi's
    base: float = setting(10_000.0, above=0)  # rope's


class Bipe(Encoding):
    """Tells where in its segment a token is, and how many segments apart two tokens are."""

    name = "bipe"
    summary = "BiPE: learned places within segments, ALiBi (or rotary) between them"
    citation = "He et al., Two Stones Hit One Bird: Bilevel Positional Encoding for Better Length Extrapolation, 2024"
    extrapolates = False  # segments grow with the sequence in most tasks, and their places are absolute
    hint = "segments"
    Config = BipeConfig
    config: BipeConfig
    exponents: Tensor

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: BipeConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        if self.config.within == "learned":
            self.table = nn.Embedding(self.config.places, width)  # entries of size 1, as token embeddings have
        if self.config.between == "rope":
            check_pairs(self.name, self.head_width)
        else:
            self.register_buffer("exponents", torch.tensor(slope_exponents(heads)), persistent=False)

    def embed(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Float[Tensor, "batch query width"]:
        segment = told(self, x.shape[0], stream, x.device)
        asking, place = segment[:, -stream.time :], _place_within(segment)[:, -stream.time :]
        if self.config.between == "rope":
            rates = frequencies(self.head_width, self.config.base, x.device)
            stream.memory["angles"] = asking[:, None, :, None] * rates
        else:
            apart = asking[:, None, :, None] - segment[:, None, None, :]
            slopes = self.config.slope_scale * torch.exp2(-self.exponents)
            stream.memory["bias"] = -slopes[:, None, None] * apart  # the same in every layer
        if self.config.within == "learned":
            return x + self.table(place.clamp_max(self.config.places - 1))
        return x + sinusoid(place.to(x.dtype), self.width)

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        if self.config.between == "alibi":
            return query, key
        return turn(query, stream.memory["angles"]), turn(key, stream.memory["angles"])

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "batch heads query key"] | None:
        return stream.memory.get("bias")

    def footprint(self, capacity: int) -> int:
        return self.heads * capacity if self.config.between == "alibi" else 0


def _place_within(segment: Int[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
    """How many tokens of its segment came before each."""
    index = torch.arange(segment.shape[1], device=segment.device)
    begins = nn.functional.pad(segment.diff(dim=1) != 0, (1, 0))
    return index - (index * begins).cummax(1).values
