"""What a task may tell an encoding of its structure: whole numbers, one a token, from it and those before it alone.

    digits      the token's place in its run of digits, from 1; 0 for a token that is no digit
    segments    how many marks (punctuation) came before the token: the number of its segment
    coupling    a number that tokens which belong together share, as the task's method `coupling` says; -1 for none

    >>> from prism.tasks.copy import Copy
    >>> for kind in ("digits", "segments", "coupling"):
    ...     print(traced(Copy(), kind, "834=834."))
    12301230
    00001111
    1230123-

The start token belongs to nothing: it is no digit, shares no number and is a segment of its own.

Dimensions: batch; key = all tokens so far.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from prism.encodings.encoding import NO_TOKEN, Encoding, HintKind, Hints, Stream
from prism.errors import UserError
from prism.tasks import Task, all_tasks

END = "."  # of every completion


class Seen:
    """The tokens so far, as a task may ask about them. No answer about a token depends on a later one."""

    def __init__(self, tokens: Int[Tensor, "batch key"], ids: Mapping[str, int]) -> None:
        self._tokens, self._ids = tokens, ids

    @property
    def place(self) -> Int[Tensor, "batch key"]:
        """1, 2, 3 ... from the first token on; a start token is at 0."""
        return (self._tokens != NO_TOKEN).cumsum(1)

    def at(self, *symbols: str) -> Bool[Tensor, "batch key"]:
        """Where one of these symbols stands."""
        found = torch.zeros_like(self._tokens, dtype=torch.bool)
        for first, last in _ranges(self._ids[symbol] for symbol in symbols):
            found = found | ((self._tokens >= first) & (self._tokens <= last))
        return found

    def before(self, *symbols: str) -> Int[Tensor, "batch key"]:
        """How many of these symbols came before each token."""
        return _before(self.at(*symbols))

    def after(self, *symbols: str) -> Bool[Tensor, "batch key"]:
        """Whether one of these symbols came before each token."""
        return self.before(*symbols) > 0

    def since(self, *symbols: str) -> Int[Tensor, "batch key"]:
        """How far back the last of these symbols is: 0 where one stands. It counts as if one opened the text."""
        return self.place - _last(self.place, self.at(*symbols))

    def count(self, symbol: str, since: tuple[str, ...]) -> Int[Tensor, "batch key"]:
        """How many times `symbol` stands from the last of the symbols `since` up to each token, itself included."""
        counted = self.at(symbol).cumsum(1)
        return counted - _last(counted, self.at(*since))


@dataclass(frozen=True)
class TaskHints:
    """The hint of one kind that a task gives: ids of all tokens so far -> a number for each."""

    task: Task
    kind: HintKind

    def __call__(self, tokens: Int[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
        seen = Seen(tokens, _ids(self.task))
        opening = tokens == NO_TOKEN
        if self.kind == "segments":
            return _before(seen.at(*self.task.marks) | opening)
        if self.kind == "digits":
            digits = seen.at(*(symbol for symbol in self.task.digits if symbol in _ids(self.task)))
            return seen.place - _last(seen.place, ~digits)
        numbers = self.task.coupling(seen)
        assert numbers is not None
        return numbers.clamp_min(0).masked_fill(opening | seen.at(END) | seen.after(END), -1)


def hints_of(task: Task, kind: HintKind, asked_by: str = "the encoding") -> Hints:
    """What the task tells of this kind, or a `UserError` that names the tasks which do."""
    if kind not in task.hint_kinds():
        raise UserError(f"{asked_by} needs a task that tells its {kind}, and {task.name} does not; "
                        f"tasks that do: {', '.join(tasks_with(kind))}")
    return TaskHints(task, kind)


def tasks_with(kind: HintKind) -> list[str]:
    """The tasks that tell this."""
    return [name for name, task in all_tasks().items() if kind in task.hint_kinds()]


def told(encoding: Encoding, batch: int, stream: Stream, device: torch.device) -> Int[Tensor, "batch key"]:
    """What an encoding has been told of all tokens so far. Told nothing, it sees plain places 1, 2, 3 ..., one segment.

    In a Transformer of your own, set `encoding.hints`, once, and `stream.tokens`, before `embed`.
    """
    if encoding.hints is None:
        places = torch.arange(1, stream.seen + stream.time + 1, device=device).expand(batch, -1)
        return torch.zeros_like(places) if encoding.hint == "segments" else places
    if stream.tokens is None:
        raise UserError(f"{encoding.name} reads its hints off token ids: set `stream.tokens` before calling `embed`")
    return encoding.hints(stream.tokens)


def traced(task: Task, kind: HintKind, text: str) -> str:
    """A hint as text, to stand under the tokens it is of: the last digit of each number, `-` for none."""
    words = text.split() if task.separator else list(text)
    numbers = hints_of(task, kind)(torch.tensor([[_ids(task)[word] for word in words]]))[0].tolist()
    return task.separator.join("-" if number < 0 else str(number % 10) for number in numbers)


def _before(where: Bool[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
    """How many tokens before each are marked."""
    return where.cumsum(1) - where.long()


def _last(value: Int[Tensor, "batch key"], where: Bool[Tensor, "batch key"]) -> Int[Tensor, "batch key"]:
    """A value that never falls, as it was at the last token `where`; 0 before the first."""
    return (value * where).cummax(1).values


def _ranges(ids: Iterable[int]) -> list[tuple[int, int]]:
    """Ids as few stretches, first and last: two comparisons each, and nothing to send to the device."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(ids):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges


@cache
def _ids(task: Task) -> Mapping[str, int]:
    return {token: place for place, token in enumerate(task.alphabet)}
