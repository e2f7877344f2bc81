"""The contract of a positional encoding: the places where it may act on a Transformer, each with a default.

A new encoding is one new file in this folder, or a file of your own anywhere: a class that inherits from `Encoding`,
sets `name`, `summary`, `citation` and `extrapolates`, nests its `Config`, and overrides the hooks it needs. With none
overridden it is NoPE.

Dimensions: width = of the residual stream; heads; features = a head's width; query = tokens of this chunk;
key = all tokens so far.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prism.errors import TooLong
from prism.settings import Settings

if TYPE_CHECKING:
    from prism.config import RunConfig


HintKind = Literal["digits", "coupling", "segments"]  # what a task may tell of its structure: prism/hints.py
EXAMPLES = 50  # of the training's length, drawn to find the longest in tokens
FIXED_EXAMPLES = 1_000  # the same, where they come from a fixed set and any length may be missing
NO_TOKEN = -1  # the id, in `Stream.tokens`, of the start token


@dataclass(frozen=True)
class NoOptions(Settings):
    """The `Config` of an encoding that has nothing to set."""


# Ids of all tokens so far -> what the task says of each, from that token and those before it alone.
Hints = Callable[[Int[Tensor, "batch key"]], Int[Tensor, "batch key"]]


class Recorder(Protocol):
    """Who hears of quantities inside a model: prism/inside/recording.py."""

    def wants(self, name: str) -> bool: ...

    def note(self, name: str, value: Tensor) -> None: ...


@dataclass
class Stream:
    """What an encoding carries through one pass over a batch of sequences, and from one chunk to the next."""

    capacity: int  # the most tokens these sequences will ever have
    seen: int = 0  # tokens of earlier chunks; the Transformer advances it
    memory: dict[Any, Any] = field(default_factory=dict)  # the encoding's own, under keys of its choice
    time: int = 0  # tokens of this chunk; the Transformer sets it
    takes_bias: bool = False  # whether who reads adds `Encoding.bias` to the scores, as the Transformer does
    tokens: Tensor | None = None  # [batch, key] ids of all tokens so far; the Transformer sets it, before `embed`
    recorder: Recorder | None = None

    def records(self, *names: str) -> bool:
        """Whether somebody wants one of these quantities: what is only for show need not be computed otherwise."""
        return self.recorder is not None and any(map(self.recorder.wants, names))

    def note(self, name: str, value: Tensor) -> None:
        """Lets who records see a quantity under its name; free of cost while nobody does."""
        if self.recorder is not None:
            self.recorder.note(name, value)

    def positions(self, device: torch.device) -> Int[Tensor, " query"]:
        """The places of this chunk's tokens, counted from 0."""
        return torch.arange(self.seen, self.seen + self.time, device=device)

    def distances(self, device: torch.device) -> Int[Tensor, "query key"]:
        """How far back each token so far lies from each of this chunk; negative where it is still to come."""
        return self.positions(device)[:, None] - torch.arange(self.seen + self.time, device=device)


class Encoding(nn.Module):
    """How a Transformer learns where its tokens stand."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `prism encodings`
    citation: ClassVar[str]
    # False where a longer sequence meets positions or distances that training has never shown.
    extrapolates: ClassVar[bool]
    foresees: ClassVar[bool] = False  # whether it makes use of how long the sequence will be (`Stream.capacity`)
    hint: ClassVar[HintKind | None] = None  # what it asks a task to tell; `self.hints` then holds the answer
    Config: ClassVar[type[Settings]] = NoOptions  # its options: a frozen dataclass

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: Settings | None = None
    ) -> None:
        super().__init__()
        self.width, self.layers, self.heads = width, layers, heads
        self.head_width = head_width if head_width is not None else width // heads
        self.config = config if config is not None else self.Config()
        self.hints: Hints | None = None

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        """The run a preset means for this encoding. `base` is the preset's, with this encoding's default options."""
        return base

    def longest(self) -> int | None:
        """The most tokens of a sequence it can place; None: there is no such bound."""
        return None

    def start(self, capacity: int) -> Stream:
        """Begins a pass over sequences of at most `capacity` tokens."""
        most = self.longest()
        if most is not None and capacity > most:
            raise TooLong(f"{self.name} has places for {most:,} tokens, and a sequence here has {capacity:,}")
        return Stream(capacity)

    def embed(
        self, x: Float[Tensor, "batch query width"], stream: Stream
    ) -> Float[Tensor, "batch query width"]:
        """May add to the token embeddings, before the first layer. (Absolute encodings.)"""
        return x

    def observe(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        """May read the residual stream before layer `layer` and update `stream`. (PRISM's cursors.)"""

    def attention_input(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        """May read what layer `layer` makes its queries, keys and values of, before `transform`. (Forgetting gates.)"""

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


def tokens_in_training(base: "RunConfig") -> int:
    """The most input tokens of a training sequence, as some examples show it: for presets that have to know."""
    from prism.config import ModelConfig
    from prism.data import vocabulary

    rng, task, split = random.Random(0), base.task, vocabulary(base.task).split
    draw, count = (task.example, EXAMPLES) if task.has_curriculum else (task.training_example, FIXED_EXAMPLES)
    examples = [draw(rng, base.max_length, "train") for _ in range(count)]
    tokens = max(len(split(one.prompt)) + len(split(one.completion)) for one in examples)
    opens = isinstance(base.model, ModelConfig) and base.model.start_token
    return tokens - 1 + opens  # the last token is never read, only asked for
