"""RESULTS.md and its figures, from the results alone: what is missing is listed, never filled in."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.compare.table import Comparison, in_order, table_lines
from prism.disk import explained, replace_file
from prism.figures import extrapolation, heat_map, save_figure
from prism.report import mean_and_range
from prism.reproduce import insides
from prism.reproduce.cells import Cell
from prism.reproduce.claims import CLAIMS
from prism.reproduce.matrix import matrix
from prism.reproduce.scan_lengths import draw_lengths
from prism.reproduce.status import current_result, result_file
from prism.tasks import find_task

PARTS = {
    "paper": "The paper as written",
    "best": "Going past it",
    "ablations": "Ablations at the paper's size",
    "laptop": "At a laptop's size",
    "arena": "The arena",
    "arena-quick": "The arena at a laptop's size",
}
ARENAS = ("arena", "arena-quick")  # ranked, with what each model costs
INTRODUCTION = """\
# Results

Exact match in %: every token of the completion right, chain of thought and end token included. Each number is of the
**final** weights, unless its row says otherwise; with several seeds it is their mean and range, with one seed its 95 %
interval over the examples. *Best by validation* are the weights that did best at the training length, test lengths
having no say; *top three* is the paper's protocol, the mean of the three best test scores over training, which is
optimistic; both are left out where they say the same. A run's configuration, seed, commit and hardware are in its JSON
file under `{results}`, and `prism reproduce --train NAME` makes it again. This page and its figures are written by
`prism reproduce --figures`.
"""


@dataclass(frozen=True)
class Group:
    """What shares a table and a figure: the models trained on one task up to one length, in one part."""

    part: str
    task: str
    max_length: int
    cells: tuple[Cell, ...]

    @property
    def stem(self) -> str:
        return f"{self.part}-{self.task}-{self.max_length}"


def draw_all(results: Path) -> list[Path]:
    """Writes the page beside the folder of results, its figures into it; returns what was written."""
    groups, written, sections, missing = _groups(), [], [], []
    for part, title in PARTS.items():
        bodies = []
        for group in (one for one in groups if one.part == part):
            found = {cell: current_result(cell, result_file(results, cell)) for cell in group.cells}
            kept = {cell: result for cell, result in found.items() if result is not None}
            missing += [cell.name for cell in group.cells if cell not in kept]
            if kept:
                files = _figure(group, kept, results / "figures")
                written += files
                bodies.append(_section(group, kept, files[0].relative_to(results.parent)))
        if bodies:
            sections.append(f"## {title}\n\n" + "\n".join(bodies))
    if (results / "separate").is_dir():
        sections.append(_separate(results / "separate"))
    if (results.parent / "models").is_dir():
        written += insides.draw(results.parent / "models", results / "figures" / "inside")
    sections.append(insides.section(Path(results.name, "figures", "inside")))
    lengths = draw_lengths(results / "figures")
    written += lengths
    sections.append(_scan_lengths(lengths[0].relative_to(results.parent)))
    page = results.parent / "RESULTS.md"
    with explained("write", page):
        text = [INTRODUCTION.format(results=results.name), *sections, _missing(missing, len(matrix()))]
        replace_file(page, "\n".join(text).encode())
    return [page, *written]


def _groups() -> list[Group]:
    found: dict[tuple[str, str, int], list[Cell]] = {}
    for cell in matrix():
        found.setdefault((cell.part, cell.task, cell.max_length), []).append(cell)
    return [Group(*key, tuple(cells)) for key, cells in found.items()]


def _figure(group: Group, kept: Mapping[Cell, Mapping[str, Any]], folder: Path) -> list[Path]:
    if group.part in ARENAS:
        ranked = {one.title: one.runs for one in in_order(_by_model(kept), group.max_length)}
        return save_figure(heat_map(ranked), folder, group.stem)
    return save_figure(extrapolation(_by_model(kept)), folder, group.stem)


def _by_model(kept: Mapping[Cell, Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    by_model: dict[str, list[Mapping[str, Any]]] = {}
    for cell, result in kept.items():
        by_model.setdefault(cell.model.label, []).append(result)
    return by_model


def _section(group: Group, kept: Mapping[Cell, Mapping[str, Any]], figure: Path) -> str:
    task = find_task(group.task)
    lines = [
        f"### {group.task}, trained up to {group.max_length}\n",
        f"Length: {task.length_means}.\n",
        f"![{group.task}: exact match against test length]({figure.as_posix()})\n",
        *(_ranking(group, kept) if group.part in ARENAS else _table(kept)),
    ]
    claims = CLAIMS.get((group.task, group.max_length))
    if claims and group.part in ("paper", "best"):
        said = [("The paper", claims.paper), ("Its author's later notebook", claims.notebook), ("Peers", claims.peers)]
        lines += ["", *(f"- {who}: {what}." for who, what in said if what)]
    return "\n".join(lines) + "\n"


def _ranking(group: Group, kept: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    config = group.cells[0].config()
    ranked = in_order(_by_model(kept), group.max_length)
    terms = "[equal terms](docs/your-encoding.md#equal-terms)"
    return [f"{config.steps:,} steps of the preset `{config.preset}` on {terms}.\n",
            *table_lines(Comparison(group.task, group.max_length, config.preset, config.steps, ranked))]


def _table(kept: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(name for result in kept.values() for name in result["final"]["test"]))
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for label, runs in _by_model(kept).items():
        steps, seeds = runs[0]["final"]["step"], len(runs)
        many = f"{seeds} seeds" if seeds > 1 else "1 seed"
        final = [mean_and_range([run["final"]["test"].get(name) for run in runs]) for name in columns]
        lines.append(f"| **{label}**, {many}, {steps:,} steps | " + " | ".join(final) + " |")
        for way, said in (("best", "best by validation"), ("top3", "top three")):
            cells = [mean_and_range([run[way]["test"].get(name) for run in runs]) for name in columns]
            if [cell.split()[0] for cell in cells] != [cell.split()[0] for cell in final]:  # else it says nothing new
                lines.append(f"| {said} | " + " | ".join(cells) + " |")
        for part in dict.fromkeys(_parts(runs)):
            cells = [mean_and_range([_part(run["final"]["test"].get(name), part) for run in runs]) for name in columns]
            lines.append(f"| final, {part} alone | " + " | ".join(cells) + " |")
    return lines


def _parts(runs: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    return (part for run in runs for score in run["final"]["test"].values() for part in score.get("parts", {}))


def _part(score: Mapping[str, Any] | None, part: str) -> Mapping[str, Any] | None:
    if score is None or part not in score.get("parts", {}):
        return None
    return {"exact": score["parts"][part], "examples": score["examples"]}


def _separate(folder: Path) -> str:
    """Each task's own table of what is told more than the others, or answers in another way."""
    from prism.separate.table import read, table_lines

    parts = ["## Methods apart\n\nNot to be ranked with the others: what they are told makes the question easier. "
             "`prism separate TASK` makes these results.\n"]
    for group in sorted(one for one in folder.iterdir() if one.is_dir()):
        found = [read(path) for path in sorted(group.glob("*.json"))]
        terms = found[0]["terms"]
        parts += [f"### {terms['task']['name']}, trained up to {terms['max_length']}, {terms['steps']:,} steps\n",
                  *table_lines(found), ""]
    return "\n".join(parts)


def _scan_lengths(figure: Path) -> str:
    return (f"## How long SCAN-CoT's sequences are\n\n![Three histograms of SCAN-CoT's lengths, log scale: whole "
            f"sequences, outputs, inputs]({figure.as_posix()})\n\nAll 20,910 pairs, as the grammar "
            "writes them. Of the 3,920 test pairs 1,352 are longer than any trained on; their inputs are not.\n")


def _missing(names: Sequence[str], of: int) -> str:
    if not names:
        return "Nothing is missing: every cell of the matrix is done.\n"
    seeds: dict[str, list[str]] = {}
    for name in names:
        row, _, seed = name.rpartition("-seed")
        seeds.setdefault(row, []).append(seed)
    lines = [f"- {row}: seed{'s' if len(which) > 1 else ''} {', '.join(which)}" for row, which in seeds.items()]
    return (f"## What is missing\n\n{len(names)} of the {of} cells of the matrix have not been trained yet; "
            "`prism reproduce --minutes N` trains them.\n\n" + "\n".join(lines) + "\n")
