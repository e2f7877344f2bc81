"""Figures of PRISM's cursors: what moves them, where they stand, how far apart, how strongly read, how sharp at length.

The counterparts of the paper's figures fig:init-gate-probs to fig:reverse-queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from prism.config import RunConfig
from prism.encodings.encoding import tokens_in_training
from prism.encodings.prism import Prism
from prism.figures import COLOURS
from prism.inside.maps import (
    KEY_MAP,
    QUERY_MAP,
    answer_line,
    extent_of,
    histogram_map,
    new_figure,
    probability_map,
    same_scale,
    softened,
    token_axis,
)
from prism.inside.pairs import Pair, Spread, Steadiness, modes, pairs_of
from prism.inside.reading import Reading
from prism.ops.histogram import displacement

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIDES = (("query", COLOURS[1], QUERY_MAP), ("key", COLOURS[0], KEY_MAP))  # as in the viewer
ACTIONS = ("increment", "keep", "decrement", "reset")
MOST_PAIRS, MOST_PATHS = 20, 8  # of cursors in the figures of gates and of modes: the most telling
FEW_TOKENS = 40  # each has a dot of its own
FEW_HEADS = 12  # whose panels fit beside one another
TELLING = ("largest |alpha| x sharpness x movement: how strongly its head reads it, how much of its mass stands in one "
           "place, at how many tokens that place changes")


@dataclass(frozen=True)
class Counters:
    """What these figures are of: a model, what it read before and after training, and far beyond its training."""

    title: str
    config: RunConfig
    encoding: Prism
    before: Reading
    within: Reading
    beyond: Reading
    pairs: Sequence[Pair]  # the most telling first


def gates(of: Counters) -> "Figure":
    """fig:init-gate-probs above fig:trained-gate-probs."""
    pairs = _in_order(of.pairs[:MOST_PAIRS])
    rows = [(pair, side) for side, *_ in SIDES for pair in pairs]
    figure = new_figure(11.5, 2.1 + 0.32 * len(rows), f"{of.title}: what moves each cursor, token by token", (
        "Probability that a cursor steps forward, stays, steps back, and that it is first reset to offset 0, at each "
        f"token; {_share(pairs, of)}, query cursors (q) above the line, key cursors (k) below: layer.head.cursor. "
        f"Dashed: the answer begins. Resets begin training near {of.encoding.config.reset_start:.2g}."
        f"{of.within.legend}"))
    panels = figure.subplots(2, 4, sharex=True, sharey=True)
    for reading, when, line in ((of.before, "before training", panels[0]), (of.within, "trained", panels[1])):
        drawn = torch.stack([pair.of(reading.seen, "gates", side) for pair, side in rows])
        for action, (name, axes) in enumerate(zip(ACTIONS, line, strict=True)):
            image = probability_map(axes, drawn[..., action])
            axes.set_title(f"{name}, {when}", fontsize=9, loc="left")
            axes.axhline(len(pairs) - 0.5, color="0.35", linewidth=0.8)
            answer_line(axes, reading.answer)
            token_axis(axes.xaxis, reading.labels, 2.5, reading.answer)
            axes.tick_params(axis="y", length=0, pad=1)
        names = [f"{side[0]} {pair.layer}.{pair.head}.{pair.cursor}" for pair, side in rows]
        line[0].set_yticks(range(len(rows)), names, fontsize=6.5)
    same_scale(figure, image, panels, "probability")
    return figure


def _in_order(pairs: Sequence[Pair]) -> list[Pair]:
    return sorted(pairs, key=lambda pair: (pair.layer, pair.head, pair.cursor))


def _share(shown: Sequence[Pair], of: Counters) -> str:
    return "all pairs" if len(shown) == len(of.pairs) else f"the {len(shown)} most telling of {len(of.pairs)} pairs"


def mode_paths(of: Counters) -> "Figure":
    """fig:tokencopy-init, fig:tokencopy-trained, fig:reverse: the likeliest offset of every cursor."""
    from matplotlib.ticker import MaxNLocator

    shown = _in_order(of.pairs[:MOST_PATHS])
    columns = 4
    lines = -(-len(shown) // columns)
    figure = new_figure(10.2, 1.3 + 1.6 * lines, f"{of.title}: where the cursors stand, token by token", (
        f"The likeliest offset of query cursors (orange) and of their key cursors (blue), {_share(shown, of)}; grey: "
        "the same before training. Position draws a head from a token to those whose key cursor stands where its "
        "query cursor does, as strongly as |α| says. Dashed: the answer begins. Bold title: the most telling pair, of "
        f"{TELLING}.{of.within.legend}"))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    places = range(len(of.within.labels))
    dotted = len(places) <= FEW_TOKENS
    for axes, pair in zip(panels, shown, strict=False):
        for side, colour, _ in SIDES:
            dash = "-" if side == "query" else ":"
            untrained, trained = (modes(pair.of(reading.seen, "histograms", side)) for reading in
                                  (of.before, of.within))
            axes.plot(places, untrained, dash, color="0.72", linewidth=1.2)
            marker = ("o" if side == "query" else "D") if dotted else None
            axes.plot(places, trained, dash, color=colour, marker=marker, markersize=2.6, linewidth=1.2,
                      markerfacecolor="white" if side == "key" else colour, label=side)
        alpha = pair.alpha(of.within.seen, of.encoding.config.depths[0])
        axes.set_title(f"{pair}  |α| {alpha:.1f}", fontsize=8, loc="left",
                       weight="bold" if pair == of.pairs[0] else "normal")
        answer_line(axes, of.within.answer)
        softened(axes)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
        token_axis(axes.xaxis, of.within.labels, 2.3, of.within.answer)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    figure.supylabel("offset", fontsize=9)
    return figure


def counter(of: Counters) -> "Figure":
    """fig:addition-ood, fig:reverse-queries: whole histograms, at the training length and far beyond it."""
    pair = of.pairs[0]
    figure = new_figure(11.5, 7.6, f"{of.title}: the program counter, {pair}", (
        f"All of the histogram of the most telling query cursor and of its key cursor: {TELLING}. Where the query "
        "cursor stands at a token, look along that offset in the key cursor's map for the token that it meets: there "
        f"this pair draws its head. Dashed: the answer begins.{of.within.legend}"))
    trained = tokens_in_training(of.config)
    panels = figure.subplots(2, 2, sharey="row", sharex="row", gridspec_kw={"height_ratios": (1, 1.35)})
    for reading, line in ((of.within, panels[0]), (of.beyond, panels[1])):
        both = [pair.of(reading.seen, "histograms", side) for side, *_ in SIDES]
        for (side, _, colours), histograms, axes in zip(SIDES, both, line, strict=True):
            image = histogram_map(axes, histograms, extent_of(*both), colours)
            known = "longer than any in training" if len(reading.labels) > trained else "no longer than in training"
            axes.set_title(f"{side} cursor, {len(reading.labels)} tokens, {known}", fontsize=9, loc="left")
            answer_line(axes, reading.answer)
            token_axis(axes.xaxis, reading.labels, 5.0, reading.answer)
            if reading is of.beyond:
                same_scale(figure, image, panels[:, int(side == "key")], f"probability, {side}", location="bottom")
        line[0].set_ylabel("offset", fontsize=9)
    return figure


def displacements(of: Counters) -> "Figure":
    """eq:rel-dist-pmf-path between chosen tokens of the answer and all before them, of the most telling pair."""
    reading, pair = of.within, of.pairs[0]
    first, last = reading.written.start, reading.written.stop - 1
    chosen = sorted({first, (first + last) // 2, last})
    figure = new_figure(11.5, 4.6, f"{of.title}: how far apart tokens are, {pair}", (
        "The distribution of the displacement between the query cursor at one token (named above each map) and the "
        "key cursor at every token up to it (eq:rel-dist-pmf-path, the two taken as independent). At "
        "displacement 0, the line, the two stand together. Triangle, above: the token that the head attends to most."
        f"{of.within.legend}"))
    sizes = {"width_ratios": [token + 1 for token in chosen]}
    panels = figure.subplots(1, len(chosen), sharey=True, squeeze=False, gridspec_kw=sizes)[0]
    query, key = (pair.of(reading.seen, "histograms", side) for side, *_ in SIDES)
    maps = [displacement(key[: token + 1], query[token].expand(token + 1, -1).contiguous()) for token in chosen]
    extent = extent_of(*maps)
    for token, found, axes in zip(chosen, maps, panels, strict=True):
        image = histogram_map(axes, found, extent, "Greens")
        axes.axhline(0, color="0.35", linewidth=0.8)
        attended = int(reading.seen[f"layer.{pair.layer}.attention"][0, pair.head, token, : token + 1].argmax())
        axes.plot(attended, 1.0, "v", color=COLOURS[1], markersize=6, markeredgecolor="white", clip_on=False,
                  transform=axes.get_xaxis_transform())
        axes.set_title(f"from token {token}, “{reading.labels[token]}”", fontsize=9, loc="left")
        token_axis(axes.xaxis, reading.labels[: token + 1], 9.5 * (token + 1) / (sum(chosen) + len(chosen)))
    panels[0].set_ylabel("displacement (offsets)", fontsize=9)
    same_scale(figure, image, list(panels), "probability")
    return figure


def parameters(of: Counters) -> "Figure":
    """alpha, mu and gamma, head by head."""
    seen, config = of.within.seen, of.encoding.config
    alpha, mu = seen["prism.alpha"], seen["prism.mu"]
    first = of.encoding.config.depths[0]
    heads = [(layer, head) for layer in range(alpha.shape[0]) for head in range(alpha.shape[1])]
    beside = len(heads) <= FEW_HEADS
    figure = new_figure(*((8.0, 3.5) if beside else (10.0, 6.5)), f"{of.title}: what the heads make of positions", (
        "How strongly each head reads each of its cursors (|alpha|), the share of its scores that is of content (mu; "
        "the rest is of positions), and the exponent that sharpens each cursor after every token (gamma). Grey lines: "
        "where they started."))
    left, middle, right = figure.subplots(1, 3) if beside else figure.subplots(3, 1, sharex=True)
    names = [f"{first + layer}.{head}" for layer, head in heads]
    for place, (layer, head) in enumerate(heads):
        asides = [place + _aside(cursor, alpha.shape[2]) for cursor in range(alpha.shape[2])]
        left.plot(asides, alpha[layer, head].tolist(), "o", color=COLOURS[0], markersize=4.5)
        middle.plot(place, float(mu[layer, head]), "s", color=COLOURS[2], markersize=5)
    for pair in pairs_of(of.encoding):
        place = heads.index((pair.layer - first, pair.head))
        for side, colour, _ in SIDES:
            value = float(pair.of(seen, "gamma", side))
            shift = _aside(pair.cursor, of.encoding.config.cursors) + (0.06 if side == "key" else -0.06)
            if value < float("inf"):
                right.plot(place + shift, value, "o" if side == "query" else "D", color=colour, markersize=4,
                           markerfacecolor=colour if side == "query" else "white")
    for axes, title, start in ((left, "|alpha|", config.alpha_start), (middle, "mu", 0.5),
                               (right, "gamma: query ●, key ◇", config.gamma_start)):
        axes.axhline(start, color="0.6", linewidth=1)
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xticks(range(len(heads)), names, fontsize=7, rotation=0 if beside else 90)
        axes.set_xlim(-0.6, len(heads) - 0.4)
        softened(axes)
        if beside or axes is right:
            axes.set_xlabel("layer.head", fontsize=8)
    left.set_ylim(0, 1.06 * max(config.alpha_start, float(alpha.max())))
    middle.set_ylim(0, 1)
    return figure


def _aside(cursor: int, cursors: int) -> float:
    """Where in a head's column its cursor is drawn."""
    return 0.5 * ((cursor + 0.5) / cursors - 0.5)


