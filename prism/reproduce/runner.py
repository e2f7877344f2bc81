"""Trains what is missing: several cells at once, each in a process of its own, for as long as there is time.

A cell is an ordinary run, trained as `prism train` would. Whatever ends the runner, a deadline, Ctrl-C or kill -9, a
cell goes on from its last checkpoint the next time; told to stop, it finishes its step and saves.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.disk import explained
from prism.errors import RunError, UserError
from prism.reproduce.cells import Cell
from prism.reproduce.status import Places, is_run_of, minutes_left, standing
from prism.runs import RunFolder
from prism.signals import collected
from prism.train import train

SAVING = 20.0  # seconds kept of the time given, to finish steps and save
PATIENCE = 60.0  # seconds a process has to do so before it is killed
SAY_EVERY = 15.0
LOOK_EVERY = 0.5


def train_cell(cell: Cell, places: Places, device: str) -> dict[str, Any]:
    """Trains one cell to its end, from where it was left, and keeps its result."""
    folder = places.run(cell)
    config = cell.config()
    if RunFolder.exists(folder) and not is_run_of(cell, folder):
        print(f"{folder} was made with another configuration: it is now {RunFolder.set_aside(folder)}")
    result = train(config, folder, resume=RunFolder.exists(folder), device=device)
    places.keep(cell, result)
    return result


def reproduce_command(places: Places, device: str, at_once: int) -> Callable[[Cell], list[str]]:
    """What trains a cell of the matrix in a process of its own."""
    return lambda cell: [
        sys.executable, "-m", "prism", "reproduce", "--train", cell.name, "--results", str(places.results),
        "--runs", str(places.runs), "--device", device, "--at-once", str(at_once),
    ]


@dataclass
class Worker:
    """A process that trains a cell."""

    cell: Cell
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)


class Runner:
    """Keeps `at_once` workers busy with the cells given, in their order.

    `say` hears of what begins and ends; `watch`, if given, looks at the runner twice a second, in place of a line now
    and then.
    """

    def __init__(self, cells: Sequence[Cell], places: Places, command: Callable[[Cell], list[str]], at_once: int,
                 say: Callable[[str], None] = print, watch: Callable[["Runner"], None] | None = None) -> None:
        if at_once < 1:
            raise UserError(f"--at-once must be at least 1, got {at_once}")
        self.places, self.command, self.at_once, self.say, self.watch = places, command, at_once, say, watch
        self.standings = [standing(cell, places) for cell in cells]
        self.waiting = [one.cell for one in self.standings if one.kind not in ("done", "running")]
        self.workers: list[Worker] = []
        self.done: list[Cell] = []
        self.failed: list[Cell] = []

    def run(self, minutes: float) -> bool:
        """Works until all is done or the time is over; true if nothing failed. A signal ends it like the deadline."""
        deadline = time.monotonic() + 60 * minutes - min(SAVING, 30 * minutes)
        with collected("stopping") as received:
            heard = time.monotonic()
            while self.waiting or self.workers:
                self._collect()
                if received or time.monotonic() >= deadline:
                    break
                while self.waiting and len(self.workers) < self.at_once:
                    self._start(self.waiting.pop(0))
                if self.watch is not None:
                    self.watch(self)
                elif time.monotonic() - heard >= SAY_EVERY:
                    heard = time.monotonic()
                    self.say(self._line())
                time.sleep(LOOK_EVERY)
            self._stop_all("a signal" if received else "the end of the time given")
        return not self.failed

    def _start(self, cell: Cell) -> None:
        folder = self.places.run(cell)
        with explained("create", folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_name(f"{folder.name}.log")
        with explained("write", log), log.open("ab") as file:
            # A session of its own: Ctrl-C in the terminal reaches the runner alone, which then asks each to save.
            process = subprocess.Popen(self.command(cell), stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                                       start_new_session=True)
        self.workers.append(Worker(cell, process, log))
        left = minutes_left(standing(cell, self.places), self.standings)
        self.say(f"started   {cell.name}" + ("" if left is None else f", about {left:.1f} minutes"))

    def _collect(self) -> None:
        for worker in [one for one in self.workers if one.process.poll() is not None]:
            self.workers.remove(worker)
            if worker.process.returncode == 0:
                self.done.append(worker.cell)
                self.standings.append(standing(worker.cell, self.places))
                self.say(f"done      {worker.cell.name}  {self._scores(worker.cell)}")
            else:
                self.failed.append(worker.cell)
                how = _ended(worker.process.returncode)
                self.say(f"FAILED    {worker.cell.name} ({how}): {_last_line(worker.log)}")

    def _stop_all(self, why: str) -> None:
        if not self.workers:
            return
        self.say(f"stopping for {why}: {len(self.workers)} runs finish their step and save")
        for worker in self.workers:
            worker.stop()
        late = time.monotonic() + PATIENCE
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, late - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.process.kill()  # its last checkpoint is whole all the same
            step = standing(worker.cell, self.places)
            self.say(f"{step.kind:9} {worker.cell.name}" + (f" at step {step.step:,}" if step.kind != "done" else ""))
        self.workers = []

    def _line(self) -> str:
        parts = []
        for worker in self.workers:
            timings = self.timings(worker.cell)
            at = f"{timings['step']:,}/{worker.cell.config().steps:,} at {timings['steps_per_second']:.0f}/s" if (
                timings) else "starting"
            parts.append(f"{worker.cell.name} {at}")
        return f"{time.strftime('%H:%M:%S')}  {len(self.done)} done, {len(self.waiting)} waiting; " + "; ".join(parts)

    def timings(self, cell: Cell) -> dict[str, Any] | None:
        """The last record of a run's speed: its step, and steps a second; None before there is one."""
        try:
            records = RunFolder.open(self.places.run(cell)).timings()
        except (UserError, RunError):
            return None
        return records[-1] if records else None

    def _scores(self, cell: Cell) -> str:
        result = standing(cell, self.places).result
        test = {} if result is None else result["final"]["test"]
        return "  ".join(f"{name}: {100 * one['exact']:.1f}" for name, one in test.items())


def _ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
