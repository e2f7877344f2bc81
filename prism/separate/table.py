"""The separate table: methods that are told more, or trained in another way, than a causal model, and what that is."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prism.config import RunConfig, means, preset
from prism.disk import explained, from_json
from prism.errors import UserError
from prism.report import mean_and_range
from prism.separate import find_method, run
from prism.tasks import find_task


def terms(task: str, given: str, max_length: int | None, seed: int, steps: int | None,
          lengths: tuple[int, ...]) -> RunConfig:
    """Those of the preset's Transformer without positions."""
    changes: dict[str, Any] = {} if steps is None else {"steps": steps}
    if lengths:
        changes["evaluation.lengths"] = lengths
    return preset(given, find_task(task)(), "nope", max_length, seed).changed(changes)


def run_missing(methods: Sequence[str], wanted: Sequence[RunConfig], out: Path, device: str) -> list[dict[str, Any]]:
    """Trains and tests each method on each of the terms, unless there is a result of just that already."""
    kinds = [find_method(name) for name in methods]
    for kind in kinds:
        if wanted[0].task.name not in kind.tasks:
            raise UserError(f"{kind.name} is defined for {' and '.join(kind.tasks)}; got {wanted[0].task.name}")
    found = []
    for kind in kinds:
        for one in wanted:
            path = out / f"{one.task.name}-{one.max_length}-{one.preset}" / f"{kind.name}-seed{one.seed}.json"
            kept = read(path) if path.is_file() else None
            if kept is None or not means(kept["terms"], one):
                print(f"{kind.name} on {one.task.name} <= {one.max_length}, seed {one.seed}: {one.steps:,} steps")
                kept = run(kind, one, device, lambda line: print(f"  {line}", flush=True), path)
            found.append(kept)
    return found


def read(path: Path) -> dict[str, Any]:
    """A result of `prism separate`."""
    with explained("read", path):
        found = from_json(path.read_bytes())
    if not isinstance(found, dict) or not {"method", "told", "terms", "scores", "parameters"} <= set(found):
        raise UserError(f"{path} is not a result of prism separate")
    return found


def table_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """In Markdown: a row a method, its seeds together, and what each was told."""
    rows: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        rows.setdefault(result["method"], []).append(result)
    lengths = sorted({int(length) for result in results for length in result["scores"]})
    head = ["method", "parameters", "seeds", *map(str, lengths)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, runs in rows.items():
        cells = [mean_and_range([run["scores"].get(str(length)) for run in runs]) for length in lengths]
        lines.append(f"| {name} | {runs[0]['parameters']:,} | {len(runs)} | " + " | ".join(cells) + " |")
    told = [f"- {name} is told {runs[0]['told']} ({runs[0]['citation']})." for name, runs in rows.items()]
    return [*lines, "", *told]
