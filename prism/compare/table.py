"""Results -> one table and one figure: who can be told apart from whom, at what cost.

Models are ordered by how far they reach: the mean over seeds and over the test lengths beyond training, then at the
training length.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism.compare.terms import MEASURE, MOST_APART
from prism.disk import explained, from_json, replace_file, to_json
from prism.errors import UserError
from prism.figures import Result, extrapolation, heat_map, lengths_of, models_of, read_result, save_figure
from prism.report import mean_and_range
from prism.tasks import find_task

FEW = 8  # models whose curves can be told apart


@dataclass(frozen=True)
class Contender:
    """What is known of one model, over its seeds."""

    name: str
    runs: Sequence[Result]

    @property
    def told(self) -> str:
        """What it is told of the task's structure, if anything: hinted rows are marked."""
        from prism.architectures import DEFAULT, find_architecture
        from prism.encodings import find_encoding

        config = self.runs[0]["config"]
        architecture = find_architecture(config.get("architecture", DEFAULT))
        try:
            kind = find_encoding(config["encoding"]) if architecture.takes_encoding else architecture
        except UserError:  # in a file of somebody's own, which is not named here
            return ""
        return ", ".join(filter(None, (kind.hint, "length" if kind.foresees else None)))

    @property
    def title(self) -> str:
        """Its name in a figure, which has no column for what it is told."""
        return f"{self.name}, told {self.told}" if self.told else self.name

    def terms(self) -> dict[str, Any]:
        """What all rows of a table should share: the configuration but for the method, its size and the seed."""
        own = ("seed", "encoding", "positions", "architecture", "model", "evaluation")
        return {key: value for key, value in self.runs[0]["config"].items() if key not in own}

    @property
    def parameters(self) -> int:
        return int(self.runs[0]["parameters"])

    @property
    def steps_per_second(self) -> float | None:
        known = [run["cost"]["steps_per_second"] for run in self.runs if "cost" in run]
        return statistics.median(known) if known else None

    @property
    def memory(self) -> int | None:
        known = [run["cost"]["peak_memory"] for run in self.runs if "cost" in run]
        return max(known) if known else None

    def scores(self, length: int) -> list[Mapping[str, Any]]:
        """Each seed's final score at a length; none where it cannot read that far."""
        tests = [run["final"]["test"] for run in self.runs]
        return [test[str(length)] for test in tests if str(length) in test]

    def reach(self, trained: int, lengths: Iterable[int]) -> tuple[float, float]:
        """Mean exact match beyond training, and at the training length; what cannot be read counts as wrong."""
        beyond = [self._mean(length) for length in lengths if length > trained]
        return (statistics.mean(beyond) if beyond else 0.0), self._mean(trained)

    def _mean(self, length: int) -> float:
        scores = self.scores(length)
        return statistics.mean(score["exact"] for score in scores) if scores else 0.0


@dataclass(frozen=True)
class Comparison:
    """All that was trained on one task, up to one length, from one preset, for so many steps."""

    task: str
    max_length: int
    preset: str
    steps: int
    contenders: Sequence[Contender]

    @property
    def title(self) -> str:
        return (f"{self.task}, trained up to {self.max_length}: {self.steps:,} steps of the preset {self.preset}, "
                f"exact match in % of the final weights")

    @property
    def stem(self) -> str:
        return f"compare-{self.task}-{self.max_length}-{self.preset}-{self.steps}"

    @property
    def lengths(self) -> list[int]:
        return sorted({length for one in self.contenders for run in one.runs for length in lengths_of(run)})

    @property
    def measure(self) -> int:
        """The parameters others are measured by: PRISM's, or else the median."""
        counts = {one.name: one.parameters for one in self.contenders}
        return counts.get(MEASURE, round(statistics.median(counts.values())))

    def table(self, said: Callable[[Sequence[Mapping[str, Any]]], str]) -> list[list[str]]:
        """The head, and a row a model; `said` writes the scores of its seeds."""
        head = ["model", "told", "parameters", "steps/s", "memory", "seeds", *map(str, self.lengths)]
        return [head, *(self._row(one, said) for one in self.contenders)]

    def own_terms(self, one: Contender) -> list[str]:
        """The settings in which a model was trained on other terms than most of the table."""
        shared = Counter(to_json(other.terms(), "terms") for other in self.contenders).most_common(1)[0][0]
        usual, terms = from_json(shared), one.terms()
        return sorted(key for key in usual.keys() | terms.keys() if usual.get(key) != terms.get(key))

    def oversized(self, one: Contender) -> bool:
        """Whether its parameters are too far off those it is measured by."""
        return abs(one.parameters - self.measure) > MOST_APART * self.measure

    def _row(self, one: Contender, said: Callable[[Sequence[Mapping[str, Any]]], str]) -> list[str]:
        speed, memory = one.steps_per_second, one.memory
        return [
            f"{one.name}{' ~' if self.own_terms(one) else ''}", one.told or "-",
            f"{one.parameters:,}{' !' if self.oversized(one) else ''}",
            "-" if speed is None else f"{speed:.1f}", "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
            str(len(one.runs)), *(said(one.scores(length)) for length in self.lengths),
        ]

    def notes(self) -> list[str]:
        """What a reader of the table has to know."""
        said = ["steps/s and memory are those of the runs as they were made, perhaps several at a time"]
        if any(one.told for one in self.contenders):
            said.append("told: what a hinted model is told of the task's structure beside the tokens; the others must "
                        "find it")
        if any(map(self.oversized, self.contenders)):
            said.append(f"!: more than {MOST_APART:.0%} off the {self.measure:,} parameters it is measured by")
        said += [f"{one.name} was trained on terms of its own: {', '.join(own)}"
                 for one in self.contenders if (own := self.own_terms(one))]
        if any(not one.scores(length) for one in self.contenders for length in self.lengths):
            said.append("-: it refuses sequences that long")
        return said


