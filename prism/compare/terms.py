"""Equal terms: what the rows of a comparison share, so that what differs is the method.

- The same task, training lengths, batches, steps, optimiser and curriculum: the preset's. An encoding keeps the options
  its own paper gives it, which are its defaults, and PRISM those of the preset.
- The same Transformer for all encodings but PRISM: the preset's, with feed-forward parts wide enough, in multiples of
  the width, to have PRISM's parameters within a tenth. (Where the quick preset has too few heads for a method, ALiBi's
  kin, it has more of them, as wide together.) What is still further off, mostly for a table of positions, is marked.
- The same examples are tested, and the final weights count.

What is not equal: the presets' learning rates and step budgets were found with PRISM, and PRISM has its paper's
optimiser groups: alpha with a rate of its own, and in the quick preset no weight decay on its gates.
"""

import dataclasses
from functools import lru_cache
from typing import Any

import torch

from prism.architectures import all_architectures, count_parameters, find_architecture
from prism.config import NO_ENCODING, ModelConfig, Preset, RunConfig, preset
from prism.encodings import all_encodings, find_encoding
from prism.errors import UserError
from prism.reproduce.cells import Model
from prism.tasks import Task, find_task
from prism.trained import build

MOST_APART = 0.1  # of the parameters of MEASURE
MEASURE = "prism"
ALL = "all"
HOOKS = ("start", "embed", "observe", "attention_input", "transform", "bias", "score", "weigh")


def contenders(encodings: tuple[str, ...], architectures: tuple[str, ...], given: Preset, task: Task,
               max_length: int, lengths: tuple[int, ...] = ()) -> list[Model]:
    """The models to compare, in the order asked for; "all" are those that can be run on the task.

    `lengths` are the test lengths, where they are not the task's own sweep: a table of positions is sized by them.
    """
    names = _named(encodings, _different(given, task, max_length))
    others = _named(architectures, [name for name, kind in all_architectures().items() if not kind.takes_encoding])
    if not names + others:
        raise UserError("there is nothing to compare: name some --encodings or --architectures, or say all")
    models = [_encoded(name, given, task.name, max_length, lengths) for name in names]
    return models + [_without_encoding(name, given, task.name, max_length) for name in others]


def can_run(encoding: str, task: Task) -> bool:
    """Whether a task gives the hints that an encoding asks for, if it does."""
    hint = find_encoding(encoding).hint
    return hint is None or hint in task.hint_kinds()


def _different(given: Preset, task: Task, max_length: int) -> list[str]:
    """The encodings a task can run; of those that do the same with the same options, the last."""
    found = {}
    for name in filter(lambda name: can_run(name, task), all_encodings()):
        kind = find_encoding(name)
        found[*(getattr(kind, hook) for hook in HOOKS), preset(given, task, name, max_length).positions] = name
    return sorted(found.values())


def left_out(task: Task) -> list[str]:
    """The encodings that "all" leaves out, since the task has no such hints."""
    return [name for name in all_encodings() if not can_run(name, task)]


def _named(asked: tuple[str, ...], everything: list[str]) -> list[str]:
    """What was asked for, each once, with "all" for all there are."""
    return list(dict.fromkeys(name for one in asked for name in (everything if one == ALL else [one])))


@lru_cache
def _standard(given: Preset, task: str, max_length: int) -> RunConfig:
    """The Transformer that all encodings but PRISM share: the preset's, with feed-forward parts as wide as it takes."""
    bare, measure = (preset(given, find_task(task)(), encoding, max_length) for encoding in (NO_ENCODING, MEASURE))
    with torch.random.fork_rng(devices=[]):
        wanted = (1 - MOST_APART) * count_parameters(build(measure))
        while count_parameters(build(bare)) < wanted:
            bare = bare.changed({"model.feedforward": _transformer(bare).feedforward + 1})
    return bare


@lru_cache
def _encoded(name: str, given: Preset, task: str, max_length: int, lengths: tuple[int, ...]) -> Model:
    own = preset(given, find_task(task)(), name, max_length)
    sized = preset(given, find_task(task)(), name, max_length, lengths=lengths)
    fair, asked = _transformer(_standard(given, task, max_length)), _transformer(own)
    if name == MEASURE:
        fair = asked
    elif asked.heads * asked.head_width == fair.heads * fair.head_width:  # it needs other heads, as wide together
        fair = dataclasses.replace(fair, heads=asked.heads, head_width=asked.head_width)
    changes = _changes("model", asked, fair) | _changes("positions", own.positions, sized.positions)
    return Model(name, given, name, changes)


@lru_cache
def _without_encoding(name: str, given: Preset, task: str, max_length: int) -> Model:
    kind = find_architecture(name)
    if kind.takes_encoding:
        raise UserError(f"{name} is what every encoding is tried in: name encodings instead")
    bare = preset(given, find_task(task)(), NO_ENCODING, max_length)
    fair = kind.preset(given, _standard(given, task, max_length))
    changes = _changes("model", kind.preset(given, bare), fair)
    return Model(name, given, NO_ENCODING, changes, architecture=name)


def _transformer(config: RunConfig) -> ModelConfig:
    assert isinstance(config.model, ModelConfig)
    return config.model


def _changes(where: str, before: Any, after: Any) -> dict[str, Any]:
    return {
        f"{where}.{field.name}": value for field in dataclasses.fields(after)
        if (value := getattr(after, field.name)) != getattr(before, field.name)
    }
