"""A PRISM layer: query and key cursors, what moves them, and what they remember from chunk to chunk.

Dimensions: batch; time = tokens of this chunk; seen = all tokens so far; bins = 2P + 1 offsets; cursors = query or
key cursors of one PRISM layer (layers served x heads x cursors per head).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Stream
from prism.gates import CopyAttention, CursorGates, LandmarkGates, LocalGates, Recurrence, RecurrentGates
from prism.ops.histogram import branch_weights, histogram_scan, one_hot_start
from prism.ops.superposition import Norm
from prism.settings import Settings, setting


@dataclass(frozen=True)
class PrismConfig(Settings):
    """What PRISM can be. The defaults are the paper's where it states one, ours elsewhere: PAPER.md, section 7."""

    # The paper's GRU, a causal convolution over the last `window` tokens, or that and a memory for landmarks.
    gates: Literal["gru", "local", "landmark"] = "gru"
    gate_features: int = setting(100, low=1)  # width of the GRU's state, or of the convolution
    window: int = setting(4, low=1)  # tokens the local gates see
    landmarks: int = setting(16, low=1)  # kinds of tokens that landmark gates remember having met
    recurrence: Recurrence = "orthogonal"  # how the GRU's W_hh is kept in bounds
    depths: tuple[int, ...] = setting((0,), low=0)  # a PRISM layer before each of these Transformer layers
    cursors: int = setting(4, low=1)  # per head
    reset_start: float = setting(0.5, above=0, high=0.999)  # initial reset probability
    gamma_start: float = setting(2.0, above=1)  # initial sharpening exponent
    epsilon: float = setting(1e-8, low=0, high=1e-2)  # added to every bin before sharpening
    start_spread: int = setting(0, low=0)  # offsets either side of 0 that a learned start may use; 0: one-hot at 0
    support: int | None = setting(None, low=1)  # P, if it is not to be the length of the sequence
    pe_width: int = setting(340, low=2)  # d_pe, the sinusoids' width
    superposition: Literal["low_rank", "full", "expected"] = "low_rank"  # "expected": f(E[position]), an ablation
    norm: Norm = "constant"
    absolute: bool = False  # one more channel with the absolute position (CONCAT_ABS_POSITION_ENCODINGS)
    content: bool = True  # False: positions only, mu = 0
    alpha_start: float = setting(1.0, above=0)
    alpha_rate: float = setting(0.03, above=0)  # alpha's own learning rate
    alpha_betas: tuple[float, float] = setting((0.8, 0.92), low=0, high=0.9999)
    gate_decay: bool = True  # whether weight decay applies to gates and gamma
    copy_every: int = setting(0, low=0)  # every n-th query cursor may copy; 0: none. The paper's: 5 for some tasks
    copy_key: Literal["increment", "trained"] = "increment"  # the key cursor a copying one is paired with
    copy_width: int = setting(32, low=1)
    copy_null_start: float = setting(4.0)


@dataclass
class CursorState:
    """What one PRISM layer remembers between chunks."""

    gates: Any = None  # what the gates of the configuration remember
    moving: Tensor | None = None  # histograms of the cursors without copy branch
    copying: Tensor | None = None
    copy_keys: Tensor | None = None
    copy_histograms: Tensor | None = None  # of the trained key cursors a copying one may jump to


class Cursors(NamedTuple):
    """One PRISM layer's cursors in groups that are computed together; `PrismLayer.arrange` puts them in order."""

    moving: Tensor  # query cursors that don't copy, then key cursors with gates of their own
    copying: Tensor | None = None  # query cursors that may copy
    fixed: Tensor | None = None  # the increment-only key cursors: all the same, so one stands for all

    def map(self, change: Callable[[Tensor], Tensor]) -> "Cursors":
        """The groups, each changed."""
        return Cursors(*(None if group is None else change(group) for group in self))  # type: ignore[arg-type]


