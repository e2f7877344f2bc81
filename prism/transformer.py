"""A decoder-only Transformer that knows nothing of positions: an encoding acts through its hooks.

Dimensions: batch; time = tokens of this chunk; width = of the residual stream; heads; features = a head's width.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.architectures.architecture import Architecture
from prism.config import ModelConfig, RunConfig
from prism.encodings import find_encoding
from prism.encodings.encoding import NO_TOKEN, Encoding, Stream
from prism.ops.attention import attend, visible


@dataclass
class Cache:
    """What generation keeps: the encoding's stream, and every layer's keys and values so far. Not to learn through."""

    stream: Stream
    keys: dict[int, Tensor] = field(default_factory=dict)  # with room for tokens to come
    values: dict[int, Tensor] = field(default_factory=dict)

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, these included."""
        seen = self.stream.seen
        return self._append(self.keys, layer, seen, key), self._append(self.values, layer, seen, value)

    def _append(self, kept: dict[int, Tensor], layer: int, seen: int, new: Tensor) -> Tensor:
        needed = seen + new.shape[2]
        room = kept[layer].shape[2] if layer in kept else 0
        if room < needed:  # twice as much each time, so that growing costs no more than filling
            size = max(needed, min(2 * room, self.stream.capacity))
            grown = new.new_empty(*new.shape[:2], size, new.shape[3])
            if room:
                grown[:, :, :seen] = kept[layer][:, :, :seen]
            kept[layer] = grown
        kept[layer][:, :, seen:needed] = new
        return kept[layer][:, :, :needed]


class Attention(nn.Module):
    """Causal multi-head attention; what a score is and how scores become weights is the encoding's to change."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.features = layer, config.heads, config.head_width
        inner = config.heads * config.head_width
        self.project = nn.Linear(config.width, 3 * inner)
        self.out = nn.Linear(inner, config.width)

    def forward(
        self, x: Float[Tensor, "batch time width"], encoding: Encoding, stream: Stream, cache: Cache | None
    ) -> Float[Tensor, "batch time width"]:
        batch, time, _ = x.shape
        encoding.attention_input(x, self.layer, stream)
        # Split before heads and tokens change places: the three gradients are then put together by one copy.
        parts = self.project(x).view(batch, time, 3, self.heads, self.features).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        query, key = encoding.transform(query / math.sqrt(self.features), key, self.layer, stream)
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        names = [f"layer.{self.layer}.{what}" for what in ("query", "key", "scores", "attention")]
        if self._only_biased(encoding) and not stream.records(*names):
            out = attend(query, key, value, encoding.bias(self.layer, stream))
        else:
            scores = encoding.score(query @ key.mT, self.layer, stream)
            seen = visible(time, key.shape[2], x.device)
            weights = encoding.weigh(scores, seen, self.layer, stream)
            if stream.records(*names):
                shown = (query, key[:, :, key.shape[2] - time :], scores.masked_fill(~seen, float("-inf")), weights)
                for name, tensor in zip(names, shown, strict=True):
                    stream.note(name, tensor)
            out = weights.to(value.dtype) @ value
        return self.out(out.transpose(1, 2).flatten(2))

    @staticmethod
    def _only_biased(encoding: Encoding) -> bool:
        """Whether scores are inner products plus a bias, and weights their softmax: what `attend` computes."""
        return type(encoding).score is Encoding.score and type(encoding).weigh is Encoding.weigh


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, layer)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(config.width),
            nn.Linear(config.width, config.feedforward * config.width),
            nn.GELU(),
            nn.Linear(config.feedforward * config.width, config.width),
        )

    def forward(
        self, x: Float[Tensor, "batch time width"], encoding: Encoding, stream: Stream, cache: Cache | None
    ) -> Float[Tensor, "batch time width"]:
        x = x + self.attention(self.attention_norm(x), encoding, stream, cache)
        return x + self.feedforward(x)


class Transformer(Architecture):
    """Token ids -> next-token logits, with the unembedding tied to the embedding."""

    name = "transformer"
    summary = "a pre-norm decoder; its positions are an encoding's business"
    citation = "Vaswani et al., Attention Is All You Need, 2017"
    Config = ModelConfig
    config: ModelConfig
    takes_encoding = True

    def __init__(self, config: ModelConfig, encoding: Encoding) -> None:
        super().__init__()
        self.config, self.encoding = config, encoding
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        nn.init.normal_(self.embedding.weight, std=config.width**-0.5)
        if config.start_token:
            self.start = nn.Parameter(torch.randn(config.width) * config.width**-0.5)
        for block in self.blocks:
            for last in (block.attention.out, block.feedforward[-1]):  # type: ignore[union-attr, index]
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * config.layers))  # type: ignore[union-attr, arg-type]

    @classmethod
    def build(cls, config: RunConfig) -> "Transformer":
        size = config.model
        assert isinstance(size, ModelConfig)
        encoding = find_encoding(config.encoding)(
            size.width, size.layers, size.heads, size.head_width, config.positions
        )
        if encoding.hint is not None:
            from prism.hints import hints_of

            encoding.hints = hints_of(config.task, encoding.hint)
        return cls(size, encoding)

    def forward(
        self, tokens: Int[Tensor, "batch time"], cache: Cache | None = None
    ) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of the token after each of `tokens`. With a cache the tokens continue what it has seen."""
        stream = cache.stream if cache is not None else self._new_stream(tokens.shape[1])
        x = self.embedding(tokens)
        opens = self.config.start_token and stream.seen == 0
        if opens:
            x = torch.cat((self.start.expand(x.shape[0], 1, -1), x), dim=1)
        stream.time = x.shape[1]
        stream.tokens = self._tokens_so_far(tokens, stream, opens)
        x = self.encoding.embed(x * math.sqrt(self.config.width), stream)
        stream.note("embedding", x)
        for layer, block in enumerate(self.blocks):
            self.encoding.observe(x, layer, stream)
            x = block(x, self.encoding, stream, cache)
            stream.note(f"layer.{layer}.out", x)
        stream.seen += x.shape[1]
        logits = self.norm(x[:, 1:] if opens else x) @ self.embedding.weight.T
        stream.note("logits", logits)
        return logits

    @staticmethod
    def _tokens_so_far(tokens: Tensor, stream: Stream, opens: bool) -> Int[Tensor, "batch key"]:
        """Ids of this chunk after those before it; the start token's place holds an id that no token has."""
        if opens:
            return nn.functional.pad(tokens, (1, 0), value=NO_TOKEN)
        return tokens if stream.tokens is None else torch.cat((stream.tokens, tokens), dim=1)

    def new_cache(self, capacity: int) -> Cache:
        """For generating, or reading in chunks, sequences of at most `capacity` tokens."""
        return Cache(self._new_stream(capacity))

    def longest(self) -> int | None:
        most = self.encoding.longest()
        return None if most is None else most - self.config.start_token

    def penalty(self) -> Float[Tensor, ""] | None:
        return self.encoding.penalty()

    def optimizer_groups(self) -> Iterable[Mapping[str, Any]]:
        return self.encoding.optimizer_groups()

    def numbers_per_token(self, time: int) -> int:
        config = self.config
        return config.heads * time + config.width * config.feedforward + self.encoding.footprint(time)

    def numbers_kept(self, time: int) -> int:
        config = self.config
        return config.layers * config.heads * time * (self.encoding.key_width(time) + config.head_width)

    def _new_stream(self, capacity: int) -> Stream:
        stream = self.encoding.start(capacity + self.config.start_token)
        stream.takes_bias, stream.recorder = True, self.recorder
        return stream
