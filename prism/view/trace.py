"""A trace: one prompt, what a model made of it, and what went on inside; everything the page shows, as JSON.

A prompt is checked, then completed token by token with a cache, then all of it is read once more and recorded: with
the whole sequence in one pass, everything of interest is there at once. The model stays as it is throughout.

Dimensions: time = all tokens, the start token included.
"""

import json
import threading
import time as clock
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from prism.architectures import count_parameters
from prism.config import LONGEST
from prism.data import draw
from prism.device import matmul_precision
from prism.encodings.prism import Prism
from prism.errors import UserError
from prism.generate import END
from prism.inside import Recording, record
from prism.trained import Trained
from prism.transformer import Transformer
from prism.view.block import block, block_bytes
from prism.view.cursors import RecordedCursors, check_indices, cursor_bytes, places, quantities

FORMAT = 1
START = "⊢"  # how the start token reads
TOP = 5
ENOUGH = 256  # tokens to write where nobody knows the right answer
SPARE = 8  # more than the right answer needs
MOST_JSON = 64 << 20  # bytes of a trace
MOST_NUMBERS = 1 << 27  # float32 numbers of a recording, and of what a pass holds: 512 MiB each
MOST_BODY = 64 << 10  # bytes of a request: the tokens of a trace must fit in one
ROW = 512  # bytes: more than a row of the table of cursors takes, or the rest of a request

Top = list[list[Any]]  # [["3", 0.993], ["1", 0.004], ...], the likeliest first


@dataclass(frozen=True)
class Question:
    """A prompt that the model can read, and how far it may go on."""

    ids: list[int]
    limit: int
    right: str | None  # the task's completion
    why: str | None  # ... or what it says instead


class Written(NamedTuple):
    """A token the model wrote, and the likeliest ones it chose from."""

    id: int
    token: str
    top: Top
    seconds: float  # that the step took


