"""Scores as text: the tables the command line prints."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from prism.evaluate import Score, wilson


def score_header() -> str:
    return f"{'length':>20}  {'exact':>6}  95 % interval    examples"


def score_line(name: str, score: Score) -> str:
    """One length: exact match, its interval, and the task's parts if it has any."""
    low, high = score.interval()
    parts = "".join(f"  {part}: {100 * count / score.examples:.1f}" for part, count in score.parts.items())
    return f"{name:>20}  {100 * score.exact:6.1f}  {100 * low:5.1f} - {100 * high:5.1f}    {score.examples:8}{parts}"


def result_table(result: Mapping[str, Any]) -> str:
    """The three ways to score a run, side by side, by test length."""
    final, best, top3 = result["final"], result["best"], result["top3"]
    lines = [
        "exact match in %, by test length",
        f"{'length':>20}  {'final':>6}  {'95 % interval':>15}  {'best*':>6}  {'top 3**':>7}",
    ]
    for name, one in final["test"].items():
        low, high = one["interval"]
        lines.append(
            f"{name:>20}  {100 * one['exact']:6.1f}  {100 * low:6.1f} - {100 * high:5.1f}  "
            f"{100 * best['test'][name]['exact']:6.1f}  {100 * top3['test'][name]['exact']:7.1f}"
            + "".join(f"  {part}: {100 * share:.1f}" for part, share in one.get("parts", {}).items())
        )
    lines.append(f"*  weights of step {best['step']:,}: best on validation at the training length")
    lines.append(f"** mean of the three best of {top3['evaluations']} evaluations, the paper's protocol: optimistic")
    return "\n".join(lines)


def comparison_table(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], lengths: list[str]) -> str:
    """Models down, test lengths across: exact match of the final weights, with 95 % intervals where they matter.

    >>> rows = {"prism": {"10": {"exact": 1.0, "examples": 200}}, "sinusoidal": {"10": {"exact": 0.5, "examples": 200}}}
    >>> print(comparison_table(rows, ["10", "20"]))
    test length                   10                  20
    prism          100.0 (98.1-100)           -
    sinusoidal      50.0 (43.1-57)            -
    """
    width = max(map(len, ("test length", *rows))) + 1
    lines = [f"{'test length':{width}}" + "".join(f"{length:>20}" for length in lengths)]
    for name, scores in rows.items():
        cells = "".join(_cell(scores.get(length)) for length in lengths)
        lines.append(f"{name:{width}}{cells}".rstrip())
    return "\n".join(lines)


def _cell(score: Mapping[str, Any] | None) -> str:
    if score is None:
        return f"{'-':>11}".ljust(20)
    low, high = wilson(round(score["exact"] * score["examples"]), score["examples"])
    return f"{100 * score['exact']:>8.1f} ({100 * low:.1f}-{100 * high:.0f})".ljust(20)


def mean_and_range(scores: Sequence[Mapping[str, Any] | None]) -> str:
    """Mean and range over seeds, or one seed's score and interval, where its examples are known."""
    known = [one for one in scores if one is not None]
    if not known:
        return "-"
    exact = [100 * one["exact"] for one in known]
    if len(exact) > 1:
        spread = f" ({min(exact):.1f} - {max(exact):.1f})" if max(exact) > min(exact) else ""
        return f"{mean(exact):.1f}{spread}"
    if "examples" not in known[0]:
        return f"{exact[0]:.1f}"
    examples = known[0]["examples"]
    low, high = wilson(round(known[0]["exact"] * examples), examples)
    return f"{exact[0]:.1f} ({100 * low:.1f} - {100 * high:.1f})"
