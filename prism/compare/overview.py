"""What a person sees while a comparison trains: on a terminal a table that moves, anywhere else lines."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prism.reproduce.cells import Cell
from prism.reproduce.runner import Runner
from prism.reproduce.status import standing

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

LOOK_EVERY = 2.0  # seconds: every look opens the results and journals of all runs
MARKS = {"done": "●", "running": "◐", "stopped": "○", "missing": "·", "outdated": "·"}


class Overview:
    """A row a model: its seeds, the steps of those under way, their speed, and the scores of those that are done."""

    def __init__(self, cells: list[Cell]) -> None:
        self.cells = cells
        self.live: Live | None = None
        self.began = self.drawn = time.monotonic()

    def __enter__(self) -> "Overview":
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(refresh_per_second=2)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.stop()

    def say(self, sentence: str) -> None:
        """What begins and ends. The table shows that too, but not why something failed."""
        if self.live is None:
            print(sentence, flush=True)
        elif "FAILED" in sentence or "stop" in sentence:
            self.live.console.print(sentence, highlight=False)

    @property
    def watcher(self) -> Callable[[Runner], None] | None:
        """What looks at the runner where there is a table to show; elsewhere the runner says a line now and then."""
        return None if self.live is None else self._watch

    def _watch(self, runner: Runner) -> None:
        if self.live is not None and time.monotonic() - self.drawn >= LOOK_EVERY:
            self.drawn = time.monotonic()
            self.live.update(self._table(runner))

    def _table(self, runner: Runner) -> "Table":
        from rich.table import Table

        table = Table(box=None, title=self._headline(runner), title_justify="left", title_style="")
        for name in ("model", "seeds"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "steps/s", "at the training length", "longest test"):
            table.add_column(name, justify="right", no_wrap=True)
        by_model: dict[str, list[Cell]] = {}
        for cell in self.cells:
            by_model.setdefault(cell.model.label, []).append(cell)
        for name, cells in by_model.items():
            table.add_row(name, *self._row(cells, runner))
        return table

    def _headline(self, runner: Runner) -> str:
        minutes = (time.monotonic() - self.began) / 60
        left = len(runner.waiting) + len(runner.workers)
        done = len(self.cells) - left
        return f"{done} of {len(self.cells)} runs done, {len(runner.workers)} under way, {minutes:.1f} minutes"

    def _row(self, cells: list[Cell], runner: Runner) -> list[str]:
        found = [standing(cell, runner.places) for cell in cells]
        marks = " ".join(MARKS[one.kind] for one in found)
        timings = [record for one in found if one.kind == "running" and (record := runner.timings(one.cell))]
        step = "  ".join(f"{record['step']:,}" for record in timings)
        speed = "  ".join(f"{record['steps_per_second']:.0f}" for record in timings)
        tests = [one.result["final"]["test"] for one in found if one.result is not None]
        return [marks, step, speed, _mean(tests, str(cells[0].max_length)), _mean(tests, None)]


def _mean(tests: list[dict[str, Any]], length: str | None) -> str:
    """The mean over seeds at a length, or at the longest that was tested."""
    exact = [test[length or max(test, key=lambda name: int(name) if name.isdigit() else 0)]["exact"]
             for test in tests if length is None or length in test]
    return f"{100 * sum(exact) / len(exact):.1f}" if exact else ""

