"""`prism bench`: what this machine does, measured. No time is printed for code that does not agree with the reference.

A plan says what is worth measuring on a device; each part prints its lines and gives its rows for the JSON file.
"""

import re
import statistics
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prism.bench.ceilings import measure_ceilings
from prism.bench.model import StepCase, measure_evaluation, measure_generation, measure_run, measure_step
from prism.bench.scan import Size, growth, measure
from prism.data import batch
from prism.disk import explained, replace_file, to_json
from prism.environment import describe_environment
from prism.errors import UserError, unknown
from prism.tasks import Task, all_tasks


@dataclass(frozen=True)
class Plan:
    """What is measured on a device."""

    scans: list[Size]
    growth: dict[str, list[Size]]
    steps: list[StepCase]
    runs: list[tuple[StepCase, int]]  # and for how many steps
    evaluations: list[tuple[str, int, int]]  # preset, length of the copy, examples
    generations: list[tuple[str, int, int]]  # preset, prompts, tokens


def cpu_plan() -> Plan:
    return Plan(
        scans=[Size("quick preset", 64, 16, 21), Size("paper's addition, a tenth of the batch", 10, 280, 85)],
        growth={
            "time": [Size("", 2, 280, tokens) for tokens in (42, 85, 170, 340)],
            "batch": [Size("", sequences, 280, 85) for sequences in (1, 2, 5, 10)],
        },
        steps=[
            StepCase("quick preset, copy <= 10", "quick", "copy", "prism", 10),
            StepCase("quick preset, copy <= 10, sinusoidal", "quick", "copy", "sinusoidal", 10),
        ],
        runs=[],
        evaluations=[("quick", 50, 100), ("quick", 500, 4)],
        generations=[("quick", 1, 50), ("quick", 16, 50)],
    )


def gpu_plan() -> Plan:
    """The paper's sizes: its addition step (T = 85, L = 171, 140 query and 140 key cursors), and what is larger."""
    addition = StepCase("addition <= 10, T = 85", "paper", "addition", "prism", 10, 85)
    baseline = addition._replace(name="addition <= 10, T = 85, baseline", encoding="sinusoidal")
    multiplication = StepCase("multiplication <= 9 x 9, T = 284", "paper", "multiplication", "prism", 9, 284)
    return Plan(
        scans=[Size("paper's addition", 100, 280, 85)],
        growth={
            "time": [Size("", 10, 280, tokens) for tokens in (85, 170, 340, 680)],
            "batch": [Size("", sequences, 280, 85) for sequences in (1, 10, 50, 100, 200)],
        },
        steps=[
            addition, addition._replace(name="addition <= 10, T = 85, no graph", graph=False), baseline,
            StepCase("reverse <= 40", "paper", "reverse", "prism", 40), multiplication,
            multiplication._replace(name="multiplication <= 9 x 9, T = 284, baseline", encoding="sinusoidal"),
        ],
        runs=[(addition._replace(name="addition <= 10, as trained", width=None), 1_000),
              (baseline._replace(name="addition <= 10, as trained, baseline", width=None), 1_000)],
        evaluations=[("paper", 100, 200), ("paper", 1_023, 8), ("paper", 2_047, 8), ("paper", 8_191, 8)],
        generations=[("paper", 1, 200), ("paper", 64, 200)],
    )


SECTIONS = ("scans", "growth", "steps", "runs", "evaluations", "generations", "batches_per_second")


def run(repeats: int, out: Path, device_name: str, only: Collection[str] = ()) -> dict[str, Any]:
    """Measures, prints as it goes, and writes the JSON after every section, so that a cut leaves what was done."""
    if repeats < 1:
        raise UserError(f"--repeats must be at least 1, got {repeats}")
    for name in only:
        if name not in SECTIONS:
            raise unknown("section", name, SECTIONS)
    device = torch.device(device_name)
    on_gpu = device.type == "cuda"
    plan = gpu_plan() if on_gpu else cpu_plan()
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    where = name if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; median of {repeats} (min - max)", flush=True)
    path = out / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")
    report = {"environment": describe_environment(), "device": name, "repeats": repeats}
    for key, found in _measured(plan, repeats, device, only or SECTIONS):
        report[key] = found
        with explained("write", path):
            out.mkdir(parents=True, exist_ok=True)
            replace_file(path, to_json(report, path.name, indent=1))
    print(f"\n{path}")
    return report


def _measured(
    plan: Plan, repeats: int, device: torch.device, only: Collection[str]
) -> Iterator[tuple[str, dict[str, Any] | list[Any]]]:
    ceilings = None
    if device.type == "cuda" and {"scans", "growth"} & set(only):
        ceilings = measure_ceilings(device, repeats)
        yield "ceilings", ceilings.to_json()
    if "scans" in only:
        print("\n== histogram scan, forward and backward ==")
        yield "scans", [measure(size, repeats, device, ceilings) for size in plan.scans]
    if "growth" in only:
        print("\n== the scan's growth with time and batch ==")
        yield "growth", growth(plan.growth, repeats, device, ceilings)
    if "steps" in only:
        print("\n== training step: forward, backward, clipping, both optimiser groups ==")
        yield "steps", [measure_step(case, repeats, device) for case in plan.steps]
    if "runs" in only and plan.runs:
        print("\n== training as prism train does it, batches drawn meanwhile ==")
        yield "runs", [measure_run(case, steps, device) for case, steps in plan.runs]
    if "evaluations" in only:
        print("\n== evaluation beyond the training length ==")
        yield "evaluations", [measure_evaluation(*one, device) for one in plan.evaluations]
    if "generations" in only:
        print("\n== generation ==")
        yield "generations", [measure_generation(*one, repeats, device) for one in plan.generations]
    if "batches_per_second" in only:
        print("\n== batches of 100 a second, drawn and collated by one thread, at each task's training length ==")
        yield "batches_per_second", {name: _batches_per_second(task(), repeats) for name, task in all_tasks().items()}


def _batches_per_second(task: Task, repeats: int, batches: int = 100) -> float:
    make = partial(batch, task, seed=0, stream="train", size=100, max_length=task.training_length)
    make(step=0)  # whatever is made once (SCAN's grammar) is no part of it
    rates = []
    for repeat in range(repeats):
        began = time.perf_counter()
        for step in range(batches):
            make(step=1 + repeat * batches + step)
        rates.append(batches / (time.perf_counter() - began))
    print(f"  {task.name:15} {statistics.median(rates):7,.0f}", flush=True)
    return statistics.median(rates)
