"""How long SCAN-CoT's sequences are, in its two splits: the paper's figures of the appendix."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from prism.figures import COLOURS, save_figure
from prism.tasks.scan_cot import split_examples

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPLITS = {"trained on": ("train", "validation"), "test": ("test",)}


def lengths() -> dict[str, dict[str, Counter[int]]]:
    """What is counted -> split -> how many pairs have each length. Validation is cut from the split to train on."""
    found: dict[str, dict[str, Counter[int]]] = {}
    for name, splits in SPLITS.items():
        pairs = [example for split in splits for example in split_examples(split)]  # type: ignore[arg-type]
        left = [len(pair.prompt.split()) - 1 for pair in pairs]
        right = [len(pair.completion.split()) for pair in pairs]
        whole = [a + 1 + b for a, b in zip(left, right, strict=True)]
        for what, counts in (("whole sequence", whole), ("output: right of =", right), ("input: left of =", left)):
            found.setdefault(what, {})[name] = Counter(counts)
    return found


def draw_lengths(folder: Path) -> list[Path]:
    """PNG and PDF."""
    return save_figure(_figure(), folder, "scan-lengths")


def _figure() -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.2), layout="constrained")
    for axes, (what, splits) in zip(figure.subplots(1, 3), lengths().items(), strict=True):
        for colour, (name, counts) in zip(COLOURS, splits.items(), strict=False):
            axes.bar(list(counts), list(counts.values()), width=1, color=colour, alpha=0.6,
                     label=f"{name} ({counts.total():,})")
        axes.set_title(what, loc="left", fontsize=10)
        axes.set_xlabel("tokens")
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("pairs")
    figure.axes[0].legend(frameon=False, fontsize=8, loc="upper left")
    figure.axes[0].set_ylim(top=figure.axes[0].get_ylim()[1] * 8)  # room for the legend
    return figure
