"""What training needs from this machine: the histogram scan's forms against each other, and batches a second.

Correctness first: no time is printed for a form that does not agree with the reference.
"""

import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism.data import batch
from prism.environment import describe_environment
from prism.errors import RunError, UserError
from prism.ops.histogram import Method, histogram_scan, one_hot_start
from prism.tasks import Task, all_tasks

AGREEMENT = 1e-4  # relative norm, float32 against float32


@dataclass(frozen=True)
class Size:
    """A scan: B sequences of T tokens, so many cursors, L = 2T + 1 bins."""

    name: str
    batch: int
    cursors: int
    time: int

    @property
    def bin_steps(self) -> int:
        return self.batch * self.cursors * self.time * (2 * self.time + 1)


SIZES = (Size("quick preset", 64, 16, 21), Size("paper's addition, a tenth of the batch", 10, 280, 85))
FORMS: tuple[Method, ...] = ("adjoint", "reference")


def run(repeats: int, out: Path) -> dict[str, Any]:
    """Prints the table and writes it as JSON."""
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    print(f"histogram scan, forward and backward, {torch.get_num_threads()} threads, median of {repeats} (min - max)")
    rows = [_measure(size, repeats) for size in SIZES]
    print("\nbatches of 100 a second, drawn and collated by one thread, at each task's training length")
    batches = {name: _batches_per_second(task(), repeats) for name, task in all_tasks().items()}
    report = {"environment": describe_environment(), "repeats": repeats, "rows": rows, "batches_per_second": batches}
    out.mkdir(parents=True, exist_ok=True)
    path = out / "cpu.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(path)
    return report


def _measure(size: Size, repeats: int) -> dict[str, Any]:
    inputs, upstream = _inputs(size)
    calls: dict[str, Callable[[], list[Tensor]]] = {form: _scan(form, inputs, upstream) for form in FORMS}
    peak, made = {}, {}
    for form in FORMS:  # the warm-up; the leaner form first, since a process's peak memory only grows
        made[form] = calls[form]()
        peak[form] = _peak_gib()
    _check("adjoint", made["adjoint"], made["reference"])
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(repeats):  # in turn, so that a busy moment of the machine meets every form alike
        for form in FORMS:
            began = time.perf_counter()
            calls[form]()
            seconds[form].append(time.perf_counter() - began)
    ratio = statistics.median(seconds["reference"]) / statistics.median(seconds["adjoint"])
    print(f"\n{size.name}: B = {size.batch}, {size.cursors} cursors, T = {size.time}, L = {2 * size.time + 1}")
    for form in FORMS:
        took = sorted(1e3 * one for one in seconds[form])
        median = statistics.median(took)
        per_bin = 1e6 * median / size.bin_steps
        print(
            f"  {form:10} {median:8.1f} ms ({took[0]:.1f} - {took[-1]:.1f})  {per_bin:6.2f} ns a bin  "
            f"peak memory {peak[form]:.2f} GiB"
        )
    print(f"  the adjoint is {ratio:.1f} times as fast")
    return {
        "size": {"name": size.name, "batch": size.batch, "cursors": size.cursors, "time": size.time},
        "seconds": seconds, "ratio": ratio, "histograms_bytes": 4 * size.bin_steps, "peak_gib": peak,
    }


def _batches_per_second(task: Task, repeats: int, batches: int = 100) -> float:
    make = partial(batch, task, seed=0, stream="train", size=100, max_length=task.training_length)
    make(step=0)  # whatever is made once (SCAN's grammar) is no part of it
    rates = []
    for repeat in range(repeats):
        began = time.perf_counter()
        for step in range(batches):
            make(step=1 + repeat * batches + step)
        rates.append(batches / (time.perf_counter() - began))
    print(f"  {task.name:15} {statistics.median(rates):7,.0f}")
    return statistics.median(rates)


def _inputs(size: Size) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    start = one_hot_start(size.batch, size.cursors, size.time, dtype=torch.float32, device=torch.device("cpu"))
    logits = torch.randn(size.batch, size.cursors, size.time, 6, generator=generator)
    gamma = 1.5 + 2 * torch.rand(size.cursors, generator=generator)
    upstream = torch.randn(size.time, 2 * size.time + 1, size.batch, size.cursors, generator=generator)
    return [start, torch.softmax(logits, -1).requires_grad_(), gamma.requires_grad_()], upstream.permute(2, 3, 0, 1)


def _scan(form: Method, inputs: list[Tensor], upstream: Tensor) -> Callable[[], list[Tensor]]:
    start, weights, gamma = inputs

    def call() -> list[Tensor]:
        histograms = histogram_scan(start, weights, gamma, method=form)
        return [histograms.detach(), *torch.autograd.grad(histograms, (weights, gamma), upstream)]

    return call


def _check(form: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        error = float((ours - theirs).norm() / theirs.norm())
        if not error < AGREEMENT:
            raise RunError(f"the {form} form is wrong by {error:.1e} (relative norm): no times are given")


def _peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
