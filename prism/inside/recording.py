"""Recordings: any intermediate quantity of a model for a batch, by name, within a bound on memory.

    seen = record(model, tokens)                                # everything, or as much as fits in a gigabyte
    seen = record(model, tokens, ["layer.*.attention"])         # patterns as in a shell
    with recording(model, ["prism.0.gates.*"]) as seen:         # whatever is run inside
        model(tokens)

What has which name (batch first throughout; a chunk read with a cache adds to the time axis of what was read before):

    embedding                    [batch, time, width]          what the first layer reads
    layer.N.query, layer.N.key   [batch, heads, time, any]     as their inner product is taken
    layer.N.scores               [batch, heads, time, seen]    before the weights; -inf where a key is not visible
    layer.N.scores.content       ...                           PRISM: mu <q, k>, the content's part of the score
    layer.N.scores.position      ...                           PRISM: (1 - mu) sum over cursors, the positions' part
    layer.N.attention            [batch, heads, time, seen]    the weights
    layer.N.out                  [batch, time, width]          the residual stream after the layer
    logits                       [batch, time, vocabulary]
    prism.D.histograms.query     [batch, cursors, time, bins]  of the PRISM layer before layer D, after the token's step
    prism.D.histograms.key       ...
    prism.D.gates.query          [batch, cursors, time, 4]     increment, keep, decrement; and reset, beside them
    prism.D.gates.key            ...
    prism.D.copy                 [batch, copying, time, seen + 1]  p_copy over the tokens before; last, the null slot
    prism.D.gamma.query, .key    [cursors]                     sharpening exponents
    prism.alpha, prism.mu        [layers, heads, ...]          how sharply a cursor is read, and the content's share

An encoding of your own records what it likes: `stream.note("mine.distance", tensor)` in any hook. Nothing is computed
or kept for a recording while nobody records.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from jaxtyping import Int
from torch import Tensor

from prism.architectures import Architecture
from prism.errors import RunError, UserError

EVERYTHING = ("*",)
MOST = 2**30  # bytes


class Recording(Mapping[str, Tensor]):
    """Name -> what was recorded under it, in the host's memory, in the order of recording."""

    def __init__(self, wanted: Sequence[str] = EVERYTHING, most: int = MOST) -> None:
        self.wanted, self.most, self.bytes = tuple(wanted), most, 0
        self._parts: dict[str, list[Tensor]] = {}

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.wanted)

    def note(self, name: str, value: Tensor) -> None:
        """Keeps a copy, if it is wanted and fits."""
        if not self.wants(name):
            return
        size = value.numel() * value.element_size()
        if self.bytes + size > self.most:
            needed, allowed = ((number + 2**20 - 1) // 2**20 for number in (self.bytes + size, self.most))
            raise RunError(f"recording {name} of shape {list(value.shape)} would take {needed:,} MiB in all, and "
                           f"{allowed:,} are allowed: record fewer quantities, a shorter batch, or allow more")
        self.bytes += size
        self._parts.setdefault(name, []).append(value.detach().to("cpu", copy=True))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            raise KeyError(f"{name} was not recorded; what was: {', '.join(self._parts) or 'nothing'}")
        parts = self._parts[name]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _joined(chunks: list[Tensor]) -> Tensor:
    """Chunks of one sequence after one another: attention's rows grow with the tokens seen, the rest is 0 or -inf."""
    if chunks[0].dim() < 3:  # a parameter: the same each time
        return chunks[-1]
    time = 1 if chunks[0].dim() == 3 else 2
    widest = max(chunk.shape[-1] for chunk in chunks)
    fill = float("-inf") if any(bool(chunk.isneginf().any()) for chunk in chunks) else 0.0
    return torch.cat([
        torch.nn.functional.pad(chunk, (0, widest - chunk.shape[-1]), value=fill) for chunk in chunks
    ], dim=time)


@contextmanager
def recording(model: Architecture, wanted: Sequence[str] = EVERYTHING, most: int = MOST) -> Iterator[Recording]:
    """Records whatever the model computes inside the `with` block."""
    made, before = Recording(wanted, most), model.recorder
    model.recorder = made
    try:
        yield made
    finally:
        model.recorder = before
    for pattern in made.wanted:
        if not any(fnmatchcase(name, pattern) for name in made):
            names = ", ".join(made) or "nothing"
            raise UserError(f"nothing of the name {pattern!r} was there to record; what was: {names}")


@torch.no_grad()
def record(
    model: Architecture, tokens: Int[Tensor, "batch time"], wanted: Sequence[str] = EVERYTHING, most: int = MOST
) -> Recording:
    """Records one pass over a batch, in eval mode."""
    was_training = model.training
    try:
        with recording(model.eval(), wanted, most) as made:
            model(tokens)
    finally:
        model.train(was_training)
    return made
