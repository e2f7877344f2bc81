"""From text to tensors: a task's vocabulary, and batches that are a pure function of (seed, stream, step).

Nothing is stored between batches, so a run that was interrupted goes on with exactly the batches it would have
had, and a bad batch can be made again from three numbers. `Prefetcher` makes them ahead of time and changes nothing.

    >>> from prism.tasks.copy import Copy
    >>> made = collate(vocabulary(Copy()), [Example("12=", "12."), Example("7=", "7.")])
    >>> made.tokens
    tensor([[ 1,  2, 10,  1,  2],
            [ 7, 10,  7, 11,  0]])
    >>> made.targets
    tensor([[ 2, 10,  1,  2, 11],
            [10,  7, 11,  0,  0]])
    >>> made.mask.int()
    tensor([[0, 0, 1, 1, 1],
            [0, 1, 1, 0, 0]], dtype=torch.int32)

The token `=` sits where the first symbol of the completion is the target. Padding is 0, a token like any other:
it follows everything that is scored and is masked, so a causal model never sees it where it matters.
"""

import hashlib
import queue
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import TracebackType
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from prism.errors import UserError
from prism.tasks.task import Example, Split, Task

VOCABULARY_SIZE = 64  # the same for every task, so that models are alike; unused ids cost a few rows

Stream = Literal["train", "validation", "test"]


class Batch(NamedTuple):
    """What the model reads, what it should say next, and where that counts."""

    tokens: Int64[Tensor, "batch time"]
    targets: Int64[Tensor, "batch time"]
    mask: Bool[Tensor, "batch time"]  # true where the target is a token of the completion, its end included

    def to(self, device: torch.device | str) -> "Batch":
        return Batch(*(part.to(device, non_blocking=True) for part in self))

    def pinned(self) -> "Batch":
        """A copy a GPU can fetch while the host goes on."""
        return Batch(*(part.pin_memory() for part in self))


class Vocabulary:
    """The tokens of one task and their ids: text to ids and back.

    >>> from prism.tasks.copy import Copy
    >>> words = Vocabulary(Copy())
    >>> words.encode("42=").tolist()
    [4, 2, 10]
    >>> words.decode([4, 2, 11])
    '42.'
    >>> words.encode("4a=")
    Traceback (most recent call last):
    prism.errors.UserError: 'a' at position 2 of '4a=' is not a symbol of copy (its symbols: 0 1 2 3 4 5 6 7 8 9 = .)
    """

    def __init__(self, task: Task) -> None:
        self.task_name = task.name
        self.separator = task.separator
        self.tokens = task.alphabet
        _check_alphabet(task)
        self._ids = {token: place for place, token in enumerate(self.tokens)}
        # Symbol code -> id, -1 for strangers; the last entry stands for every code beyond the table.
        self._table = np.full(max(ord(token[0]) for token in self.tokens) + 2, -1, dtype=np.int64)
        if not self.separator:
            for token, place in self._ids.items():
                self._table[ord(token)] = place

    def split(self, text: str) -> list[str]:
        """The tokens of a text, known or not."""
        return text.split() if self.separator else list(text)

    def encode(self, text: str) -> Int64[np.ndarray, " time"]:
        """The ids of a text, or a `UserError` that points at the first symbol the task doesn't have."""
        if not text.strip():
            raise UserError(f"the prompt is empty; give at least one symbol of {self.task_name} ({self._listed()})")
        ids = self._look_up([text])
        if ids.min() < 0:
            place = int((ids < 0).argmax())
            raise UserError(f"{self.split(text)[place]!r} at position {place + 1} of {text!r} is not a symbol of "
                            f"{self.task_name} ({self._listed()})")
        return ids

    def encode_all(self, texts: Sequence[str]) -> Int64[np.ndarray, " total"]:
        """The ids of many texts, one after the other: one pass instead of one per text."""
        ids = self._look_up(texts)
        if ids.size and ids.min() < 0:
            for text in texts:
                self.encode(text)
        return ids

    def decode(self, ids: Sequence[int] | Int64[np.ndarray, " time"] | Int64[Tensor, " time"]) -> str:
        """The text of some ids. An id without a symbol, which an untrained model may well write, reads `<id>`."""
        known = len(self.tokens)
        return self.separator.join(self.tokens[i] if 0 <= i < known else f"<{i}>" for i in map(int, ids))

    def _look_up(self, texts: Sequence[str]) -> Int64[np.ndarray, " total"]:
        if self.separator:
            words = self.separator.join(texts).split()
            return np.array([self._ids.get(word, -1) for word in words], dtype=np.int64)
        # A lone surrogate (undecodable bytes typed in a terminal) must reach the error message, not stop here.
        codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype="<u4")
        ids: np.ndarray = self._table[np.minimum(codes, len(self._table) - 1)]
        return ids

    def _listed(self) -> str:
        return f"its symbols: {' '.join(self.tokens)}"


