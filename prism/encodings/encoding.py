"""The contract of a positional encoding: six places where it may act on a Transformer, each with a default.

A new encoding is one new file in this folder: a class that inherits from `Encoding`, sets `name`, `summary` and
`citation`, nests its `Config`, and overrides the hooks it needs. With none overridden it is NoPE.

Dimensions: width = of the residual stream; heads; features = a head's width; query = tokens of this chunk;
key = all tokens so far.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from prism.settings import Settings

if TYPE_CHECKING:
    from prism.config import RunConfig


@dataclass(frozen=True)
class NoOptions(Settings):
    """The `Config` of an encoding that has nothing to set."""


@dataclass
class Stream:
    """What an encoding carries through one pass over a batch of sequences, and from one chunk to the next."""

    capacity: int  # the most tokens these sequences will ever have
    seen: int = 0  # tokens of earlier chunks; the Transformer advances it
    memory: dict[Any, Any] = field(default_factory=dict)  # the encoding's own, under keys of its choice
    time: int = 0  # tokens of this chunk; the Transformer sets it
    takes_bias: bool = False  # whether who reads adds `Encoding.bias` to the scores, as the Transformer does


class Encoding(nn.Module):
    """How a Transformer learns where its tokens stand."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `prism encodings`
    citation: ClassVar[str]
    Config: ClassVar[type[Settings]] = NoOptions  # its options: a frozen dataclass

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: Settings | None = None
    ) -> None:
        super().__init__()
        self.width, self.layers, self.heads = width, layers, heads
        self.head_width = head_width if head_width is not None else width // heads
        self.config = config if config is not None else self.Config()

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """The run a preset means for this encoding. `base` is the preset's, with this encoding's default options."""
        return base

    def start(self, capacity: int) -> Stream:
        """Begins a pass over sequences of at most `capacity` tokens."""
        return Stream(capacity)

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        """May add to the token embeddings, before the first layer. (Absolute encodings.)"""
        return x

    def observe(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        """May read the residual stream before layer `layer` and update `stream`. (PRISM's cursors.)"""

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query extended"], Float[Tensor, "batch heads query extended"]]:
        """May turn or extend this chunk's queries and keys; their inner product is the score. (Rotary, PRISM.)

        Queries come divided by the square root of the head width. Keys are cached as returned.
        """
        return query, key

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "#batch #heads query key"] | None:
        """What is added to the scores whatever they are; batch and heads may be 1. (ALiBi, T5, PRISM.)

        With `score` and `weigh` as they are, attention runs fused on a GPU, and differentiates the bias too.
        """
        return None

    def score(
        self, scores: Float[Tensor, "batch heads query key"], layer: int, stream: Stream
    ) -> Float[Tensor, "batch heads query key"]:
        """May change the scores in ways a sum cannot say. By default, adds the bias."""
        bias = self.bias(layer, stream)
        return scores if bias is None else scores + bias

    def weigh(
        self,
        scores: Float[Tensor, "batch heads query key"],
        visible: Bool[Tensor, "query key"],
        layer: int,
        stream: Stream,
    ) -> Float[Tensor, "batch heads query key"]:
        """Turns scores into weights; none may fall on what is not visible. (Stick-breaking, forgetting.)"""
        return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)

    def footprint(self, capacity: int) -> int:
        """Numbers held per token of a sequence of `capacity` tokens, beyond attention's own: it sizes evaluations."""
        return 0

    def key_width(self, capacity: int) -> int:
        """Numbers a head's key has after `transform`: with `footprint`, it sizes evaluations."""
        return self.head_width

    def penalty(self) -> Float[Tensor, ""] | None:
        """May add to the loss. (Regularisers.)"""
        return None

    def optimizer_groups(self) -> Iterable[Mapping[str, Any]]:
        """Parameters with AdamW settings of their own: {"params": [...], "lr": ..., ...}. The rest share a group."""
        return ()
