"""The paper's figures of a model's inside (its appendix B), from any run: gates, counters, attention, sharpness.

    draw_inside(Path("models/copy-10"), Path("figures"))

writes, each as PNG and as PDF: gates, modes, counter, displacement, parameters, sharpness, attention, attention-beyond.
A model without cursors has attention alone.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from prism.config import ModelConfig, model_label
from prism.encodings.prism import Prism
from prism.errors import TooLong, UserError
from prism.figures import save_figure
from prism.inside import cursor_figures
from prism.inside.cursor_figures import Counters
from prism.inside.maps import answer_line, new_figure, probability_map, same_scale, token_axis
from prism.inside.pairs import USED, by_say, is_prism, lengths_for, steadiness
from prism.inside.reading import Reading, beyond, completed, example_of, read, within
from prism.tasks import Example
from prism.trained import Trained, build, open_run
from prism.transformer import Transformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 8  # a run, in the figures of attention
EXAMPLES = 4  # a length, in the figure of sharpness
ATTENTION = "layer.*.attention"
CURSORS = ("prism.*.histograms.*", "prism.*.gates.*", "prism.*.gamma.*", "prism.alpha", "prism.mu")


def draw_inside(
    run: Path, out: Path, prompt: str | None = None, length: int | None = None, longer: int | None = None,
    beside: Path | None = None, device: str = "cpu", say: Callable[[str], None] = print,
) -> list[Path]:
    """Writes the figures of a run's newest weights into `out`.

    They show a test example of `length` (default: the training length) or a `prompt`, and one that is `longer`
    (default: up to five times that); attention also that of a run `beside` it, such as a baseline's.
    """
    trained = open_run(run, device=device)
    others = [trained] if beside is None else [trained, open_run(beside, device=device)]
    for one in others:
        if not isinstance(one.config.model, ModelConfig):
            raise UserError(f"{one.folder.path} has no attention to look at: it is the architecture "
                            f"{one.config.architecture}")
        if one.config.task != trained.config.task:
            raise UserError(f"{one.folder.path} is of the task {one.config.task.name}, {trained.folder.path} of "
                            f"{trained.config.task.name}: figures beside one another want the same")
    near = example_of(trained.config, within(trained.config) if length is None else length)
    if prompt is not None:
        near = completed(trained.model, trained.config, prompt)
    far = example_of(trained.config, beyond(trained.config) if longer is None else longer)
    written = []
    if is_prism(trained.model):
        written += _draw_cursors(trained, near, far, out)
    else:
        say(f"{trained.folder.path} has no cursors ({model_label(trained.config.to_json())}): of its inside, "
            "attention is drawn, and gates, modes, counter, displacement, parameters and sharpness are not")
    for stem, example in (("attention", near), ("attention-beyond", far)):
        readings = [(_title(one) + _score(one), _attention(one, example)) for one in others]
        if isinstance(readings[0][1], str):
            say(f"{readings[0][0]}: {readings[0][1]}, so there is no {stem}")
        else:
            title = _title(trained) if beside is None else f"{trained.config.task.name} ≤ {trained.config.max_length}"
            written += save_figure(attention(title, readings), out, stem)
    return written


def _draw_cursors(trained: Trained, near: Example, far: Example, out: Path) -> list[Path]:
    model, config = trained.model, trained.config
    assert isinstance(model, Transformer)
    assert isinstance(model.encoding, Prism)
    untrained = build(config).to(model.device)
    wanted = (*CURSORS, ATTENTION)
    within_training = read(model, config, near, wanted)
    pairs = by_say(model.encoding, within_training.seen)
    of = Counters(_title(trained), config, model.encoding, read(untrained, config, near, CURSORS), within_training,
                  read(model, config, far, ("prism.*.histograms.*",)), pairs)
    first = config.positions.depths[0]  # type: ignore[attr-defined]
    loudest = max(pair.alpha(of.within.seen, first) for pair in pairs)
    read_at_all = [pair for pair in pairs if pair.alpha(of.within.seen, first) >= USED * loudest]
    measured = {length: steadiness(model, config, length, list(dict.fromkeys([pairs[0], *read_at_all])), EXAMPLES)
                for length in lengths_for(config)}
    figures = {
        "gates": cursor_figures.gates(of), "modes": cursor_figures.mode_paths(of),
        "counter": cursor_figures.counter(of), "displacement": cursor_figures.displacements(of),
        "parameters": cursor_figures.parameters(of), "sharpness": cursor_figures.sharpness(of, measured),
    }
    return [path for stem, figure in figures.items() for path in save_figure(figure, out, stem)]


def _title(trained: Trained) -> str:
    config = trained.config
    label = model_label(config.to_json())
    return f"{config.task.name} ≤ {config.max_length}, {label.replace('prism', 'PRISM')}, seed {config.seed}"


def _score(trained: Trained) -> str:
    """How good it is, where it was tested: attention beside another's is to be read with that in mind."""
    result, length = trained.folder.result(), str(trained.config.max_length)
    test = {} if result is None else result["final"]["test"]
    return f", {100 * test[length]['exact']:.0f} % right at {length}" if length in test else ""


