"""How often a model writes the whole completion right: exact match, over lengths, with intervals.

One teacher-forced pass scores an example exactly: with greedy decoding, "every completion token is the argmax given
the true prefix" and "generation reproduces the completion" are the same event.

Dimensions: batch; time = input tokens; vocabulary.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from prism.architectures import Architecture
from prism.data import Batch, Stream, Vocabulary, collate, draw, vocabulary
from prism.errors import RunError, TooLong, is_out_of_memory
from prism.step import WIDTH_MULTIPLE
from prism.tasks import Example, Task

TEST_SEED = 0  # every run is tested on the same examples, whatever its own seed
NUMBERS_AT_ONCE = 1 << 27  # float32 numbers a pass may need on a CPU: 512 MiB
GPU_SHARE, CACHE_SHARE = 1 / 4, 1 / 3  # of a card's memory, for a pass and for the keys and values of a long sequence
LONG, CHUNK, FEWEST = 512, 128, 16  # sequences longer than LONG are read FEWEST to CHUNK tokens at a time
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """Counts of right completions; `parts` counts stretches of them that the task names."""

    examples: int
    correct: int
    loss: float  # mean cross-entropy per completion token
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def exact(self) -> float:
        return self.correct / self.examples

    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of `exact`: honest also at 0 and at 1.

        >>> [round(bound, 3) for bound in Score(200, 200, 0.0).interval()]
        [0.981, 1.0]
        """
        return wilson(self.correct, self.examples)

    def to_json(self) -> dict[str, Any]:
        parts = {name: count / self.examples for name, count in self.parts.items()}
        return {
            "exact": self.exact, "interval": list(self.interval()), "examples": self.examples, "loss": self.loss,
            **({"parts": parts} if parts else {}),
        }


def wilson(correct: int, examples: int) -> tuple[float, float]:
    """Wilson's score interval for a proportion, at 95 %."""
    rate, spread = correct / examples, Z95**2 / examples
    centre = (rate + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(rate * (1 - rate) / examples + spread / (4 * examples)) / (1 + spread)
    return min(rate, max(0.0, centre - half)), max(rate, min(1.0, centre + half))  # rounding aside


def sweep(
    model: Architecture,
    task: Task,
    lengths: Iterable[int],
    examples: int,
    stream: Stream = "test",
    report: Callable[[str, Score], None] = lambda name, score: None,
    leave_out: bool = False,
) -> dict[str, Score]:
    """Length -> score, on examples of exactly that length. `report` hears of each length as it is done.

    A length longer than the model can read is an error, or with `leave_out` has no score.
    """
    scores = {}
    for length in lengths:
        drawn = draw(task, seed=TEST_SEED, stream=stream, step=0, size=examples, length=length)
        try:
            scores[str(length)] = score(model, task, drawn)
        except TooLong:
            if not leave_out:
                raise
            continue
        report(str(length), scores[str(length)])
    return scores


def score_subsets(
    model: Architecture, task: Task, report: Callable[[str, Score], None] = lambda name, score: None
) -> dict[str, Score]:
    """Name -> score of each fixed test set the task has (SCAN's), whole."""
    scores = {}
    for name, examples in task.subsets().items():
        scores[name] = score(model, task, examples)
        report(name, scores[name])
    return scores


@torch.no_grad()
def score(model: Architecture, task: Task, examples: Sequence[Example]) -> Score:
    """Scores examples of any lengths, the batch cut into pieces that fit in memory."""
    words, device = vocabulary(task), next(model.parameters()).device
    width = WIDTH_MULTIPLE if device.type == "cuda" else 1  # kernels are compiled for each width they meet
    was_training = model.training
    model.eval()
    correct, loss, tokens, parts = 0, 0.0, 0, dict.fromkeys(_part_names(task, examples), 0)
    try:
        for piece in _pieces(model, words, examples):
            batch = collate(words, piece, multiple=width).to(device)
            logits = read_logits(model, batch.tokens)
            right = ((logits.argmax(-1) == batch.targets) | ~batch.mask).cpu()  # looked at example by example
            correct += int(right.all(dim=-1).sum())
            loss += float(_completion_loss(logits, batch))
            tokens += int(batch.mask.sum())
            for name, count in _right_parts(task, words, piece, right).items():
                parts[name] += count
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(words, examples) from error
    finally:
        model.train(was_training)
    return Score(len(examples), correct, loss / max(1, tokens), parts)


def read_logits(model: Architecture, tokens: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
    """The model's logits; what is too long for one pass is read chunk by chunk: the same numbers in less memory."""
    rows, time = tokens.shape
    fitting = _tokens_that_fit(model, time)
    if time <= LONG and rows * time <= fitting:
        return model(tokens)  # type: ignore[no-any-return]
    chunk, cache = min(CHUNK, max(1, fitting // rows)), model.new_cache(time)
    return torch.cat([model(tokens[:, first : first + chunk], cache) for first in range(0, time, chunk)], dim=1)


def _tokens_that_fit(model: Architecture, time: int) -> int:
    """Tokens of sequences of this length that one pass has memory for, all its sequences together."""
    device = model.device
    numbers = NUMBERS_AT_ONCE
    if device.type == "cuda":
        numbers = int(torch.cuda.get_device_properties(device).total_memory * GPU_SHARE / 4)
    return max(1, numbers // (4 * model.numbers_per_token(time)))  # about four such tensors are alive together


def _sequences_that_fit(model: Architecture, time: int) -> int:
    """How many sequences to read at once."""
    device, fitting = model.device, _tokens_that_fit(model, time)
    if time <= min(LONG, fitting):
        return fitting // time
    size = max(1, fitting // FEWEST)
    if device.type == "cuda":  # a CPU's pass is so small that its cache is no matter
        kept = 4 * model.numbers_kept(time)
        size = min(size, int(torch.cuda.get_device_properties(device).total_memory * CACHE_SHARE / kept))
    return max(1, size)


def _completion_loss(logits: Float[Tensor, "batch time vocabulary"], batch: Batch) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask], reduction="sum")


def _pieces(model: Architecture, words: Vocabulary, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
    """Consecutive examples, as many at once as the longest of them all allows."""
    time = max(len(words.split(example.prompt)) + len(words.split(example.completion)) for example in examples)
    size = _sequences_that_fit(model, time)
    return [examples[first : first + size] for first in range(0, len(examples), size)]


def _part_names(task: Task, examples: Sequence[Example]) -> Iterable[str]:
    if not examples:
        raise RunError("there are no examples to score")
    return task.parts(examples[0].completion)


def _right_parts(
    task: Task, words: Vocabulary, examples: Sequence[Example], right: Bool[Tensor, "batch time"]
) -> dict[str, int]:
    """How many examples have each of the task's named stretches right."""
    counts: dict[str, int] = {}
    for row, example in enumerate(examples):
        first = len(words.split(example.prompt)) - 1  # the target at `=` is the completion's first token
        for name, stretch in task.parts(example.completion).items():
            stop = len(words.split(example.completion)) if stretch.stop is None else stretch.stop
            hit = bool(right[row, first + (stretch.start or 0) : first + stop].all())
            counts[name] = counts.get(name, 0) + hit
    return counts


def _out_of_memory(words: Vocabulary, examples: Sequence[Example]) -> RunError:
    longest = max(len(words.split(example.prompt)) + len(words.split(example.completion)) for example in examples)
    return RunError(f"out of memory on sequences of {longest} tokens, one by one: test shorter lengths (--lengths)")