class PrismLayer(nn.Module):
    """Gates, query and key cursors and their copy branch, for the heads of the Transformer layers it serves."""

    query_order: Tensor
    key_order: Tensor
    paired: Tensor
    moving_slots: Tensor
    copying_slots: Tensor
    fixed_slots: Tensor

    def __init__(self, width: int, depth: int, cursors: int, config: PrismConfig) -> None:
        super().__init__()
        self.config, self.cursors, self.depth = config, cursors, depth
        # Deeper in the stack the residual stream's scale is anything; at depth 0 it is the embedding's own.
        self.norm = nn.LayerNorm(width) if depth else nn.Identity()
        self.gates: RecurrentGates | LocalGates | LandmarkGates
        if config.gates == "gru":
            self.gates = RecurrentGates(width, config.gate_features, config.recurrence)
        elif config.gates == "landmark":
            self.gates = LandmarkGates(width, config.gate_features, config.window, config.landmarks)
        else:
            self.gates = LocalGates(width, config.gate_features, config.window)
        copies = torch.arange(cursors) % config.copy_every == config.copy_every - 1 if config.copy_every else (
            torch.zeros(cursors, dtype=torch.bool)
        )
        self.copying = [int(i) for i in copies.nonzero()]
        self.fixed_keys = self.copying if config.copy_key == "increment" else []
        # Moving cursors, in this order: query cursors that don't copy, then key cursors with gates of their own.
        self.moving_queries = [i for i in range(cursors) if i not in self.copying]
        self.moving_keys = [i for i in range(cursors) if i not in self.fixed_keys]
        moving = len(self.moving_queries) + len(self.moving_keys)
        # On the device, for `arrange` and `bias`: made once, since an upload a step would hold a GPU up.
        self._keep("query_order", _order(self.moving_queries, self.copying))
        self._keep("key_order", _order(self.moving_keys, self.fixed_keys))
        self._keep("paired", [len(self.moving_queries) + cursor for cursor in self.copying])
        self._keep("moving_slots", self.moving_queries + [cursors + key for key in self.moving_keys], torch.int32)
        self._keep("copying_slots", self.copying, torch.int32)
        self._keep("fixed_slots", [cursors + key for key in self.fixed_keys])
        self.cursor_gates = CursorGates(config.gate_features, moving + len(self.copying), config.reset_start)
        above = config.gamma_start - 1
        raw_gamma = above + math.log(-math.expm1(-above))  # the inverse of softplus, for any exponent
        self.raw_gamma = nn.Parameter(torch.full((moving + len(self.copying),), raw_gamma))
        self.gamma_scale = 1.0  # a test-time knob: > 1 hardens every cursor
        if config.start_spread:
            self.start_logits = nn.Parameter(torch.zeros(moving + len(self.copying), 2 * config.start_spread + 1))
            with torch.no_grad():
                self.start_logits[:, config.start_spread] = 6.0
        if self.copying:
            self.copy = CopyAttention(
                config.gate_features, len(self.copying), config.copy_width, config.copy_null_start
            )

    def _keep(self, name: str, numbers: list[int], dtype: torch.dtype = torch.int64) -> None:
        self.register_buffer(name, torch.tensor(numbers, dtype=dtype), persistent=False)

    def gamma(self) -> Float[Tensor, " cursors"]:
        """Sharpening exponent of each cursor, above 1."""
        return (1 + nn.functional.softplus(self.raw_gamma)) * self.gamma_scale

    def forward(
        self, x: Float[Tensor, "batch time width"], capacity: int, seen: int, state: CursorState,
        stream: Stream | None = None,
    ) -> Cursors:
        """Histograms of this chunk's cursors, group by group; `state` moves on to the chunk's end.

        `stream`, if given, hears of the gates.
        """
        features, state.gates = self.gates(self.norm(x), state.gates)
        # A histogram in half precision forgets where it is within a few tokens: only the gates may be half.
        exact = torch.promote_types(x.dtype, torch.float32)
        groups = (len(self.moving_queries) + len(self.moving_keys), len(self.copying))
        reset, action = (gate.to(exact).split(groups, dim=1) for gate in self.cursor_gates(features))
        gamma = self.gamma().to(exact).split(groups)
        if stream is not None and stream.recorder is not None:
            self._note_gates(reset, action, stream)
        if state.moving is None:
            state.moving, state.copying = self._start(x.shape[0], capacity, reset[0]).split(groups, dim=1)
        moving = histogram_scan(
            state.moving, branch_weights(reset[0], action[0]), gamma[0], None, self.config.epsilon
        )
        state.moving = moving[:, :, -1] if x.shape[1] else state.moving
        if not self.copying:
            return Cursors(moving)
        fixed = increment_only(x.shape[1], capacity, seen, reset[0]) if self.fixed_keys else None
        copied, no_copy = self._copied(features, moving, capacity, state, stream)
        assert state.copying is not None
        copying = histogram_scan(
            state.copying, branch_weights(reset[1], action[1], no_copy), gamma[1], copied, self.config.epsilon
        )
        state.copying = copying[:, :, -1] if x.shape[1] else state.copying
        return Cursors(moving, copying, fixed)

    def bias(
        self, x: Float[Tensor, "batch time width"], capacity: int, score_weight: Float[Tensor, "heads per_head"]
    ) -> Float[Tensor, "batch heads time time"]:
        """The position scores of a whole batch in one go, on a GPU: no histogram is kept. `forward` says the rest."""
        from prism.ops.gate_triton import gate_weights
        from prism.ops.position_bias import Group, position_bias

        features, _ = self.gates(self.norm(x), None)
        moving = len(self.moving_queries) + len(self.moving_keys)
        logits, gamma = self.cursor_gates.logits(features), self.gamma()
        start = self._start(x.shape[0], capacity, gamma)
        weights = gate_weights(logits[:, :, :moving], None)
        groups = [Group(start[:, :moving], weights, gamma[:moving], self.moving_slots)]
        if not self.copying:
            return position_bias(groups, score_weight, self.config.pe_width, epsilon=self.config.epsilon)
        copied, no_copy, _ = self.copy(features, None)
        weights = gate_weights(logits[:, :, moving:], no_copy.transpose(1, 2))
        groups.append(Group(start[:, moving:], weights, gamma[moving:], self.copying_slots))
        return position_bias(
            groups, score_weight, self.config.pe_width, copied, self.fixed_slots, self.config.epsilon
        )

    def arrange(
        self, cursors: Cursors
    ) -> tuple[Float[Tensor, "batch cursors *rest"], Float[Tensor, "batch cursors *rest"]]:
        """Queries and keys in the order of their indices, from groups of anything that has a cursor dimension."""
        query, key = cursors.moving.split((len(self.moving_queries), len(self.moving_keys)), dim=1)
        if cursors.copying is not None:
            query = torch.cat((query, cursors.copying), dim=1).index_select(1, self.query_order)
        if cursors.fixed is not None:
            fixed = cursors.fixed.expand(query.shape[0], len(self.fixed_keys), *query.shape[2:])
            key = torch.cat((key, fixed), dim=1).index_select(1, self.key_order)
        return query, key

    def arranged_gamma(self) -> tuple[Float[Tensor, " cursors"], Float[Tensor, " cursors"]]:
        """Sharpening exponents in the order of `arrange`; an increment-only key is as sharp as can be."""
        moving, copying = self.gamma()[None].split((len(self.moving_slots), len(self.copying)), dim=1)
        fixed = moving.new_full((1, 1), float("inf")) if self.fixed_keys else None
        query, key = self.arrange(Cursors(moving, copying if self.copying else None, fixed))
        return query[0], key[0]

    def _note_gates(self, reset: tuple[Tensor, ...], action: tuple[Tensor, ...], stream: Stream) -> None:
        """Increment, keep, decrement, reset of every cursor; an increment-only key is what it says."""
        moving, copying = (torch.cat((a, r[..., None]), dim=-1) for r, a in zip(reset, action, strict=True))
        fixed = moving.new_tensor((1.0, 0.0, 0.0, 0.0)).expand(1, 1, moving.shape[2], 4) if self.fixed_keys else None
        gates = self.arrange(Cursors(moving, copying if self.copying else None, fixed))
        for which, gate in zip(("query", "key"), gates, strict=True):
            stream.note(f"prism.{self.depth}.gates.{which}", gate)

    def _start(self, batch: int, capacity: int, like: Tensor) -> Float[Tensor, "batch cursors bins"]:
        cursors, spread = self.raw_gamma.shape[0], self.config.start_spread
        start = one_hot_start(batch, cursors, capacity, dtype=like.dtype, device=like.device)
        if not spread:
            return start
        reach = min(spread, capacity)
        learned = torch.softmax(self.start_logits[:, spread - reach : spread + reach + 1], dim=-1)
        padded = nn.functional.pad(learned, (capacity - reach, capacity - reach))
        return padded.to(like.dtype).expand(batch, -1, -1)

    def _copied(
        self, features: Tensor, moving: Float[Tensor, "batch moving time bins"], capacity: int, state: CursorState,
        stream: Stream | None,
    ) -> tuple[Float[Tensor, "batch copying time bins"], Float[Tensor, "batch copying time"]]:
        """Mass each copying cursor receives: p_copy over the tokens seen, put where their key cursors stand."""
        weights, no_copy, state.copy_keys = self.copy(features, state.copy_keys)
        if stream is not None and stream.recorder is not None:
            stream.note(f"prism.{self.depth}.copy", torch.cat((weights, no_copy[..., None]), dim=-1))
        weights, no_copy = weights.to(moving.dtype), no_copy.to(moving.dtype)
        seen = weights.shape[-1]
        if self.fixed_keys:  # token s stands at offset s + 1: a shift, whose cost does not grow with the bins
            inside = weights[..., :capacity]
            copied = nn.functional.pad(inside, (capacity + 1, max(0, capacity - seen)))
            beyond = weights[..., capacity:].sum(-1)  # only when a chosen support is shorter than the sequence
            return torch.cat((copied[..., :-1], (copied[..., -1] + beyond).unsqueeze(-1)), -1), no_copy
        paired = moving.index_select(1, self.paired)
        earlier = state.copy_histograms
        state.copy_histograms = paired if earlier is None else torch.cat((earlier, paired), dim=2)
        return weights @ state.copy_histograms, no_copy


def increment_only(time: int, capacity: int, seen: int, like: Tensor) -> Float[Tensor, "1 1 time bins"]:
    """A cursor that always increments: one-hot at each token's absolute position, clamped at the support's edge."""
    offsets = torch.arange(seen + 1, seen + time + 1, device=like.device).clamp_max(capacity) + capacity
    return nn.functional.one_hot(offsets, 2 * capacity + 1).to(like.dtype)[None, None]


def _order(first: list[int], second: list[int]) -> list[int]:
    """Where, in two groups of cursors one after the other, each cursor stands."""
    both = first + second
    return sorted(range(len(both)), key=both.__getitem__)