def sharpness(of: Counters, measured: dict[int, Steadiness]) -> "Figure":
    """Whether the counter stays sharp: largest bin, entropy, mass at the edges, and right answers, against length."""
    lengths, pair = sorted(measured), of.pairs[0]
    counts = [measured[length].examples for length in lengths]
    many = f"{max(counts)} test examples a length" if min(counts) == max(counts) else (
        f"{min(counts)} to {max(counts)} test examples a length, fewer of long ones")
    figure = new_figure(11.5, 3.9, f"{of.title}: does the counter stay sharp?", (
        f"{many}. Lines: mean over tokens of the most telling pair ({pair}), the query cursor where the answer is "
        "written, the key cursor everywhere; dotted: the worst token of all. Grey: the means of all other cursors that "
        "heads read with at least a tenth of the largest |alpha|. A support has room for as many steps as there are "
        "tokens, unless set otherwise: at its edge stands who has gone one way all along."))
    panels = figure.subplots(1, 4)
    for axes, field, title in zip(panels, ("peak", "entropy", "edge"), (
        "largest bin", "entropy (bits)", "mass at the support's edges"), strict=False):
        for other, side in measured[lengths[0]].cursors:
            lines = [getattr(measured[length].cursors[other, side], field) for length in lengths]
            if other == pair:
                _own_lines(axes, lengths, lines, side)
            else:
                axes.plot(lengths, [line.mean for line in lines], color="0.8", linewidth=0.8, zorder=1)
        axes.set_title(title, fontsize=9, loc="left")
    panels[0].set_ylim(0, 1.02)
    panels[1].set_ylim(bottom=0)
    panels[2].set_ylim(0, max(1e-3, panels[2].get_ylim()[1]))
    right = [100 * measured[length].right / count for length, count in zip(lengths, counts, strict=True)]
    panels[3].plot(lengths, right, "-o", color="0.2", markersize=4, markerfacecolor="white", clip_on=False)
    panels[3].set_ylim(0, 102)
    panels[3].set_title("exact match (%) of these examples", fontsize=9, loc="left")
    panels[0].legend(frameon=False, fontsize=8, loc="lower left")
    for axes in panels:
        axes.axvline(of.config.max_length, color="0.35", linestyle="--", linewidth=0.8)
        axes.set_xlabel(f"length: {of.config.task.length_means}", fontsize=8)
        softened(axes)
    return figure


def _own_lines(axes: "Axes", lengths: Sequence[int], lines: Sequence[Spread], side: str) -> None:
    colour, marker = (SIDES[0][1], "o") if side == "query" else (SIDES[1][1], "D")
    axes.plot(lengths, [line.worst for line in lines], ":", color=colour, linewidth=1.2, zorder=2)
    axes.plot(lengths, [line.mean for line in lines], color=colour, linewidth=1.8, marker=marker, markersize=4,
              markerfacecolor="white", label=f"{side} cursor", zorder=3)
