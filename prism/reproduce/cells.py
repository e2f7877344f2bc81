"""A cell is one training: a part of the work, a task and its training length, a model, a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prism.config import Preset, RunConfig, preset
from prism.tasks import find_task

Changes = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """What is trained: a preset of an encoding, or of an architecture without one, and what is changed in it."""

    label: str
    preset: Preset
    encoding: str = "prism"
    changes: Changes = field(default_factory=dict, hash=False)
    architecture: str = "transformer"


@dataclass(frozen=True)
class Cell:
    """One run. Its name is its result's path under a folder of results."""

    part: str
    task: str
    max_length: int
    model: Model
    seed: int
    changes: Changes = field(hash=False)  # of every model of this row: steps, test lengths

    @property
    def row(self) -> str:
        """The cell but for its seed."""
        return f"{self.part}/{self.task}-{self.max_length}/{self.model.label}"

    @property
    def name(self) -> str:
        return f"{self.row}-seed{self.seed}"

    def config(self) -> RunConfig:
        model = self.model
        base = preset(model.preset, find_task(self.task)(), model.encoding, self.max_length, self.seed,
                      model.architecture)
        return base.changed({**self.changes, **model.changes})


@dataclass(frozen=True)
class Row:
    """A task at a training length, and the models trained on it."""

    part: str
    task: str
    max_length: int
    models: tuple[Model, ...]
    changes: Changes

    def cells(self, seed: int) -> list[Cell]:
        return [Cell(self.part, self.task, self.max_length, model, seed, self.changes) for model in self.models]
