"""Positions drawn at random from a range far longer than any sequence (Ruoss et al., 2023).

T tokens get T different places out of 0..L-1, in order. Training thereby shows places and distances of sequences that
are much longer than its own. As in the authors' code (github.com/google-deepmind/randomized_positional_encodings), all
sequences of a training batch share a draw, unless `draws` says otherwise; the paper's first figure speaks of one for
each training example. Their code draws anew in every layer where a layer's attention asks for positions, which the
paper does not say; here all layers share the draw, as in the paper.

They draw at test time too, anew for every batch. So do we, but evaluation must give the same numbers twice, for a
sequence whatever else is in its batch, and in chunks what it gives for the whole. Outside training a sequence's draw
therefore depends on its room (`Stream.capacity`) and its first token alone: the sequences of one length share as many
draws as there are first tokens among them. Behind a start token, whose own place must not wait for the next token, and
where token ids are not known, that is one draw.

Dimensions: batch; query = tokens of this chunk; token = of the whole sequence, those still to come included;
width = of the residual stream; count = of the places that are drawn. A batch of 1 stands for all sequences.
"""

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class RandomPositionsConfig(Settings):
    """The authors' range; it bounds the sequences that can be read."""

    places: int = setting(2_048, low=1, high=1_000_000)  # L
    draws: Literal["batch", "sequence"] = "batch"  # what has places of its own in training


class RandomPositions(Encoding):
    """Base of the encodings whose positions are drawn."""

    Config = RandomPositionsConfig
    config: RandomPositionsConfig
    extrapolates = True  # up to L tokens, every place and distance occurs in training

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """The quick preset draws per sequence: with one draw a batch, its few steps meet a place a few dozen times."""
        if name != "quick":
            return base
        assert isinstance(base.positions, RandomPositionsConfig)
        return dataclasses.replace(base, positions=dataclasses.replace(base.positions, draws="sequence"))

    def longest(self) -> int | None:
        return self.config.places

    def positions(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Int[Tensor, "#batch query"]:
        """The places of this chunk's tokens, out of 0..L-1 and increasing along the sequence."""
        return self._drawn(x, stream, fixed=0)[:, stream.seen : stream.seen + x.shape[1]]

    def distances(self, x: Float[Tensor, "batch query width"], stream: Stream) -> Int[Tensor, "#batch token"]:
        """What is said in place of the distances 0, 1, 2 ...: 0 itself, then increasing ones out of 1..L-1."""
        return self._drawn(x, stream, fixed=1)

    def _drawn(
        self, x: Float[Tensor, "batch query width"], stream: Stream, fixed: Literal[0, 1]
    ) -> Int[Tensor, "#batch token"]:
        """Place 0 if it is fixed, then a draw from the others; the same for all layers and chunks of a pass."""
        if "places" not in stream.memory:
            others, count = self.config.places - fixed, stream.capacity - fixed
            if self.training:
                draws = 1 if self.config.draws == "batch" else x.shape[0]
                drawn = _random_subsets(draws, others, count, x.device)
            else:
                drawn = _repeatable_subsets(stream, others, count).to(x.device)
            stream.memory["places"] = pad(drawn + fixed, (fixed, 0))
        places: Tensor = stream.memory["places"]
        return places


def _random_subsets(draws: int, others: int, count: int, device: torch.device) -> Int[Tensor, "draws count"]:
    """`count` of 0..others-1, in order: where noise is least. Not `randperm`, which waits for the device."""
    noise = torch.rand(draws, others, device=device)
    return noise.topk(count, dim=1, largest=False, sorted=False).indices.sort(dim=1).values


def _repeatable_subsets(stream: Stream, others: int, count: int) -> Int[Tensor, "#batch count"]:
    """The same, each sequence's decided by its room and its first token; made once for each first token."""
    if stream.tokens is None:
        return _repeatable_subset(stream.capacity, 0, others, count)[None]
    first, whose = stream.tokens[:, 0].unique(return_inverse=True)
    made = [_repeatable_subset(stream.capacity, token, others, count) for token in first.tolist()]
    return torch.stack(made).to(whose.device)[whose]


def _repeatable_subset(capacity: int, first: int, others: int, count: int) -> Int[Tensor, " count"]:
    digest = hashlib.blake2b(f"{capacity} tokens from {first}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    return torch.randperm(others, generator=generator)[:count].sort().values