def _attention(trained: Trained, example: Example) -> Reading | str:
    """What it attends to, or why it cannot read the example."""
    try:
        return read(trained.model, trained.config, example, (ATTENTION,))
    except TooLong as error:
        return str(error)


def attention(title: str, readings: Sequence[tuple[str, Reading | str]]) -> "Figure":
    """fig:reverse-mask, fig:reverse-mask-ood, fig:dm-randomized-pe: a row of heads for each run."""
    maps = [[] if isinstance(one, str) else heads_of(one) for _, one in readings]
    columns = max(map(len, maps))
    side = 2.7
    one = next(reading for _, reading in readings if isinstance(reading, Reading))
    figure = new_figure(max(6.0, side * columns + 1.0), 0.9 + (side + 0.2) * len(readings),
                        f"{title}: what {len(one.labels)} tokens attend to", (
        "Each row is a token that asks, each column a token it may attend to; dark: all of its attention. Dashed: from "
        "here on the answer is written, token by token, so below the line each row looks for what to write next."
        f"{one.legend}{_chosen(maps, readings)}"), square=True)
    panels = figure.subplots(len(readings), columns, squeeze=False)
    for line, (label, reading), heads in zip(panels, readings, maps, strict=True):
        for axes in line[len(heads) :]:
            axes.set_visible(False)
        if isinstance(reading, str):
            line[0].set_visible(True)
            line[0].set_axis_off()
            line[0].text(0, 0.5, f"{label}:\n{reading}", fontsize=8, wrap=True)
            continue
        for place, (axes, (name, weights)) in enumerate(zip(line, heads, strict=False)):
            image = probability_map(axes, weights)
            axes.set_aspect("equal")
            axes.set_title(f"{label}\n{name}" if len(readings) > 1 and not place else name, fontsize=8, loc="left")
            answer_line(axes, reading.answer, both=True)
            token_axis(axes.xaxis, reading.labels, side - 0.35, reading.answer)
            token_axis(axes.yaxis, reading.labels, side - 0.35, reading.answer)
    same_scale(figure, image, panels, "attention")
    return figure


def heads_of(reading: Reading) -> list[tuple[str, Tensor]]:
    """Every head's attention; of many heads, the sharpest of each layer where the answer is written."""
    layers = [value[0] for name, value in reading.seen.items() if name.endswith(".attention")]
    found = [(layer, head) for layer, weights in enumerate(layers) for head in range(weights.shape[0])]
    if len(found) > MOST_HEADS:
        found = [(layer, int(weights[:, reading.written].amax(-1).mean(-1).argmax()))
                 for layer, weights in enumerate(layers)][:MOST_HEADS]
    return [(f"layer {layer}, head {head}", layers[layer][head]) for layer, head in found]


def _chosen(maps: Sequence[Sequence[object]], readings: Sequence[tuple[str, Reading | str]]) -> str:
    for shown, (_, reading) in zip(maps, readings, strict=True):
        if isinstance(reading, Reading):
            heads = sum(value.shape[1] for name, value in reading.seen.items() if name.endswith(".attention"))
            if heads > len(shown):
                return " Shown of each layer: the head that looks most sharply while it writes."
    return ""
