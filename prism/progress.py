"""What a person sees while a run trains: a live line on a terminal, plain lines anywhere else."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from prism.architectures import Architecture, count_parameters
from prism.config import RunConfig
from prism.evaluate import Score

PLAIN_EVERY = 10.0  # seconds between plain lines


class Progress:
    """Says nothing; the base of what does."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(self, config: RunConfig, model: Architecture, step: int) -> None: ...

    def step(self, record: Mapping[str, Any], steps_per_second: float) -> None: ...

    def evaluation(self, step: int, scores: Mapping[str, Score]) -> None: ...

    def score(self, name: str, score: Score) -> None: ...

    def note(self, sentence: str) -> None: ...


def silent() -> Progress:
    return Progress()


def for_terminal() -> Progress:
    """The live display if there is a terminal to show it on, else plain lines."""
    return LiveProgress() if sys.stdout.isatty() else PlainProgress()


def headline(config: RunConfig, model: Architecture, step: int) -> str:
    """What is about to be trained, in a line."""
    size = count_parameters(model)
    going_on = f", going on from step {step:,}" if step else ""
    return (
        f"{config.label} on {config.task.name} <= {config.max_length}, preset {config.preset}, seed {config.seed}: "
        f"{size / 1e6:.2f} M parameters, {config.steps:,} steps of {config.batch_size}{going_on}"
    )


def sweep_line(scores: Mapping[str, Score]) -> str:
    """Exact match by length, in a line."""
    return "  ".join(f"{name}: {100 * one.exact:.1f}" for name, one in scores.items())


class PlainProgress(Progress):
    """A line every ten seconds, and one for each evaluation."""

    def __init__(self) -> None:
        self.last = 0.0
        self.steps = 0

    def start(self, config: RunConfig, model: Architecture, step: int) -> None:
        self.steps, self.last = config.steps, time.monotonic()
        print(headline(config, model, step), flush=True)

    def step(self, record: Mapping[str, Any], steps_per_second: float) -> None:
        if time.monotonic() - self.last < PLAIN_EVERY and record["step"] < self.steps:
            return
        self.last = time.monotonic()
        left = (self.steps - record["step"]) / steps_per_second
        print(
            f"step {record['step']:,}/{self.steps:,}  lengths <= {record['longest']}  loss {record['loss']:.4f}  "
            f"exact {100 * record['exact']:.0f} %  {steps_per_second:.1f} steps/s  {left:.0f} s left",
            flush=True,
        )

    def evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        print(f"step {step:,}  exact match in %, by test length:  {sweep_line(scores)}", flush=True)

    def score(self, name: str, score: Score) -> None:
        if time.monotonic() - self.last >= PLAIN_EVERY:
            self.last = time.monotonic()
            print(f"final test, {name}: {100 * score.exact:.1f} %", flush=True)

    def note(self, sentence: str) -> None:
        print(sentence, flush=True)


class LiveProgress(Progress):
    """A bar with stage, loss, exact match, speed and time left; evaluations scroll by above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"), TimeRemainingColumn(),
        )

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, config: RunConfig, model: Architecture, step: int) -> None:
        self.bar.console.print(headline(config, model, step), highlight=False)
        self.line = self.bar.add_task(f"{config.label} · {config.task.name}", total=config.steps, detail="")
        self.bar.update(self.line, completed=step)

    def step(self, record: Mapping[str, Any], steps_per_second: float) -> None:
        detail = (
            f"<= {record['longest']}  loss {record['loss']:.4f}  exact {100 * record['exact']:.0f} %  "
            f"{steps_per_second:.1f}/s"
        )
        self.bar.update(self.line, completed=record["step"], detail=detail)

    def evaluation(self, step: int, scores: Mapping[str, Score]) -> None:
        self.bar.console.print(f"step {step:,}  exact match in %:  {sweep_line(scores)}", highlight=False)

    def score(self, name: str, score: Score) -> None:
        self.bar.update(self.line, detail=f"final test, {name}: {100 * score.exact:.1f} %")

    def note(self, sentence: str) -> None:
        self.bar.console.print(sentence, style="yellow", highlight=False)
