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

from prism.data import Batch, Stream, Vocabulary, collate, draw, vocabulary
from prism.errors import RunError, is_out_of_memory
from prism.tasks import Example, Task
from prism.transformer import Transformer

TEST_SEED = 0  # every run is tested on the same examples, whatever its own seed
NUMBERS_AT_ONCE = 1 << 27  # float32 numbers a chunk of the batch may need: 512 MiB
LONG, CHUNK = 512, 128  # sequences longer than LONG are read in chunks of CHUNK tokens, so histograms stay small
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
    return max(0.0, centre - half), min(1.0, centre + half)


def sweep(
    model: Transformer,
    task: Task,
    lengths: Iterable[int],
    examples: int,
    stream: Stream = "test",
    report: Callable[[str, Score], None] = lambda name, score: None,
) -> dict[str, Score]:
    """Length -> score, on examples of exactly that length. `report` hears of each length as it is done."""
    scores = {}
    for length in lengths:
        drawn = draw(task, seed=TEST_SEED, stream=stream, step=0, size=examples, length=length)
        scores[str(length)] = score(model, task, drawn)
        report(str(length), scores[str(length)])
    return scores


def score_subsets(
    model: Transformer, task: Task, report: Callable[[str, Score], None] = lambda name, score: None
) -> dict[str, Score]:
    """Name -> score of each fixed test set the task has (SCAN's), whole."""
    scores = {}
    for name, examples in task.subsets().items():
        scores[name] = score(model, task, examples)
        report(name, scores[name])
    return scores


@torch.no_grad()
def score(model: Transformer, task: Task, examples: Sequence[Example]) -> Score:
    """Scores examples of any lengths, the batch cut into pieces that fit in memory."""
    words, device = vocabulary(task), next(model.parameters()).device
    was_training = model.training
    model.eval()
    correct, loss, tokens, parts = 0, 0.0, 0, dict.fromkeys(_part_names(task, examples), 0)
    try:
        for piece in _pieces(model, words, examples):
            batch = collate(words, piece).to(device)
            logits = read_logits(model, batch.tokens)
            right = (logits.argmax(-1) == batch.targets) | ~batch.mask
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


def read_logits(model: Transformer, tokens: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
    """The model's logits, long sequences read chunk by chunk: the same numbers in less memory."""
    time = tokens.shape[1]
    if time <= LONG:
        return model(tokens)  # type: ignore[no-any-return]
    cache = model.new_cache(time)
    return torch.cat([model(tokens[:, first : first + CHUNK], cache) for first in range(0, time, CHUNK)], dim=1)


def _completion_loss(logits: Float[Tensor, "batch time vocabulary"], batch: Batch) -> Float[Tensor, ""]:
    return torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask], reduction="sum")


def _pieces(model: Transformer, words: Vocabulary, examples: Sequence[Example]) -> Iterable[Sequence[Example]]:
    """Consecutive examples, as many at once as the longest of them all allows."""
    time = max(len(words.split(example.prompt)) + len(words.split(example.completion)) for example in examples)
    at_once = time if time <= LONG else CHUNK
    config = model.config
    each = at_once * (config.heads * time + config.width * config.feedforward + model.encoding.footprint(time))
    size = max(1, NUMBERS_AT_ONCE // (4 * each))  # about four such tensors are alive together
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
