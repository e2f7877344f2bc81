"""The arena: one task, many positional encodings, equal terms, several seeds; one table and one figure."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.compare.overview import Overview
from prism.compare.table import as_text, comparisons, draw, results_under
from prism.compare.terms import ALL, contenders, left_out
from prism.config import Preset
from prism.encodings import own_file
from prism.errors import RunError, UserError
from prism.reproduce.cells import Cell, Row
from prism.reproduce.runner import Runner, train_cell
from prism.reproduce.status import Places, standing
from prism.runs import RESULT
from prism.tasks import Task

PART = "compare"
AT_ONCE_ON_GPU = 4
EXAMPLES = 20  # a test length, while training: its end is what counts


@dataclass(frozen=True)
class Grid:
    """What is to be compared, and where its run folders are."""

    task: Task
    max_length: int
    preset: Preset
    encodings: tuple[str, ...]
    architectures: tuple[str, ...]
    seeds: int
    out: Path
    steps: int | None = None
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise UserError(f"--seeds must be at least 1, got {self.seeds}")

    def cells(self) -> list[Cell]:
        """Every run, the first seed of every model first."""
        models = contenders(
            self.encodings, self.architectures, self.preset, self.task, self.max_length, self.lengths
        )
        changes: dict[str, Any] = {"evaluation.examples": EXAMPLES}
        if self.steps is not None:
            changes["steps"] = self.steps
        if self.lengths:
            changes["evaluation.lengths"] = self.lengths
        row = Row(PART, self.task.name, self.max_length, tuple(models), changes)
        return [cell for seed in range(self.seeds) for cell in row.cells(seed)]

    @property
    def places(self) -> "InRunFolders":
        return InRunFolders(self.out, self.out)

    def command(self, device: str, at_once: int) -> Callable[[Cell], list[str]]:
        """What trains one of its cells in a process of its own."""
        def of(cell: Cell) -> list[str]:
            name = cell.model.label
            own = own_file(cell.model.encoding)
            chosen = ["--architectures", name] if cell.model.architecture != "transformer" else [
                "--encodings", str(own or name)]
            flags = [
                *chosen, "--train", _short(cell), "--seeds", str(self.seeds), "--preset", self.preset,
                "--max-length", str(self.max_length), "--out", str(self.out), "--device", device,
                "--at-once", str(at_once),
            ]
            flags += [] if self.steps is None else ["--steps", str(self.steps)]
            flags += ["--lengths", ",".join(map(str, self.lengths))] if self.lengths else []
            return [sys.executable, "-m", "prism", "compare", self.task.name, *flags]
        return of


class InRunFolders(Places):
    """A run folder a cell; its result stays in it."""

    def run(self, cell: Cell) -> Path:
        return self.runs / _short(cell)

    def result(self, cell: Cell) -> Path:
        return self.run(cell) / RESULT

    def keep(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """The run has written it already."""


def _short(cell: Cell) -> str:
    return f"{cell.model.label}-seed{cell.seed}"


def train_one(asked: Grid, name: str, device: str) -> None:
    """Trains the run called `name`, MODEL-seedN, here, to its end."""
    cells = {_short(cell): cell for cell in asked.cells()}
    if name not in cells:
        raise UserError(f"--train must be one of {', '.join(cells)}; got {name!r}")
    train_cell(cells[name], asked.places, device)


def run(asked: Grid, minutes: float | None, at_once: int | None, device: str) -> None:
    """Trains what is missing, as far as time allows; then draws what there is."""
    import matplotlib  # noqa: F401  (if it is missing, that is better known now than after the training)

    cells = asked.cells()
    if ALL in asked.encodings and (without := left_out(asked.task)):
        print(f"left out, since {asked.task.name} has no hints for them: {', '.join(without)}")
    at_once = _at_once(device) if at_once is None else at_once
    with Overview(cells) as overview:
        runner = Runner(cells, asked.places, asked.command(device, at_once), at_once, overview.say, overview.watcher)
        complete = runner.run(float("inf") if minutes is None else minutes)
    found = [one.result for cell in cells if (one := standing(cell, asked.places)).result is not None]
    for comparison in comparisons([result for result in found if result is not None]):
        files = draw(comparison, asked.out)
        print(f"\n{as_text(comparison)}\n", *files, sep="\n")
    if len(found) < len(cells):
        print(f"\n{len(cells) - len(found)} of {len(cells)} runs are not done: the same command goes on with them")
    if not complete:
        raise RunError(f"not every model could be trained: see the logs in {asked.out}")


def redraw(folder: Path, out: Path) -> None:
    """Tables and figures of all results in a folder, without training."""
    for comparison in comparisons(results_under(folder)):
        print(as_text(comparison), "", *draw(comparison, out), "", sep="\n")


def _at_once(device: str) -> int:
    """A process a core for what one thread trains; a GPU has room for a few."""
    return AT_ONCE_ON_GPU if device.startswith("cuda") else max(1, os.cpu_count() or 1)
