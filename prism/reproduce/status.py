"""Where each cell of the matrix stands: done, running, stopped on the way, or missing; and what it costs."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prism.config import means
from prism.disk import explained, replace_file, to_json
from prism.encodings import own_file
from prism.figures import read_result
from prism.reproduce.cells import Cell
from prism.runs import SOURCE, RunFolder

Kind = Literal["done", "running", "stopped", "missing", "outdated"]


@dataclass(frozen=True)
class Standing:
    """A cell and what there is of it."""

    cell: Cell
    kind: Kind
    step: int = 0
    result: Mapping[str, Any] | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """Measured, evaluations included; only of a run that one process trained from its start to its end."""
        if self.result is None or self.result["environment"].get("resumed"):
            return None
        return float(self.result["seconds"]) / float(self.result["final"]["step"])


def result_file(results: Path, cell: Cell) -> Path:
    """Where a cell's result is kept."""
    return results / f"{cell.name}.json"


@dataclass(frozen=True)
class Places:
    """Where results are kept, for good, and where runs are trained."""

    results: Path
    runs: Path

    def result(self, cell: Cell) -> Path:
        return result_file(self.results, cell)

    def run(self, cell: Cell) -> Path:
        return self.runs / cell.name

    def keep(self, cell: Cell, result: Mapping[str, Any]) -> None:
        """Keeps the result of a finished cell."""
        path = self.result(cell)
        with explained("create", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(dict(result), path.name, indent=1))


def current_result(cell: Cell, kept: Path) -> Mapping[str, Any] | None:
    """The result in a file, if there is one and its configuration is the one the matrix asks for today."""
    result = read_result(kept) if kept.is_file() else None
    return result if result is not None and means(result["config"], cell.config()) else None


def is_run_of(cell: Cell, folder: Path) -> bool:
    """Whether there is a run of this cell in a folder: of its configuration, and of its encoding's file as it is."""
    if not RunFolder.exists(folder):
        return False
    run, config = RunFolder.open(folder), cell.config()
    own = own_file(config.encoding)
    return means(run.config, config) and (own is None or run.has_source(SOURCE, own.read_bytes()))


def standing(cell: Cell, places: Places) -> Standing:
    """What there is of a cell: its result, else its run, else nothing."""
    kept, folder = places.result(cell), places.run(cell)
    result = current_result(cell, kept)
    if result is not None and (is_run_of(cell, folder) or not RunFolder.exists(folder)):
        return Standing(cell, "done", result["final"]["step"], result)
    if is_run_of(cell, folder):
        steps = RunFolder.open(folder).checkpoint_steps()
        kind: Kind = "running" if RunFolder.writer(folder) else "stopped"
        return Standing(cell, kind, steps[-1] if steps else 0)
    return Standing(cell, "outdated" if kept.is_file() else "missing")


def minutes_left(one: Standing, known: Iterable[Standing]) -> float | None:
    """What is left to train, by the speed of the same row's other seeds, or else of the same task's other models."""
    cell = one.cell
    config = cell.config()

    def speed(alike: Sequence[Standing]) -> float | None:
        found = [seconds for other in alike if (seconds := other.seconds_per_step) is not None]
        return statistics.median(found) if found else None

    done = [other for other in known if other.kind == "done"]
    rate = speed([other for other in done if other.cell.row == cell.row]) or speed([
        other for other in done
        if (other.cell.task, other.cell.max_length, other.cell.model.preset, other.cell.model.encoding)
        == (cell.task, cell.max_length, cell.model.preset, cell.model.encoding)
    ])
    return None if rate is None else rate * (config.steps - one.step) / 60


def overview(found: Sequence[Standing]) -> str:
    """A line a row of the matrix: what each of its seeds is, its steps, and what is left to spend."""
    rows: dict[str, list[Standing]] = {}
    for one in found:
        rows.setdefault(one.cell.row, []).append(one)
    width = max(map(len, rows), default=0) + 2
    lines = [f"{'part/task-length/model':{width}}{'seeds':36}{'steps':>8}{'minutes left':>14}"]
    unknown, total = 0, 0.0
    for name, members in rows.items():
        missing = [one for one in members if one.kind != "done"]
        costs = [minutes_left(one, found) for one in missing]
        left = sum(cost for cost in costs if cost is not None)
        unknown += costs.count(None)
        total += left
        said = "-" if not missing else "?" if None in costs else f"{left:.1f}"
        seeds = "  ".join(_seed(one) for one in sorted(members, key=lambda one: one.cell.seed))
        lines.append(f"{name:{width}}{seeds:36}{members[0].cell.config().steps:>8,}{said:>14}")
    done = sum(one.kind == "done" for one in found)
    guess = f"; {unknown} more of unknown cost: none of their kind is measured yet" if unknown else ""
    lines.append(f"{done} of {len(found)} done; about {total:.0f} minutes left, one after the other{guess}")
    return "\n".join(lines)


def _seed(one: Standing) -> str:
    if one.kind in ("running", "stopped"):
        return f"{one.cell.seed} {one.kind} at {one.step:,}"
    return f"{one.cell.seed} {one.kind}"

