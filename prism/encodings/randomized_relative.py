"""Transformer-XL's relative positions (Dai et al., 2019), as they are and with distances drawn at random.

The score of a query at i and a key at j, with R the sinusoid of their distance (Dai et al., section 3.3):

    (q_i + u) . k_j / sqrt(d)  +  (q_i + v) . W R_(i-j) / sqrt(d)

W is each layer's own. All layers share u and v in `relative`, as in Dai et al.; in `randomized_relative` they are each
layer's own too, as in the code of Ruoss et al., whose distances are drawn so: the sinusoids are those of 0 and of
increasing distances out of 1..L-1, the same for all queries. Their code refuses a causal mask; this is its left half,
as its comments intend it: it looks d to the left up as L - d, in a table that ends at L - 1, where it finds 0 too.
Transformer-XL's scripts clamp distances at test time, which is not done here.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; width = of the residual stream;
features = a head's width; distance = 0 .. what the whole sequence can have.
"""

import math
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from prism.encodings.encoding import Encoding, Stream
from prism.ops.superposition import sinusoid
from prism.random_positions import RandomPositions
from prism.settings import Settings

START = 0.02  # standard deviation of u and v at first, in both papers' code


class Relative(Encoding):
    """Compares each query with its keys' distances as well as with the keys."""

    name = "relative"
    summary = "Transformer-XL: queries meet projected sinusoids of their distance to each key"
    citation = "Dai et al., Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context, 2019"
    extrapolates = False
    shared: ClassVar[bool] = True  # one u and one v for all layers

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: Settings | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.project = nn.ModuleList(nn.Linear(width, heads * self.head_width, bias=False) for _ in range(layers))  # W
        shape = (1 if self.shared else layers, heads, self.head_width)
        self.to_content = nn.Parameter(START * torch.randn(shape))  # u
        self.to_distance = nn.Parameter(START * torch.randn(shape))  # v

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        if "sinusoids" not in stream.memory:
            stream.memory["sinusoids"] = sinusoid(self._distances(x, stream).to(x.dtype), self.width)
        return x

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        own = 0 if self.shared else layer
        content, distance = (part[own, :, None] / math.sqrt(self.head_width)
                             for part in (self.to_content, self.to_distance))
        stream.memory["asking"] = query + distance
        return query + content, key

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "batch heads query key"]:
        if ("distances", layer) not in stream.memory:
            projected = self.project[layer](stream.memory["sinusoids"])
            stream.memory["distances", layer] = projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        asking = stream.memory["asking"]
        keys = stream.seen + asking.shape[2]
        return shifted(asking @ stream.memory["distances", layer][:, :, :keys].flip(2).mT)

    def footprint(self, capacity: int) -> int:
        return self.heads * capacity  # the part of the scores that comes from distances

    def _distances(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Int[Tensor, "#batch distance"]:
        return torch.arange(stream.capacity, device=x.device)[None]


class RandomizedRelative(RandomPositions, Relative):
    """The same, with drawn distances."""

    foresees = True  # its draw is one for the room of a sequence
    name = "randomized_relative"
    summary = "Transformer-XL's relative positions, with distances drawn from a long range"
    citation = "Ruoss et al., Randomized Positional Encodings Boost Length Generalization of Transformers, 2023"
    shared = False

    def footprint(self, capacity: int) -> int:
        # Where sequences differ in their draws, so do their sinusoids, before and after each layer's W.
        return super().footprint(capacity) + self.width + self.layers * self.heads * self.head_width

    def _distances(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Int[Tensor, "#batch distance"]:
        return self.distances(x, stream)


def shifted(logits: Float[Tensor, "batch heads query key"]) -> Float[Tensor, "batch heads query key"]:
    """Logits of the distances key-1 .. 0, the same in all rows -> logits of the keys (Dai et al., appendix B).

    The last query's row is in order as it is; each row above starts one distance nearer. With a number in front of each
    row, and as many numbers taken off the front of all as there are rows, row by row is the order wanted. What a query
    does not see holds other rows' numbers; attention masks it.
    """
    batch, heads, query, key = logits.shape
    return pad(logits, (1, 0)).view(batch, heads, key + 1, query)[:, :, 1:].reshape(batch, heads, query, key)
