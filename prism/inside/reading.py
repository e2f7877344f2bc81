"""A sequence as a model reads it: its tokens, where the answer begins, and what was recorded meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prism.architectures import Architecture
from prism.config import ModelConfig, RunConfig
from prism.data import draw, vocabulary
from prism.errors import UserError
from prism.evaluate import TEST_SEED
from prism.generate import generate
from prism.inside.recording import record
from prism.tasks import Example

START = "⊢"  # the label of a start token
MOST_TOKENS = 512  # of a sequence that nobody asked for by its length
FACTORS = (5, 4, 3, 2)  # times the training length: what is shown beyond it, the first whose sequence is short enough


@dataclass(frozen=True)
class Reading:
    """One sequence, token by token as a recording's time axis has it."""

    labels: tuple[str, ...]
    answer: int  # the place of the token after which the answer begins
    seen: Mapping[str, Tensor]

    @property
    def written(self) -> slice:
        """The places at which the model writes: each predicts a token of the answer."""
        return slice(self.answer, len(self.labels))

    @property
    def legend(self) -> str:
        """What the labels do not say of themselves."""
        return f" {START}: the start token." if self.labels[0] == START else ""


def read(model: Architecture, config: RunConfig, example: Example, wanted: Sequence[str]) -> Reading:
    """Records the model while it reads an example, all but its last token, as in training."""
    words = vocabulary(config.task)
    prompt, whole = words.split(example.prompt), words.split(words.separator.join(example))[:-1]
    ids = torch.from_numpy(words.encode(words.separator.join(whole)))[None].to(model.device)
    opens = isinstance(config.model, ModelConfig) and config.model.start_token
    labels = ((START,) if opens else ()) + tuple(whole)
    return Reading(labels, len(prompt) - 1 + opens, record(model, ids, wanted))


def example_of(config: RunConfig, length: int) -> Example:
    """The first test example of this length: the same for every run of the task."""
    return draw(config.task, seed=TEST_SEED, stream="test", step=0, size=1, length=length)[0]


def completed(model: Architecture, config: RunConfig, prompt: str) -> Example:
    """A prompt with its right answer, or with the model's own where the task has none for it."""
    words = vocabulary(config.task)
    words.encode(prompt)
    try:
        return Example(prompt, config.task.answer(prompt))
    except UserError:
        return Example(prompt, generate(model, words, [prompt], min(256, len(words.split(prompt)) * 4))[0])


def tokens_of(config: RunConfig, length: int) -> int:
    """Roughly how many tokens the examples of a length have."""
    words = vocabulary(config.task)
    return len(words.split(words.separator.join(example_of(config, length))))


def within(config: RunConfig) -> int:
    """The length to show as trained: the longest, or the shortest there are tests of."""
    return config.max_length if config.task.has_curriculum else min(config.task.sweep(config.max_length))


def beyond(config: RunConfig) -> int:
    """The length to show as never trained: up to five times what is shown as trained."""
    if not config.task.has_curriculum:
        return next((one for one in reversed(config.task.sweep(config.max_length))
                     if tokens_of(config, one) <= MOST_TOKENS), within(config))
    lengths = (factor * config.max_length for factor in FACTORS)
    return next((one for one in lengths if tokens_of(config, one) <= MOST_TOKENS), config.max_length + 1)
