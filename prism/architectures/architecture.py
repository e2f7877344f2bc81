"""The contract of a model: it maps tokens to logits, causally, whole or chunk by chunk. What is inside is its own.

The Transformer is one (prism/transformer.py) and takes a positional encoding; a new architecture without one is one new
file in this folder.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.encodings.encoding import Recorder
from prism.settings import SizeConfig

if TYPE_CHECKING:
    from prism.config import RunConfig


def count_parameters(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


class Architecture(nn.Module):
    """Token ids -> next-token logits."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `prism encodings`
    citation: ClassVar[str]
    extrapolates: ClassVar[bool] = True  # False where a longer sequence meets what training has never shown
    Config: ClassVar[type[SizeConfig]]  # its options: a frozen dataclass
    takes_encoding: ClassVar[bool] = False
    recorder: Recorder | None = None  # who hears of what is computed: prism/inside/recording.py
    foresees: ClassVar[bool] = False  # whether it makes use of how long the sequence will be
    token_by_token: ClassVar[bool] = False  # whether its operations are too short to be worth dividing among threads
    hint: ClassVar[str | None] = None  # what it is told of the task's structure beside the tokens, in a word

    @classmethod
    def build(cls, config: "RunConfig") -> Self:
        """The untrained model of a run."""
        return cls(config.model)

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "SizeConfig":
        """The size a preset means for this architecture; `base` is the preset's run, its model a Transformer's."""
        return cls.Config(width=base.model.width, layers=base.model.layers)

    def forward(
        self, tokens: Int[Tensor, "batch time"], cache: Any | None = None
    ) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of the token after each of `tokens`. With a cache the tokens continue what it has seen."""
        raise NotImplementedError

    def new_cache(self, capacity: int) -> Any:
        """What carries sequences of at most `capacity` tokens from one chunk to the next. Not to learn through."""
        raise NotImplementedError

    def longest(self) -> int | None:
        """The most tokens of a sequence it can read; None: there is no such bound."""
        return None

    def penalty(self) -> Float[Tensor, ""] | None:
        """May add to the loss. (Regularisers.)"""
        return None

    def optimizer_groups(self) -> Iterable[Mapping[str, Any]]:
        """Parameters with AdamW settings of their own: {"params": [...], "lr": ..., ...}. The rest share a group."""
        return ()

    def numbers_per_token(self, time: int) -> int:
        """Numbers that the largest of its tensors holds per token while sequences of this length are read: it sizes
        evaluations."""
        raise NotImplementedError

    def numbers_kept(self, time: int) -> int:
        """Numbers that a cache holds for a sequence of this length: it sizes evaluations too."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device
