"""Run folders -> figures: extrapolation curves in the paper's style. Reads results, never trains."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prism.config import RunConfig, model_label
from prism.disk import explained, from_json
from prism.errors import UserError
from prism.report import comparison_table
from prism.runs import RunFolder, config_hash
from prism.tasks import find_task

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Result = Mapping[str, Any]  # a result.json

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")  # Okabe and Ito's
MARKERS = "osD^vPX*"
STYLES = ("-", ":", "-.")  # of the lines, once the colours are used up
TITLES = {  # where a name in lower case would look odd in a figure
    "prism": "PRISM", "sinusoidal": "sinusoidal APE", "nope": "NoPE", "alibi": "ALiBi", "t5": "T5 bias", "rope": "RoPE",
    "kerple": "KERPLE", "fire": "FIRE", "cope": "CoPE", "dape": "DAPE", "cable": "CABLE", "bipe": "BiPE",
    "forgetting": "forgetting (FoX)", "path": "PaTH", "hard_alibi": "Hard-ALiBi", "abacus": "Abacus", "lstm": "LSTM",
}
FEW, MANY = 3, 6  # curves whose legend has room among them; curves whose bands can still be told apart
LIGHT_ON_DARK = 60  # %, from which a shade is so dark that its number is white
WIDE = 12  # test lengths that span more than this factor are drawn on a logarithmic axis


class Drawing(NamedTuple):
    """What was drawn, the same in numbers, and where it is."""

    title: str
    table: str
    files: list[Path]


def draw_runs(paths: Sequence[Path], out: Path) -> list[Drawing]:
    """One figure (PNG and PDF) per task and training length found among the runs."""
    results = [read_result(path) for path in paths]
    groups: dict[tuple[str, int], list[Result]] = defaultdict(list)
    for result in results:
        groups[result["config"]["task"]["name"], result["config"]["max_length"]].append(result)
    drawings = []
    for (task, length), members in sorted(groups.items()):
        models = models_of(members)
        written = save_figure(extrapolation(models), out, f"{task}-{length}")
        drawings.append(Drawing(f"{task}, trained up to {length}", _table(models), written))
    return drawings


def save_figure(figure: "Figure", folder: Path, stem: str) -> list[Path]:
    """As PNG and as PDF. Without dates in the files, the same results give the same bytes."""
    with explained("create", folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for suffix in ("png", "pdf"):
        path = folder / f"{stem}.{suffix}"
        with explained("write", path):
            figure.savefig(path, dpi=160, metadata={"CreationDate": None} if suffix == "pdf" else None)
        written.append(path)
    return written


def _table(models: Mapping[str, Sequence[Result]]) -> str:
    """Every run's final scores, a row each."""
    lengths = sorted({length for runs in models.values() for run in runs for length in lengths_of(run)})
    rows = {
        f"{name}, seed {run['config']['seed']}": run["final"]["test"]
        for name, runs in models.items()
        for run in sorted(runs, key=lambda run: run["config"]["seed"])
    }
    return comparison_table(rows, [str(length) for length in lengths])


