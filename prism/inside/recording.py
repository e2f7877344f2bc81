"""Recordings: any intermediate quantity of a model for a batch, by name, within a bound on memory.

    seen = record(model, tokens)                                # everything, or as much as fits in a gigabyte
    seen = record(model, tokens, ["layer.*.attention"])         # patterns as in a shell
    with recording(model, ["prism.0.gates.*"]) as seen:         # the sequences read inside, whole or in chunks
        model(tokens)

What has which name (batch first throughout; a chunk read with a cache adds to the time axis of what was read before,
and a start token, where a model has one, is the first on every time axis but the logits'):

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

The cursors of a PRISM layer stand in the order layer, head, cursor: with c of them a head, the number of one is
((layer - D) heads + head) c + cursor. The layers of alpha and mu are those from the first PRISM layer on.

An encoding of your own records what it likes: `stream.note("mine.distance", tensor)` in any hook. Four dimensions mean
[batch, heads, time, any], three [batch, time, any]; of anything smaller the last note is kept. Nothing is computed or
kept for a recording while nobody records.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prism.architectures import Architecture
from prism.encodings.encoding import Stream
from prism.errors import RunError, UserError

EVERYTHING = ("*",)
PARAMETERS = ("prism.alpha", "prism.mu", "prism.*.gamma.*")  # the same for all chunks
MOST = 2**30  # bytes


class Recording(Mapping[str, Tensor]):
    """Name -> what was recorded under it, in the host's memory, in the order of recording."""

    def __init__(self, wanted: Sequence[str] | str = EVERYTHING, most: int = MOST) -> None:
        self.wanted = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        self.most, self.bytes = most, 0
        self._parts: dict[str, list[Tensor]] = {}

    def wants(self, name: str) -> bool:
        return _among(name, self.wanted)

    def note(self, name: str, value: Tensor) -> None:
        """Keeps a copy, if it is wanted and fits; what does not fit ends the recording, and nothing is kept of it."""
        if not self.wants(name):
            return
        size = value.numel() * value.element_size()
        if value.dim() < 3 or _among(name, PARAMETERS):  # the last one counts
            self.bytes -= sum(part.numel() * part.element_size() for part in self._parts.get(name, ()))
            self._parts[name] = []
        if self.bytes + size > self.most:
            needed, allowed = ((number + 2**20 - 1) // 2**20 for number in (self.bytes + size, self.most))
            self._parts.clear()
            self.bytes = 0
            raise RunError(f"recording {name} of shape {list(value.shape)} takes the recording to {needed:,} MiB, and "
                           f"{allowed:,} are allowed: record fewer quantities, a shorter batch, or allow more")
        self.bytes += size
        self._parts.setdefault(name, []).append(value.detach().to("cpu", copy=True))

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            raise KeyError(f"{name} was not recorded; what was: {', '.join(self._parts) or 'nothing'}")
        parts = self._parts[name]
        return parts[0] if len(parts) == 1 else _joined(name, parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _joined(name: str, chunks: list[Tensor]) -> Tensor:
    """Chunks of one sequence after one another; attention's rows grow with the tokens seen."""
    if fnmatchcase(name, "prism.*.copy"):  # and the null slot stays behind them
        tokens, null = zip(*(chunk.split((chunk.shape[-1] - 1, 1), dim=-1) for chunk in chunks), strict=True)
        return torch.cat((_stacked(tokens, 0.0), _stacked(null, 0.0)), dim=-1)
    return _stacked(chunks, float("-inf") if ".scores" in name else 0.0)


def _stacked(chunks: Sequence[Tensor], unseen: float) -> Tensor:
    widest = max(chunk.shape[-1] for chunk in chunks)
    padded = [torch.nn.functional.pad(chunk, (0, widest - chunk.shape[-1]), value=unseen) for chunk in chunks]
    return torch.cat(padded, dim=1 if chunks[0].dim() == 3 else 2)


def _among(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def recording(
    model: Architecture, wanted: Sequence[str] | str = EVERYTHING, most: int = MOST
) -> Iterator[Recording]:
    """Records the batch of sequences that the model reads inside the `with` block, whole or in chunks with a cache."""
    made, before = Recording(wanted, most), model.recorder
    heard: list[Stream | None] = []  # at most one

    def hear(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        if model.recorder is not made:  # another recording, further in
            return
        stream: Stream | None = getattr(given[1] if len(given) > 1 else named.get("cache"), "stream", None)
        if heard and (stream is None or stream is not heard[0]):
            raise UserError("a recording is of one batch of sequences, and this is a second: record each in a block "
                            "of its own")
        heard[:] = [stream]
        if stream is not None:  # it may be older than the recording
            stream.recorder = made

    hook = model.register_forward_pre_hook(hear, with_kwargs=True)
    model.recorder = made
    try:
        yield made
    finally:
        hook.remove()
        model.recorder = before
        if heard and heard[0] is not None:  # it may live longer
            heard[0].recorder = before
    for pattern in made.wanted:
        if not any(fnmatchcase(name, pattern) for name in made):
            names = ", ".join(made) or "nothing"
            raise UserError(f"nothing of the name {pattern!r} was there to record; what was: {names}")


@torch.no_grad()
def record(
    model: Architecture, tokens: Int[Tensor, "batch time"], wanted: Sequence[str] | str = EVERYTHING, most: int = MOST
) -> Recording:
    """Records one pass over a batch, in eval mode."""
    was_training = model.training
    try:
        with recording(model.eval(), wanted, most) as made:
            model(tokens)
    finally:
        model.train(was_training)
    return made
