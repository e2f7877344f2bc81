"""What the figures of a model's inside are drawn with: axes of tokens, maps of probability, captions."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

LABEL = 6  # points, of a token on an axis
ROOM = 0.086  # inches it needs there, words being turned
FAINT = 1e-3  # probability that is not worth room on an axis
SHADES = 64
QUERY_MAP, KEY_MAP, MAP = "Oranges", "Blues", "Blues"


def new_figure(width: float, height: float, title: str, caption: str, square: bool = False) -> "Figure":
    """Room for panels, perhaps square ones, between a title above and what there is to see below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="compressed" if square else "constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.supxlabel(textwrap.fill(caption, int(width * 17)), x=0.01, ha="left", fontsize=8, color="0.3")
    return figure


def token_axis(axis: Any, labels: Sequence[str], inches: float, answer: int | None = None) -> None:
    """The tokens where they have room; else their places, and the token after which the answer begins."""
    if len(labels) * ROOM <= inches:
        turned = axis.axis_name == "x" and max(map(len, labels)) > 1
        axis.set_ticks(range(len(labels)), labels, fontsize=LABEL, rotation=90 if turned else 0)
        axis.set_tick_params(length=0, pad=1)
        return
    step = next(step for step in (5, 10, 20, 50, 100, 200, 500, 1000, 10**6) if len(labels) / step * 0.42 <= inches)
    near = set() if answer is None else set(range(answer - step // 3, answer + step // 3 + 1))
    places = [place for place in range(0, len(labels), step) if place not in near]
    ticks = {place: str(place) for place in places} | ({} if answer is None else {answer: labels[answer]})
    axis.set_ticks(sorted(ticks), [ticks[place] for place in sorted(ticks)], fontsize=LABEL + 1)
    axis.set_tick_params(length=2, pad=1)


def probability_map(
    axes: "Axes", rows: Tensor, colours: str = MAP, first_row: float = 0, most: float = 1.0
) -> "AxesImage":
    """Rows of probabilities, the first row on top, its number `first_row`."""
    height, width = rows.shape
    shades = (rows.double() * SHADES).round() / SHADES  # more would not be seen, and would make the files large
    image = axes.imshow(
        shades.numpy(), cmap=colours, vmin=0, vmax=most, aspect="auto", interpolation="nearest",
        extent=(-0.5, width - 0.5, first_row + height - 0.5, first_row - 0.5),
    )
    axes.spines[:].set_color("0.7")
    return image


def histogram_map(axes: "Axes", histograms: Tensor, extent: tuple[int, int], colours: str) -> "AxesImage":
    """Histograms [time, bins] as columns: offsets upward, token after token to the right."""
    from matplotlib.ticker import MaxNLocator

    low, high = extent
    middle = histograms.shape[-1] // 2
    kept = histograms[:, max(0, low + middle) : high + middle + 1].T
    image = probability_map(axes, kept, colours, first_row=max(low, -middle))
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="y", labelsize=7, length=2)
    return image


def extent_of(*histograms: Tensor) -> tuple[int, int]:
    """The offsets, from the lowest to the highest, at which any of these [time, bins] ever has mass to speak of."""
    reached = []
    for one in histograms:
        places = (one.amax(0) > FAINT).nonzero()[:, 0] - one.shape[-1] // 2
        reached += [int(places.min()), int(places.max())]
    return min(reached), max(reached)


def answer_line(axes: "Axes", place: int, both: bool = False) -> None:
    """Right of it (and below it) the answer is written."""
    style: dict[str, Any] = {"color": "0.35", "linestyle": "--", "linewidth": 0.8}
    axes.axvline(place - 0.5, **style)
    if both:
        axes.axhline(place - 0.5, **style)


def same_scale(figure: "Figure", image: "AxesImage", axes: Any, label: str, **options: Any) -> None:
    """One colour bar for panels of one scale."""
    bar = figure.colorbar(image, ax=axes, aspect=40, shrink=0.8, pad=0.01, **options)
    bar.set_label(label, fontsize=8)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=7)


def softened(axes: "Axes") -> None:
    """A frame that recedes."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, axis="y", color="0.9", linewidth=0.7)
    axes.tick_params(labelsize=7, length=2)
    axes.ticklabel_format(axis="y", useOffset=False)