def read_result(path: Path) -> Result:
    """The result of a finished run, from its folder or from a result.json kept on its own."""
    found: Any
    if path.is_file():
        try:
            with explained("read", path):
                found = from_json(path.read_bytes())
        except ValueError as error:
            raise UserError(f"{path} is not the result of a run: {error}") from error
    else:
        found = RunFolder.open(path).result()
    if found is None:
        raise UserError(f"{path} is not finished: train it to its end first (--resume)")
    try:
        _check(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not the result of a run: {error!r}") from error
    return found  # type: ignore[no-any-return]


def _check(result: Any) -> None:
    """Raises one error or another unless all that a figure needs is there."""
    config = result["config"]
    find_task(config["task"]["name"]), str(config["encoding"]), int(config["max_length"]), int(config["seed"])
    for one in result["final"]["test"].values():
        low, high = one["interval"]
        float(one["exact"]), float(low), float(high), int(one["examples"])
    if not lengths_of(result):
        raise ValueError("no test lengths")


def extrapolation(models: Mapping[str, Sequence[Result]]) -> "Figure":
    """Exact match against test length, one curve per model: its mean over seeds, their range, each seed's points.

    A model with one seed has the 95 % interval of its examples as its band instead.
    """
    from matplotlib.figure import Figure

    results = [run for runs in models.values() for run in runs]
    config = results[0]["config"]
    crowded = len(models) > FEW
    figure = Figure(figsize=(8.6 if crowded else 6.4, 3.9), layout="constrained")
    axes = figure.subplots()
    for rank, (name, runs) in enumerate(models.items()):
        turn, place = divmod(rank, len(COLOURS))
        _draw_curve(axes, name, runs, COLOURS[place], MARKERS[place], STYLES[turn % len(STYLES)], len(models) <= MANY)
    axes.axvline(config["max_length"], color="0.35", linestyle="--", linewidth=1.2)
    axes.annotate(
        f" trained\n up to {config['max_length']}", (config["max_length"], 4), color="0.35", fontsize=9, va="bottom"
    )
    _dress(axes, config, sorted({length for result in results for length in lengths_of(result)}))
    if crowded:  # beside the curves, where it hides none of them
        figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    else:
        axes.legend(frameon=False, fontsize=9, loc="center right")
    return figure


def heat_map(models: Mapping[str, Sequence[Result]]) -> "Figure":
    """Exact match as shade and number: a row a model, in the order given, a column a test length. For many models."""
    from matplotlib.figure import Figure

    config = next(iter(models.values()))[0]["config"]
    lengths = sorted({length for runs in models.values() for run in runs for length in lengths_of(run)})
    shares = [[_mean_exact(runs, length) for length in lengths] for runs in models.values()]
    figure = Figure(figsize=(2.4 + 0.72 * len(lengths), 1.2 + 0.27 * len(models)), layout="constrained")
    axes = figure.subplots()
    axes.imshow([[math.nan if share is None else share for share in row] for row in shares],
                cmap="Blues", vmin=0, vmax=120, aspect="auto")
    for y, row in enumerate(shares):
        for x, share in enumerate(row):
            said = "refused" if share is None else f"{share:.0f}" if share in (0, 100) else f"{share:.1f}"
            colour = "0.45" if not share else "white" if share > LIGHT_ON_DARK else "black"
            axes.text(x, y, said, ha="center", va="center", fontsize=8, color=colour,
                      weight="bold" if share == 100 else "normal")
    beyond = next((x for x, length in enumerate(lengths) if length > config["max_length"]), len(lengths))
    axes.axvline(beyond - 0.5, color="0.2", linestyle="--", linewidth=1.2)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(models)), [_title(name) + _seeds(runs) for name, runs in models.items()], fontsize=9)
    axes.set_xlabel(f"test length: {find_task(config['task']['name']).length_means}; trained left of the dashed line")
    axes.set_title(f"{config['task']['name']}, trained up to {config['max_length']}: exact match (%)", loc="left",
                   fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _mean_exact(runs: Sequence[Result], length: int) -> float | None:
    """In %, over the seeds; None where it was not tested, as it cannot read that far."""
    exact = [run["final"]["test"][str(length)]["exact"] for run in runs if str(length) in run["final"]["test"]]
    return 100 * sum(exact) / len(exact) if exact else None


def _seeds(runs: Sequence[Result]) -> str:
    return f" ({len(runs)} seed{'s' if len(runs) > 1 else ''})"


def models_of(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Name -> the runs of one model, which differ in nothing but their seed; the same run given twice counts once."""
    found: dict[str, dict[int, Result]] = defaultdict(dict)
    for result in results:
        config = _as_of_today(result["config"])
        rest = {key: value for key, value in config.items() if key not in ("seed", "evaluation")}
        found[config_hash(rest)].setdefault(result["config"]["seed"], result)
    names: dict[str, list[Result]] = {}
    for runs in map(list, map(dict.values, found.values())):
        label, preset = model_label(runs[0]["config"]), runs[0]["config"].get("preset")
        tries = [label, f"{label}, {preset}", *(f"{label}, {preset}, {count}" for count in range(2, 99))]
        names[next(name for name in tries if name not in names)] = runs
    return names


def _as_of_today(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what is younger than it at its default; as it is where its encoding is in a file not named here."""
    try:
        return RunConfig.from_json(config).to_json()
    except UserError:
        return config


def _draw_curve(
    axes: "Axes", name: str, runs: Sequence[Result], colour: str, marker: str, style: str, band: bool
) -> None:
    lengths = sorted(set.intersection(*(set(lengths_of(run)) for run in runs)))
    scores = [[run["final"]["test"][str(length)] for length in lengths] for run in runs]
    exact = [[100 * one["exact"] for one in row] for row in scores]
    mean = [sum(column) / len(column) for column in zip(*exact, strict=True)]
    if len(runs) > 1:
        low, high = ([pick(column) for column in zip(*exact, strict=True)] for pick in (min, max))
        label = f"{_title(name)} ({len(runs)} seeds: mean{', range' if band else ''})"
    else:
        low, high = ([100 * one["interval"][side] for one in scores[0]] for side in (0, 1))
        label = f"{_title(name)} (1 seed{', 95 % interval' if band else ''})"
    if band:
        axes.fill_between(lengths, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(lengths, mean, style, marker=None if band else marker, color=colour, linewidth=2, label=label,
              clip_on=False, markersize=5, markerfacecolor="white")
    for row in exact if band or len(runs) == 1 else []:
        axes.plot(lengths, row, marker, color=colour, markersize=5, markerfacecolor="white", clip_on=False, zorder=3)


def _dress(axes: "Axes", config: Mapping[str, Any], lengths: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    task = find_task(config["task"]["name"])
    if lengths[-1] > WIDE * lengths[0]:
        axes.set_xscale("log")
    axes.set_xticks(list(_readable(lengths)))
    axes.set_xticklabels([f"{length:,}" for length in _readable(lengths)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"test length: {task.length_means}")
    axes.set_ylabel("exact match (%)")
    axes.set_title(f"{task.name}, trained up to {config['max_length']}", loc="left", fontsize=11)
    axes.grid(True, axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _readable(lengths: Sequence[int]) -> Iterable[int]:
    """Tick positions: the tested lengths, without those too close to their neighbour to be read."""
    shown: list[int] = []
    wide = lengths[-1] > WIDE * lengths[0]
    for length in lengths:
        far_enough = not shown or (length / shown[-1] >= 1.25 if wide else length - shown[-1] >= lengths[-1] / 16)
        if far_enough:
            shown.append(length)
    return shown


def lengths_of(result: Result) -> list[int]:
    """The test lengths of a result, subsets aside."""
    return [int(name) for name in result["final"]["test"] if name.isdigit()]


def _title(encoding: str) -> str:
    name, comma, more = encoding.partition(",")
    return TITLES.get(name, name) + comma + more
