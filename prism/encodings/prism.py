"""PRISM: relative positions as histograms that learned gates move (Lee, "Position as Probability", 2025).

Dimensions: batch; time = tokens of this chunk; bins = 2P + 1 offsets; cursors = query or key cursors of one PRISM
layer; columns = of the position vectors; channels = cursors of one head, and the absolute one if there is one.
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.cursors import Cursors, CursorState, PrismConfig, PrismLayer
from prism.encodings.encoding import Encoding, Stream
from prism.errors import UserError
from prism.ops.attention import extend, visible
from prism.ops.dispatch import has_triton
from prism.ops.histogram import MOST_BINS, edge_mass
from prism.ops.superposition import at_expected_position, low_rank_table, normalise, superpose, table_on

if TYPE_CHECKING:
    from prism.config import RunConfig

FUSED_SHARE = 0.6  # of a card's memory that may go to position scores made at once
EDGE_WARNING = 1e-3  # mass in the two outermost bins above which a too small support is said


class Prism(Encoding):
    """Learned relative positions for every head of a Transformer.

    In a Transformer of your own, with SDPA or any kernel that scores by inner product:

        positions = Prism(width=256, layers=6, heads=8)         # once, beside your other modules
        stream = positions.read(x)                              # per batch: x are the token embeddings
        q, k = positions.extend(q, k, layer, stream)            # in each layer, before scaled_dot_product_attention
    """

    method: Literal["auto", "reference"] = "auto"  # "reference": histograms are kept and can be looked at
    name = "prism"
    summary = "histogram filter: learned gates move distributions over relative positions"
    citation = "Lee, Position as Probability: Self-Supervised Transformers that Think Past Their Training, 2025"
    extrapolates = True
    Config = PrismConfig
    config: PrismConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: PrismConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        depths = self.config.depths
        if list(depths) != sorted(set(depths)) or not depths or depths[-1] >= layers:
            raise UserError(f"depths must be increasing layer numbers below {layers}, got {depths}")
        if self.config.pe_width % 2:
            raise UserError(f"pe_width must be even, a sine and a cosine a frequency, got {self.config.pe_width}")
        self.served = {
            depth: range(depth, after) for depth, after in zip(depths, (*depths[1:], layers), strict=True)
        }
        self.prism_layers = nn.ModuleDict({
            str(depth): PrismLayer(width, depth, len(served) * heads * self.config.cursors, self.config)
            for depth, served in self.served.items()
        })
        fewest = min(map(len, self.served.values())) * heads * self.config.cursors
        if self.config.copy_every > fewest:
            raise UserError(f"copy_every must be at most {fewest}, a PRISM layer's query cursors, "
                            f"got {self.config.copy_every}")
        positioned = layers - depths[0]
        channels = self.config.cursors + self.config.absolute
        self.alpha = nn.Parameter(torch.full((positioned, heads, channels), self.config.alpha_start))
        if self.config.content:
            self.mu_logit = nn.Parameter(torch.zeros(positioned, heads))

    @classmethod
    def preset(cls, name: str, base: "RunConfig") -> "RunConfig":
        copy_every = 5 if base.task.name in ("reverse", "scan_cot", "dyn_str_cpy") else 0
        depths = (0, 3) if base.task.name in ("odds_first", "stack") and base.model.layers > 3 else (0,)
        options = PrismConfig(copy_every=copy_every, depths=depths)
        if name == "best":
            options = dataclasses.replace(options, reset_start=0.047, alpha_rate=0.02)
        if name == "quick":
            options = dataclasses.replace(
                options, gates="local", gate_features=64, cursors=2, pe_width=64, reset_start=0.047, gamma_start=3.5,
                alpha_rate=0.02, gate_decay=False,
            )
        return dataclasses.replace(base, positions=options)

    def start(self, capacity: int) -> Stream:
        stream = super().start(capacity)
        stream.memory["cursors"] = {depth: CursorState() for depth in self.served}
        return stream

    def support(self, stream: Stream) -> int:
        """P: the length of the sequence, unless the configuration sets another."""
        return stream.capacity if self.config.support is None else self.config.support

    def observe(self, x: Float[Tensor, "batch time width"], layer: int, stream: Stream) -> None:
        if layer not in self.served:
            return
        capacity = self.support(stream)
        prism_layer: PrismLayer = self.prism_layers[str(layer)]  # type: ignore[assignment]
        if self._fuses(x, layer, stream):
            self._observe_at_once(x, layer, stream)
            return
        with torch.autocast(x.device.type, enabled=False):  # mixed precision would round the histograms' products
            x = x.to(prism_layer.raw_gamma.dtype)
            histograms = prism_layer(x, capacity, stream.seen, stream.memory["cursors"][layer], stream)
            stream.memory["histograms", layer] = histograms
            if stream.recorder is not None:
                self._note(prism_layer, layer, stream)
            if stream.capacity > capacity and not _being_captured(x):
                self._warn_of_edges(histograms)
            vectors = prism_layer.arrange(histograms.map(self._superpose))
            query, key = (self._by_layer(group, len(self.served[layer]), capacity, stream) for group in vectors)
        for served, q, k in zip(self.served[layer], query, key, strict=True):
            stream.memory["positions", served] = q, k

    def _fuses(self, x: Tensor, layer: int, stream: Stream) -> bool:
        """Whether all position scores can be made at once, on a GPU, without keeping a histogram."""
        config, capacity = self.config, self.support(stream)
        plain = config.superposition == "low_rank" and config.norm == "constant" and not config.absolute
        whole = stream.seen == 0 and x.shape[1] == stream.capacity == capacity
        known_keys = not config.copy_every or config.copy_key == "increment"
        kept = self.method == "reference" or stream.recorder is not None  # histograms, for whoever looks at them
        if kept or not (plain and whole and known_keys and x.is_cuda and stream.takes_bias):
            return False
        if not has_triton() or 2 * capacity + 1 > MOST_BINS:
            return False
        batch, time, cursors = x.shape[0], x.shape[1], len(self.served[layer]) * self.heads * config.cursors
        bins = 2 * capacity + 1
        # Rows of histograms and their gradients, vectors and theirs, the scores.
        needed = batch * time * (2 * cursors * (4 * bins + 1024) + 8 * self.heads * len(self.served[layer]) * time)
        return needed < FUSED_SHARE * torch.cuda.get_device_properties(x.device).total_memory

    def _observe_at_once(self, x: Tensor, layer: int, stream: Stream) -> None:
        served, first = self.served[layer], self.config.depths[0]
        weight = torch.stack([self._score_weight(one - first) for one in served]).flatten(0, 1)
        prism_layer: PrismLayer = self.prism_layers[str(layer)]  # type: ignore[assignment]
        with torch.autocast(x.device.type, enabled=False):
            # Algorithm 3's constant, sqrt(2 / c) of both vectors, belongs to the weights here.
            scores = prism_layer.bias(x.float(), self.support(stream), weight * (2 / self.config.cursors))
        for one, bias in zip(served, scores.split(self.heads, dim=1), strict=True):
            stream.memory["bias", one] = bias

    def _score_weight(self, layer: int) -> Float[Tensor, "heads cursors"]:
        """(1 - mu) |alpha| / sqrt(c d) (Algorithm 4, eq:hybrid-score)."""
        weight = self.alpha[layer].abs() / math.sqrt(self.config.cursors * self.config.pe_width)
        return weight * torch.sigmoid(-self.mu_logit[layer])[:, None] if self.config.content else weight

    def bias(self, layer: int, stream: Stream) -> Tensor | None:
        """The position scores of a layer, where they were made at once."""
        return stream.memory.get(("bias", layer))

    def histograms(self, layer: int, stream: Stream) -> tuple[Tensor, Tensor]:
        """Query and key histograms [batch, cursors, time, bins] of the PRISM layer before `layer`, this chunk's."""
        return self.prism_layers[str(layer)].arrange(stream.memory["histograms", layer])  # type: ignore[operator, union-attr]

    def transform(
        self, query: Tensor, key: Tensor, layer: int, stream: Stream
    ) -> tuple[Float[Tensor, "batch heads time extended"], Float[Tensor, "batch heads time extended"]]:
        first = self.config.depths[0]
        if layer < first:
            return query, key
        if ("bias", layer) in stream.memory:
            share = torch.sigmoid(self.mu_logit[layer - first])[:, None, None] if self.config.content else 0.0
            return query * share, key
        q, k = stream.memory["positions", layer]
        mu = torch.sigmoid(self.mu_logit[layer - first]) if self.config.content else None
        if stream.records(f"layer.{layer}.scores.content", f"layer.{layer}.scores.position"):
            self._note_scores(query, key, layer, mu, stream)
        return extend(query, key, q, k, self.alpha[layer - first], mu, self.config.pe_width)

    def _note(self, prism_layer: PrismLayer, depth: int, stream: Stream) -> None:
        for which, histogram, gamma in zip(
            ("query", "key"), self.histograms(depth, stream), prism_layer.arranged_gamma(), strict=True
        ):
            stream.note(f"prism.{depth}.histograms.{which}", histogram)
            stream.note(f"prism.{depth}.gamma.{which}", gamma)
        if depth == self.config.depths[0]:
            stream.note("prism.alpha", self.alpha.abs())
            stream.note("prism.mu", torch.sigmoid(self.mu_logit) if self.config.content else self.alpha[..., 0] * 0)

    def _note_scores(self, query: Tensor, key: Tensor, layer: int, mu: Tensor | None, stream: Stream) -> None:
        """The two parts of eq:hybrid-score, -inf where a key is not visible; of keys read unrecorded, NaN."""
        q, k = stream.memory["positions", layer]
        asked, at = extend(query, key, q, k, self.alpha[layer - self.config.depths[0]], None, self.config.pe_width)
        share = (torch.zeros(self.heads, device=query.device, dtype=query.dtype) if mu is None else mu)[:, None, None]
        earlier = stream.memory.get(("noted keys", layer), (key[:, :, :0], at[:, :, :0]))
        keys = tuple(
            torch.cat((nn.functional.pad(before, (0, 0, 0, stream.seen - before.shape[2]), value=math.nan), now), dim=2)
            for before, now in zip(earlier, (key, at), strict=True)
        )
        stream.memory["noted keys", layer] = keys
        hidden = ~visible(query.shape[2], keys[0].shape[2], query.device)
        parts = {"content": share * (query @ keys[0].mT), "position": (1 - share) * (asked @ keys[1].mT)}
        for part, scores in parts.items():
            stream.note(f"layer.{layer}.scores.{part}", scores.masked_fill(hidden, -math.inf))

    def read(self, x: Float[Tensor, "batch time width"]) -> Stream:
        """For a model of your own: runs the cursors over a whole batch of token embeddings."""
        if self.config.depths != (0,):
            raise UserError(f"read runs a PRISM layer before layer 0 alone; with depths={self.config.depths}, call "
                            "start once, and observe with the residual stream before each layer")
        stream = self.start(x.shape[1])
        self.observe(x, 0, stream)
        return stream

    def extend(
        self, query: Tensor, key: Tensor, layer: int, stream: Stream
    ) -> tuple[Float[Tensor, "batch heads time extended"], Float[Tensor, "batch heads time extended"]]:
        """For a model of your own: (q, k) such that `scaled_dot_product_attention`, with its default scale, scores
        by content and position together. They have the dtype of what was given; in half precision a score in the
        hundreds is off by about one."""
        q, k = self.transform(query / math.sqrt(query.shape[-1]), key, layer, stream)
        return (q * math.sqrt(q.shape[-1])).to(query.dtype), k.to(key.dtype)

    def footprint(self, capacity: int) -> int:
        cursors = sum(layer.cursors for layer in self.prism_layers.values())  # type: ignore[misc]
        return 2 * cursors * (2 * (self.config.support or capacity) + 1)

    def key_width(self, capacity: int) -> int:
        columns = self.config.pe_width
        if self.config.superposition == "low_rank":
            columns = low_rank_table(self.config.support or capacity, columns).shape[1]
        content = self.head_width if self.config.content else 0
        return content + (self.config.cursors + self.config.absolute) * columns

    def penalty(self) -> Tensor | None:
        penalties = [p for layer in self.prism_layers.values() if (p := layer.gates.penalty()) is not None]  # type: ignore[operator, union-attr]
        return torch.stack(penalties).sum() if penalties else None

    def optimizer_groups(self) -> Iterable[Mapping[str, Any]]:
        yield {
            "params": [self.alpha], "lr": self.config.alpha_rate, "betas": self.config.alpha_betas,
            "weight_decay": 0.0,
        }
        if not self.config.gate_decay:
            yield {"params": list(self.prism_layers.parameters()), "weight_decay": 0.0}

    def set_gamma_scale(self, scale: float) -> None:
        """Multiplies every cursor's gamma from here on: hardens them at test time."""
        for layer in self.prism_layers.values():
            layer.gamma_scale = scale  # type: ignore[assignment]

    def _superpose(
        self, histogram: Float[Tensor, "batch cursors time bins"]
    ) -> Float[Tensor, "batch cursors time columns"]:
        """Algorithm 2, in the basis the configuration asks for."""
        if self.config.superposition == "expected":
            return at_expected_position(histogram, self.config.pe_width)
        return superpose(histogram, self._table(histogram.shape[-1] // 2, histogram))

    def _table(self, capacity: int, like: Tensor) -> Float[Tensor, "bins columns"]:
        low_rank = self.config.superposition == "low_rank"
        return table_on(capacity, self.config.pe_width, low_rank, like.dtype, like.device)

    def _by_layer(
        self, vectors: Float[Tensor, "batch cursors time columns"], layers: int, capacity: int, stream: Stream
    ) -> Iterable[Float[Tensor, "batch heads time channels columns"]]:
        """Algorithm 3: one tensor for each Transformer layer served, with the absolute channel if there is one."""
        batch, _, time, columns = vectors.shape
        split = vectors.reshape(batch, layers, self.heads, self.config.cursors, time, columns).transpose(3, 4)
        if self.config.absolute:
            position = torch.arange(stream.seen + 1, stream.seen + time + 1, device=vectors.device)
            rows = self._table(capacity, vectors)[capacity + position.clamp_max(capacity)]
            split = torch.cat((split, rows[:, None].expand(*split.shape[:4], 1, columns)), dim=4)
        return normalise(split, self.config.pe_width, self.config.norm).unbind(1)

    def _warn_of_edges(self, histograms: Cursors) -> None:
        worst = max(float(edge_mass(h.detach()).max()) for h in histograms if h is not None and h.numel())
        if worst > EDGE_WARNING:
            warnings.warn(
                f"up to {worst:.1%} of a cursor's mass is piled up at the edge of its support of "
                f"{self.config.support} offsets; a sequence this long wants a larger `support`, or none set",
                stacklevel=3,
            )


def _being_captured(x: Tensor) -> bool:
    """Whether this pass is recorded as a CUDA graph: nothing may then wait for a result."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