def comparisons(results: Sequence[Result]) -> list[Comparison]:
    """The results, grouped by what can be compared, best first."""
    groups: dict[tuple[str, int, str, int], list[Result]] = {}
    for result in results:
        config = result["config"]
        key = config["task"]["name"], config["max_length"], config.get("preset", "?"), config["steps"]
        groups.setdefault(key, []).append(result)
    return [Comparison(*key, in_order(models_of(members), key[1])) for key, members in sorted(groups.items())]


def in_order(models: Mapping[str, Sequence[Result]], trained: int) -> list[Contender]:
    """The models, who reaches furthest first."""
    rows = sorted((Contender(name, runs) for name, runs in models.items()), key=lambda one: one.name)
    lengths = {length for runs in models.values() for run in runs for length in lengths_of(run)}
    return sorted(rows, key=lambda one: one.reach(trained, lengths), reverse=True)


def results_under(folder: Path) -> list[Result]:
    """Every finished run's result in a folder and the folders in it."""
    with explained("read", folder):
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder} to read results from")
        files = sorted(folder.rglob("*.json"))
    found = []
    for file in files:
        try:
            found.append(read_result(file))
        except UserError:  # another kind of file: a configuration, a manifest, a bench
            continue
    if not found:
        raise UserError(f"there is no result of a finished run in {folder}")
    return found


def draw(one: Comparison, out: Path) -> list[Path]:
    """The figure, and the table as a page beside it: curves for a few models, a map of shades for many."""
    runs = {contender.title: contender.runs for contender in one.contenders}
    figure = extrapolation(runs) if len(runs) <= FEW else heat_map(runs)
    written = save_figure(figure, out, one.stem)
    page = out / f"{one.stem}.md"
    with explained("write", page):
        replace_file(page, as_markdown(one, written[0].name).encode())
    return [*written, page]


def as_text(one: Comparison) -> str:
    """For a terminal."""
    rows = one.table(short)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [one.title, ""]
    for row in rows:
        cells = [f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"
                 for place, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([*lines, "", "the mean over seeds, and their range where they differ", *one.notes()])


def short(scores: Sequence[Mapping[str, Any]]) -> str:
    """The mean over seeds, and their range where there is one.

    >>> [short([{"exact": exact} for exact in seeds]) for seeds in ([1.0, 1.0], [0.955, 0.985], [0.5], [])]
    ['100', '97.0 96-98', '50.0', '-']
    """
    if not scores:
        return "-"
    exact = sorted(100 * score["exact"] for score in scores)
    mean = statistics.mean(exact)
    said = f"{mean:.0f}" if mean in (0, 100) else f"{mean:.1f}"
    return said if exact[0] == exact[-1] else f"{said} {exact[0]:.0f}-{exact[-1]:.0f}"


def as_markdown(one: Comparison, figure: str) -> str:
    lines = [
        f"# {one.title}\n", f"Length: {find_task(one.task).length_means}.\n", f"![{one.title}]({figure})\n",
        *table_lines(one),
    ]
    return "\n".join(lines) + "\n"


def table_lines(one: Comparison) -> list[str]:
    """The table and its notes in Markdown."""
    head, *rows = one.table(mean_and_range)
    return [
        "| " + " | ".join(head) + " |", "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows), "",
        "- over seeds: mean and range; with one seed, its score and the 95 % interval of its examples",
        *(f"- {note}" for note in one.notes()),
    ]