class LiveModel:
    """A trained Transformer that answers questions about itself, to several threads if need be."""

    def __init__(self, trained: Trained) -> None:
        if not isinstance(trained.model, Transformer):
            raise UserError(f"prism view shows what goes on in a Transformer, and {trained.folder.path} is a run of "
                            f"{trained.config.label}")
        self.trained, self.model, self.words = trained, trained.model, trained.words
        self.task, self.start = trained.config.task, int(self.model.config.start_token)
        self.end = int(self.words.encode(END)[0])
        self.longest = longest(self.model, self.words.tokens)
        self._one_at_a_time = threading.Lock()

    def facts(self) -> dict[str, Any]:
        """What the page says of the run."""
        config = self.trained.config
        return {
            "name": self.trained.folder.path.resolve().name, "task": self.task.name, "label": config.label,
            "max_length": config.max_length, "parameters": count_parameters(self.model),
            "step": self.trained.step, "start_token": bool(self.start),
        }

    def examples(self, each: int = 3) -> list[dict[str, Any]]:
        """Prompts of the task's test set: the longest that training may have seen, and the shortest beyond."""
        lengths, trained = self.trained.config.test_lengths(), self.trained.config.max_length
        known = [length for length in lengths if length <= trained][-each:]
        found = []
        for length in known + [length for length in lengths if length > trained][:each]:
            try:
                example = draw(self.task, seed=0, stream="test", step=0, size=1, length=length)[0]
            except UserError:  # SCAN has not every length
                continue
            if sum(len(self.words.split(part)) for part in example) <= self.longest:
                found.append({"prompt": example.prompt, "length": length})
        return found

    def asked(self, prompt: object, limit: object = None) -> Question:
        """What somebody from outside wants to know, or a `UserError` that says what was wrong with it."""
        if not isinstance(prompt, str):
            raise UserError(f"prompt must be text, got {prompt!r:.40}")
        if limit is not None and (type(limit) is not int or not 1 <= limit <= LONGEST):
            raise UserError(f"limit must be a whole number from 1 to {LONGEST:,} or null, got {limit!r:.40}")
        length = len(self.words.split(prompt))
        if length + (limit or 1) > self.longest:  # before anything is said that repeats the prompt
            more = f" and {limit:,} to write" if limit else ""
            raise UserError(f"a prompt of {length:,} tokens{more} is too long to show: prompt and completion may have "
                            f"{self.longest:,} tokens together")
        ids = self.words.encode(prompt).tolist()
        right, why = self._right(ids)
        if limit is None:
            limit = ENOUGH if right is None else len(self.words.split(right)) + SPARE
        return Question(ids, min(limit, self.longest - length), right, why)

    def write(self, question: Question) -> Iterator[Written]:
        """The completion, token by token, up to its end or the limit. Others may use the model between two tokens."""
        with self._alone():
            cache = self.model.new_cache(len(question.ids) + question.limit)
        following = question.ids
        for _ in range(question.limit):
            with self._alone():
                begun = clock.perf_counter()
                logits = self.model(self._tensor(following), cache)[0, -1].cpu()
                seconds = clock.perf_counter() - begun
            # The logits decide: probabilities, rounded, may tie where they do not.
            chosen = int(logits.argmax())
            yield Written(chosen, self.words.decode([chosen]), self._likeliest(logits[None])[0], seconds)
            if chosen == self.end:
                return
            following = [chosen]

    def trace(
        self, question: Question, written: Sequence[Written], shown: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """The trace of a completion, with these cursors or with the most important."""
        begun, completion = clock.perf_counter(), [each.id for each in written]
        ids, encoding = [*question.ids, *completion], self.model.encoding
        recorded = self._record(ids, ["logits", "layer.*.attention", *quantities(encoding)])
        moved = RecordedCursors(encoding, recorded, self.start + len(ids))
        rows = moved.table()
        shown = moved.most_important(rows) if shown is None else self._with_room(moved, shown)
        layers = range(self.model.config.layers)
        attention = torch.stack([recorded[f"layer.{layer}.attention"][0] for layer in layers])
        ended = bool(completion) and completion[-1] == self.end
        stopped = None if ended else f"stopped after {len(completion):,} tokens without an end"
        right = question.right
        return {
            "format": FORMAT, "run": self.facts(), "tokens": self._texts(ids), "prompt": self.start + len(question.ids),
            "right": right, "expected": None if right is None else self.words.split(right),
            "verdict": self._verdict(right, completion),
            "note": "; ".join(filter(None, (stopped, question.why))) or None,
            # Of the first token, no model with a start token says anything: it is given.
            "predictions": [[] for _ in range(self.start)] + self._likeliest(recorded["logits"][0]),
            "layers": len(layers), "heads": self.model.config.heads, "attention": block(attention), "cursors": rows,
            **moved.details(shown),
            "seconds": {"generate": round(sum(each.seconds for each in written), 4),
                        "record": round(clock.perf_counter() - begun, 4)},
        }

    def complete(self, prompt: object, limit: object = None) -> dict[str, Any]:
        """The trace of a prompt and its completion."""
        question = self.asked(prompt, limit)
        return self.trace(question, list(self.write(question)))

    def again(self, tokens: object, prompt: object = None, shown: object = None) -> dict[str, Any]:
        """The trace of tokens that are all there: those of an earlier trace. Nothing is written anew."""
        ids = self._ids(tokens)
        texts = self._texts(ids)
        if prompt is None:  # every task's prompt ends with it
            prompt = texts.index("=") + 1 if "=" in texts else len(texts)
        if type(prompt) is not int or not self.start < prompt <= self.start + len(ids):
            raise UserError(f"prompt must say how many of the {self.start + len(ids):,} tokens are the prompt's, "
                            f"got {prompt!r:.40}")
        given = prompt - self.start
        right, why = self._right(ids[:given])
        chosen = None if shown is None else check_indices(self.model.encoding, shown)
        written = [Written(one, self.words.decode([one]), [], 0.0) for one in ids[given:]]
        return self.trace(Question(ids[:given], len(written), right, why), written, chosen)

    def cursors(self, tokens: object, indices: object) -> dict[str, Any]:
        """Histograms and gates of some cursors, for the tokens of an earlier trace."""
        ids, encoding = self._ids(tokens), self.model.encoding
        chosen = check_indices(encoding, indices)
        everywhere = places(encoding)
        recorded = self._record(ids, quantities(encoding, sorted({everywhere[index].depth for index in chosen})))
        moved = RecordedCursors(encoding, recorded, self.start + len(ids))
        return moved.details(self._with_room(moved, chosen))

    def _record(self, ids: Sequence[int], wanted: Sequence[str]) -> Recording:
        with self._alone():
            return record(self.model, self._tensor(ids), wanted, 4 * MOST_NUMBERS)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thread at a time, in the precision the run asks for: who records changes the model's state."""
        with self._one_at_a_time, torch.no_grad(), matmul_precision(self.trained.config.matmul):
            yield

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [START] * self.start + [self.words.decode([one]) for one in ids]

    def _ids(self, tokens: object) -> list[int]:
        """Tokens as a trace has them, as ids: `<37>` is what an id without a symbol reads."""
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise UserError("tokens must be a list of texts")
        if self.start and tokens[:1] == [START]:
            tokens = tokens[1:]
        if not 1 <= len(tokens) <= self.longest:
            raise UserError(f"tokens must be 1 to {self.longest:,}, got {len(tokens):,}")
        known = {self.words.decode([one]): one for one in range(self.model.config.vocabulary)}
        for place, token in enumerate(tokens):
            if token not in known:
                raise UserError(f"{token!r:.40} at position {place + 1} is not a token of {self.task.name}")
        return [known[token] for token in tokens]

    def _right(self, prompt: Sequence[int]) -> tuple[str | None, str | None]:
        """The task's completion, or why it has none."""
        try:
            return self.task.answer(self.words.decode(prompt)), None
        except ValueError as error:  # a UserError, or a number that is too long for Python
            return None, str(error)

    def _verdict(self, right: str | None, completion: Sequence[int]) -> str:
        if right is None:
            return "unknown"
        return "right" if self.words.decode(completion) == right else "wrong"

    def _likeliest(self, logits: Float[Tensor, "time vocabulary"]) -> list[Top]:
        """The likeliest tokens after each, with their probabilities."""
        shares, ids = torch.softmax(logits.double(), dim=-1).topk(min(TOP, logits.shape[-1]))
        names = [self.words.decode([one]) for one in range(logits.shape[-1])]
        return [
            [[names[one], round(share, 6)] for one, share in zip(*row, strict=True)]
            for row in zip(ids.tolist(), shares.tolist(), strict=True)
        ]

    def _with_room(self, moved: RecordedCursors, shown: Sequence[int]) -> Sequence[int]:
        """The cursors asked for, if one page can show them all."""
        room, size = MOST_JSON - attention_bytes(self.model, moved.time), moved.bytes(shown)
        if size > room:
            raise UserError(f"{len(shown):,} cursors over {moved.time:,} tokens are too much for one page: "
                            f"ask for {len(shown) * room // size:,} at most")
        return shown


def longest(model: Transformer, alphabet: Sequence[str]) -> int:
    """The most tokens of prompt and completion together whose trace is made within the bounds on top of this file."""
    within = bisect_left(range(1, LONGEST), True, key=lambda time: not _fits(model, alphabet, time))
    most = within - model.config.start_token
    bound = model.longest()
    return most if bound is None else min(most, bound)


def _fits(model: Transformer, alphabet: Sequence[str], time: int) -> bool:
    """Whether a trace of so many tokens does, in JSON and in memory."""
    encoding, word = model.encoding, max(len(json.dumps(token)) for token in (*alphabet, START, "<999999>"))
    pairs, support = len(places(encoding)) // 2, time
    if isinstance(encoding, Prism):
        support = encoding.config.support or time
    texts = time * (2 + TOP) * (word + 16) + 2 * pairs * ROW
    shown = min(pairs, 1) * 2 * cursor_bytes(time, 2 * support + 1)
    # Attention's weights; histograms, gates and a copying cursor's p_copy; logits.
    kept = model.config.layers * model.config.heads * time + encoding.footprint(time) + model.config.vocabulary
    kept += pairs * (2 * 4 + time + 1) if pairs else 0
    return (
        attention_bytes(model, time) + shown + texts <= MOST_JSON
        and time * (word + 1) + ROW <= MOST_BODY
        and time * max(kept, model.numbers_per_token(time)) <= MOST_NUMBERS
    )


def attention_bytes(model: Transformer, time: int) -> int:
    """What the attention of so many tokens takes in JSON."""
    return block_bytes(model.config.layers, model.config.heads, time, time)
