"""Positions drawn at random from a range far longer than any sequence (Ruoss et al., 2023).

T tokens get T different places out of 0..L-1, in order. Training thereby shows places and distances of sequences that
are much longer than its own. As in the authors' code (github.com/google-deepmind/randomized_positional_encodings), all
sequences of a batch share a draw. Their code draws anew in every layer where a layer's attention asks for positions,
which the paper does not say; here all layers share the draw, as in the paper.

They draw at test time too. So do we, but evaluation must give the same numbers twice, and for a sequence read in chunks
what it gives for the whole: outside training the draw depends on the room of the sequence (`Stream.capacity`) alone.

Dimensions: token = of the whole sequence, those still to come included.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting


@dataclass(frozen=True)
class RandomPositionsConfig(Settings):
    """The authors' range; it bounds the sequences that can be read."""

    places: int = setting(2_048, low=1, high=1_000_000)  # L


class RandomPositions(Encoding):
    """Base of the encodings whose positions are drawn."""

    Config = RandomPositionsConfig
    config: RandomPositionsConfig
    extrapolates = True  # up to L tokens, every place and distance occurs in training

    def longest(self) -> int | None:
        return self.config.places

    def positions(self, stream: Stream, device: torch.device) -> Int[Tensor, " token"]:
        """Increasing places out of 0..L-1, one for each token of the sequence."""
        return self._drawn(stream, device, fixed=0)

    def distances(self, stream: Stream, device: torch.device) -> Int[Tensor, " token"]:
        """What is said in place of the distances 0, 1, 2 ...: 0 itself, then increasing ones out of 1..L-1."""
        return self._drawn(stream, device, fixed=1)

    def _drawn(self, stream: Stream, device: torch.device, fixed: int) -> Int[Tensor, " token"]:
        """The first `fixed` places, then a draw from the others; the same for all layers and chunks of a pass."""
        if "places" not in stream.memory:
            # Sorted noise and not `randperm`, which waits for the device.
            others = self.config.places - fixed
            if self.training:
                noise = torch.rand(others, device=device)
            else:
                noise = torch.rand(others, generator=torch.Generator().manual_seed(stream.capacity))
            drawn = noise.argsort()[: stream.capacity - fixed].sort().values + fixed
            first = torch.arange(fixed, device=drawn.device)
            stream.memory["places"] = torch.cat((first, drawn)).to(device)
        places: Tensor = stream.memory["places"]
        return places