def _check_alphabet(task: Task) -> None:
    tokens = task.alphabet
    if not 0 < len(tokens) <= VOCABULARY_SIZE:
        raise UserError(f"the alphabet of {task.name} has {len(tokens)} tokens; "
                        f"a vocabulary holds 1 to {VOCABULARY_SIZE}")
    if len(set(tokens)) < len(tokens):
        twice = sorted({token for token in tokens if tokens.count(token) > 1})
        raise UserError(f"the alphabet of {task.name} names tokens more than once: {' '.join(twice)}")
    for token in tokens:
        if token.split() != [token] or (not task.separator and len(token) != 1):
            raise UserError(f"the alphabet of {task.name} holds {token!r}; a token is one character, or one word "
                            f"where the task's separator is a space")


@cache
def vocabulary(task: Task) -> Vocabulary:
    """The vocabulary of a task, made once."""
    return Vocabulary(task)


def collate(words: Vocabulary, examples: Sequence[Example], pad_to: int | None = None, multiple: int = 1) -> Batch:
    """Examples as one batch, as wide as the longest needs rounded up to a multiple, or `pad_to` positions wide."""
    if not examples:
        raise UserError("a batch needs at least one example; got none")
    ids = words.encode_all([words.separator.join(example) for example in examples])
    if words.separator:
        prompts = np.array([len(words.split(example.prompt)) for example in examples])
        lengths = prompts + np.array([len(words.split(example.completion)) for example in examples])
    else:
        prompts = np.array([len(example.prompt) for example in examples])
        lengths = prompts + np.array([len(example.completion) for example in examples])

    width = -(-(int(lengths.max()) - 1) // multiple) * multiple if pad_to is None else pad_to
    if lengths.max() - 1 > width:
        raise UserError(f"the longest example has {lengths.max() - 1} input tokens, more than pad_to={width}")
    places = np.arange(width + 1)
    inside = places < lengths[:, None]
    padded = np.zeros(inside.shape, dtype=np.int64)
    padded[inside] = ids
    completion = inside & (places >= prompts[:, None])
    return Batch(*(torch.from_numpy(np.ascontiguousarray(part))
                   for part in (padded[:, :-1], padded[:, 1:], completion[:, 1:])))


def draw(task: Task, *, seed: int, stream: Stream, step: int, size: int, max_length: int | None = None,
         length: int | None = None, split: Split | None = None) -> list[Example]:
    """The examples of one batch: as training sees them up to `max_length`, or all of one `length`.

    The split is the stream's own unless another is named. Streams, steps, seeds and lengths each have draws of
    their own; a smaller `size` is the beginning of a larger one.
    """
    bound = max_length if length is None else length
    if bound is None or (max_length is not None and length is not None):
        raise UserError(f"give either max_length or length; got {max_length} and {length}")
    if bound < 1 or size < 1:
        raise UserError(f"length and size of a batch are at least 1; got {bound} and {size}")
    make = task.example if max_length is None else task.training_example
    # A text under a cryptographic hash, since Python's own hash() differs from process to process and
    # neighbouring numbers are poor seeds.
    key = f"{seed} {stream} {step} {'length' if max_length is None else 'max_length'} {bound}"
    rng = random.Random(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=32).digest(), "big"))
    return [make(rng, bound, split or stream) for _ in range(size)]


def batch(task: Task, *, seed: int, stream: Stream, step: int, size: int, max_length: int | None = None,
          length: int | None = None, split: Split | None = None, pad_to: int | None = None,
          multiple: int = 1) -> Batch:
    """The batch of this seed, stream and step: `draw`, then `collate`. The same arguments give the same batch."""
    examples = draw(task, seed=seed, stream=stream, step=step, size=size, max_length=max_length, length=length,
                    split=split)
    return collate(vocabulary(task), examples, pad_to, multiple)


class _Failure(NamedTuple):
    error: BaseException


class Prefetcher(Iterator[Batch]):
    """The batches of some steps, in order, made by a thread that stays at most `depth` batches ahead.

    What `make` raises is raised here, in the place of the batch it should have made. Leaving the `with` block, or
    `close`, stops the thread and waits for it.

    >>> from prism.tasks.copy import Copy
    >>> def make(step):
    ...     return batch(Copy(), seed=0, stream="train", step=step, size=2, length=3)
    >>> with Prefetcher(make, range(2)) as ahead:
    ...     [tuple(each.tokens.shape) for each in ahead]
    [(2, 7), (2, 7)]
    """

    def __init__(self, make: Callable[[int], Batch], steps: Iterable[int], depth: int = 4) -> None:
        if depth < 1:
            raise UserError(f"depth must be at least 1, got {depth}")
        self._make, self._steps = make, steps
        self._ready: queue.SimpleQueue[Batch | _Failure | None] = queue.SimpleQueue()
        # Permits bound the read-ahead: closing hands one out, so the thread never sleeps on a full queue.
        self._permits = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prism-prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        if self._closed.is_set():
            raise StopIteration
        item = self._ready.get()
        self._permits.release()
        if isinstance(item, Batch):
            return item
        self.close()
        if isinstance(item, _Failure):
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop reading ahead; what was made and not taken is dropped. Closing twice is fine."""
        self._closed.set()
        self._permits.release()
        self._thread.join()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        try:
            for step in self._steps:
                self._permits.acquire()
                if self._closed.is_set():
                    break
                self._ready.put(self._make(step))
            self._ready.put(None)
        except BaseException as error:  # whatever it is, the consumer must hear of it instead of waiting for ever
            self._ready.put(_Failure(error))
