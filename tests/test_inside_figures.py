"""Figures of a model's inside: they show the numbers that were recorded of the sequence they name, twice the same.

And what the shipped models' figures are quoted for is so: their counters are where the paper's say they should be.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import prism.inside.pairs
from prism.architectures.lstm import Lstm
from prism.config import RunConfig
from prism.data import batch, draw, vocabulary
from prism.errors import UserError
from prism.generate import generate
from prism.inside import record
from prism.inside.cursor_figures import Counters, counter, displacements, gates, mode_paths, parameters
from prism.inside.figures import CURSORS, attention, draw_inside, heads_of
from prism.inside.pairs import Pair, by_say, lengths_for, modes, movement, pairs_of, steadiness
from prism.inside.reading import START, Reading, beyond, completed, example_of, read, within
from prism.tasks import Example, find_task
from prism.train import train
from prism.trained import build, open_run
from tests.small import MODEL, memorise, small_config, stirred
from tests.tolerances import assert_close

MODELS = Path(__file__).parents[1] / "models"
PRISM_STEMS = ["gates", "modes", "counter", "displacement", "parameters", "sharpness"]
EVERYTHING = (*CURSORS, "layer.*.attention")


def config_of(task: str = "copy", start_token: bool = False, **options: object) -> RunConfig:
    return small_config(task, "prism", options, model=dataclasses.replace(MODEL, start_token=start_token))


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs of a second: PRISM, a baseline with a limited reach, and one without attention."""
    place = tmp_path_factory.mktemp("runs")
    train(config_of(), place / "prism")
    train(small_config("copy", "learned", {"longest": 12}), place / "learned")
    train(small_config("reverse", "nope"), place / "reverse")
    lstm = dataclasses.replace(small_config("copy", "nope"), architecture="lstm", model=Lstm.Config(width=8))
    train(lstm, place / "lstm")
    return place


# --- What is measured ---


def test_pairs_are_the_recordings_cursors_in_their_order():
    config = config_of(depths=(0, 1), cursors=2)
    model = stirred(config)
    assert [str(pair) for pair in pairs_of(model.encoding)] == [
        f"layer {layer}, head {head}, cursor {cursor}" for layer in (0, 1) for head in (0, 1) for cursor in (0, 1)
    ]
    assert [(pair.depth, pair.slot) for pair in pairs_of(model.encoding)] == [
        (depth, slot) for depth in (0, 1) for slot in range(4)
    ]


def standing(*offsets: int, blur: float = 0.0) -> torch.Tensor:
    """Histograms over -5..5 that stand where they are told, with some of their mass spread evenly."""
    histograms = torch.full((len(offsets), 11), blur / 11)
    for row, offset in zip(histograms, offsets, strict=True):
        row[offset + 5] += 1 - blur
    return histograms


def test_modes_and_movement():
    walks = standing(0, 1, 1, 2, -3, blur=0.4)
    assert modes(walks).tolist() == [0, 1, 1, 2, -3]
    assert movement(walks) == 0.75
    assert movement(standing(2)) == 0


def test_the_most_telling_pair_is_loud_and_sharp_and_moves():
    model = stirred(config_of(cursors=2))
    still, walk, blurred = standing(0, 0, 0), standing(0, 1, 2), standing(0, 1, 2, blur=0.6)
    by_slot = {  # slot: alpha, query, key
        0: (9.0, still, walk), 1: (9.0, walk, blurred), 2: (8.0, walk, walk), 3: (3.0, walk, walk),
        4: (9.0, blurred, walk), 5: (9.0, walk, still), 6: (1.0, walk, walk), 7: (9.0, blurred, blurred),
    }
    seen = {"prism.alpha": torch.tensor([one[0] for one in by_slot.values()]).view(2, 2, 2)}
    for place, side in ((1, "query"), (2, "key")):
        seen[f"prism.0.histograms.{side}"] = torch.stack([one[place] for one in by_slot.values()])[None]
    assert [pair.slot for pair in by_say(model.encoding, seen)][:3] == [2, 1, 4]
    assert {pair.slot for pair in by_say(model.encoding, seen)[-2:]} == {0, 5}


@pytest.mark.parametrize(("task", "start_token"), [("copy", False), ("copy", True), ("addition", False)])
def test_steadiness_is_that_of_the_histograms_read_one_example_at_a_time(monkeypatch, task, start_token):
    config = config_of(task, start_token)
    model, words = stirred(config), vocabulary(config.task)
    examples = draw(config.task, seed=0, stream="test", step=0, size=3, length=2)
    memorise(model, config.task, examples[:1], 200)
    pairs, opens = pairs_of(model.encoding), int(start_token)
    found = steadiness(model, config, 2, pairs, 3)
    monkeypatch.setattr(prism.inside.pairs, "AT_ONCE", 3000)
    in_chunks = steadiness(model, config, 2, pairs, 3)
    longest = max(len(example.prompt + example.completion) for example in examples)
    peaks: dict[tuple[Pair, str], list[float]] = {}
    entropies: dict[tuple[Pair, str], list[float]] = {}
    for prompt, completion in examples:  # padded, as the support is as long as the longest
        text = (prompt + completion)[:-1]
        ids = torch.nn.functional.pad(torch.from_numpy(words.encode(text)), (0, longest - 1 - len(text)))[None]
        seen = record(model, ids, "prism.0.histograms.*")
        for pair in pairs:
            for side, start in (("query", len(prompt) - 1), ("key", 0)):
                rows = seen[f"prism.0.histograms.{side}"][0, pair.slot].numpy()[start + opens : len(text) + opens]
                for row in rows.astype(float):
                    peaks.setdefault((pair, side), []).append(row.max())
                    entropies.setdefault((pair, side), []).append(
                        -sum(one * math.log2(one) for one in row if one > 0))
    for key, sharp in found.cursors.items():
        assert sharp.peak == pytest.approx((np.mean(peaks[key]), min(peaks[key])), rel=1e-5)
        assert sharp.entropy == pytest.approx((np.mean(entropies[key]), max(entropies[key])), rel=1e-4, abs=1e-5)
        assert sharp.edge.worst <= 1
        for one, other in zip(sharp, in_chunks.cursors[key], strict=True):
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    right = sum(generate(model, words, [prompt], 40)[0] == completion for prompt, completion in examples)
    assert found.right == in_chunks.right == right >= 1
    assert found.examples == 3


def test_long_sequences_of_a_large_model_are_measured_on_fewer_examples(monkeypatch):
    config = config_of()
    model = stirred(config)
    tokens = 6
    monkeypatch.setattr(prism.inside.pairs, "IN_ALL", 2 * tokens * model.encoding.footprint(tokens))
    assert steadiness(model, config, 2, pairs_of(model.encoding)[:1], 4).examples == 2
    monkeypatch.setattr(prism.inside.pairs, "IN_ALL", 1)
    assert steadiness(model, config, 2, pairs_of(model.encoding)[:1], 4).examples == 1


# --- What is read ---


def test_a_reading_names_each_token_and_where_the_answer_begins():
    for start_token in (False, True):
        config = config_of(start_token=start_token)
        reading = read(build(config), config, Example("427=", "427."), EVERYTHING)
        assert reading.labels == ((START,) if start_token else ()) + tuple("427=427")
        assert reading.labels[reading.answer] == "="
        assert reading.seen["layer.0.attention"].shape[-1] == len(reading.labels)
        assert reading.labels[reading.written] == tuple("=427")
    words = config_of("scan_cot")
    reading = read(build(words), words, Example("jump =", "jump → jump : I_JUMP ."), EVERYTHING)
    assert reading.labels == ("jump", "=", "jump", "→", "jump", ":", "I_JUMP")
    assert reading.answer == 1


def test_a_prompt_gets_its_right_answer_or_else_the_models():
    config = config_of()
    model = build(config)
    assert completed(model, config, "31415=") == Example("31415=", "31415.")
    made = completed(model, config, "31=4")
    assert made.completion == generate(model, vocabulary(config.task), ["31=4"], 16)[0]
    with pytest.raises(UserError, match="'x' at position 2"):
        completed(model, config, "3x=")


@pytest.mark.parametrize("task", ["copy", "addition", "multiplication", "scan_cot", "stack", "dyn_str_cpy"])
def test_lengths_begin_as_trained_and_go_far_but_not_too_far(task):
    kind = find_task(task)
    config = dataclasses.replace(small_config(task), max_length=kind.training_length)
    lengths = lengths_for(config)
    assert lengths[0] == within(config)
    assert len(lengths) >= 2
    assert beyond(config) > within(config)
    for length in (*lengths, beyond(config)):
        assert sum(map(len, map(vocabulary(config.task).split, example_of(config, length)))) < 1100
    if task == "copy":
        assert (within(config), beyond(config), lengths[-1]) == (10, 50, 100)


# --- What is drawn ---


@pytest.fixture(scope="module")
def counters() -> Counters:
    config = config_of(start_token=True, cursors=2, copy_every=3)
    model, example = stirred(config), Example("427=", "427.")
    inside = read(model, config, example, EVERYTHING)
    return Counters("a title", config, model.encoding, read(build(config), config, example, CURSORS), inside,
                    read(model, config, Example("12345=", "12345."), CURSORS), by_say(model.encoding, inside.seen))


def labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def drawn(axes) -> np.ndarray:
    return np.asarray(axes.get_images()[0].get_array())


def test_gates_are_drawn_cursor_by_cursor_before_and_after(counters):
    panels = gates(counters).axes[:8]
    for place, axes in enumerate(panels):
        reading = counters.before if place < 4 else counters.within
        both = [reading.seen[f"prism.0.gates.{side}"][0, :, :, place % 4] for side in ("query", "key")]
        assert np.abs(drawn(axes) - torch.cat(both).numpy()).max() <= 1 / 128
    assert labels(panels[4].xaxis) == [START, *"427=427"]
    assert labels(panels[0].yaxis) == [
        f"{side} {layer}.{head}.{cursor}" for side in "qk" for layer in (0, 1) for head in (0, 1) for cursor in (0, 1)
    ]


def test_modes_are_drawn_for_every_pair(counters):
    panels = mode_paths(counters).axes
    assert len(panels) == 8
    for slot, axes in enumerate(panels):
        expected = [
            reading.seen[f"prism.0.histograms.{side}"][0, slot].argmax(-1) - 8
            for side in ("query", "key") for reading in (counters.before, counters.within)
        ]
        lines = [line.get_ydata() for line in axes.get_lines() if len(line.get_ydata()) == 8]
        assert [list(line) for line in lines] == [line.tolist() for line in expected]
        bold = axes.get_title(loc="left").startswith(str(counters.pairs[0]))
        assert bold == (axes.title.get_weight() == "bold" or axes._left_title.get_weight() == "bold")


def test_the_counter_is_all_of_the_histogram_that_is_anything(counters):
    pair, figure = counters.pairs[0], counter(counters)
    for place, axes in enumerate(figure.axes[:4]):
        reading = (counters.within, counters.beyond)[place // 2]
        histograms = reading.seen[f"prism.0.histograms.{('query', 'key')[place % 2]}"][0, pair.slot]
        high, low = (round(edge - 0.5) for edge in sorted(axes.get_ylim(), reverse=True))
        middle = histograms.shape[-1] // 2
        shown = histograms[:, low + 1 + middle : high + 1 + middle]
        assert np.abs(drawn(axes) - shown.T.numpy()).max() <= 1 / 128
        assert histograms.sum() - shown.sum() < 1e-2 * len(histograms)
    assert labels(figure.axes[2].xaxis) == [START, *"12345=12345"]


def test_the_counter_says_which_sequence_is_longer_than_training_whatever_was_asked_for(counters):
    """Not which panel is meant to be: lengths and prompts are the user's to choose."""
    swapped = dataclasses.replace(counters, within=counters.beyond, beyond=counters.within)
    for one in (counters, swapped):
        trained = 2 * one.config.max_length + 1 + one.config.model.start_token  # a copy, or a reversal, is read twice
        for reading, axes in zip((one.within, one.beyond), counter(one).axes[:4:2], strict=True):
            longer = len(reading.labels) > trained
            said = "longer than any in training" if longer else "no longer than in training"
            assert axes.get_title(loc="left").endswith(said)


def test_displacements_are_differences_of_where_two_cursors_stand(counters):
    """Against a double loop over both histograms."""
    pair, figure, seen = counters.pairs[0], displacements(counters), counters.within.seen
    query, key = (seen[f"prism.0.histograms.{side}"][0, pair.slot].double().numpy() for side in ("query", "key"))
    tokens = [4, 5, 7]
    for token, axes in zip(tokens, figure.axes[:3], strict=True):
        assert axes.get_title(loc="left").startswith(f"from token {token}, ")
        high, low = (round(edge - 0.5) for edge in sorted(axes.get_ylim(), reverse=True))
        for other in range(token + 1):
            expected = dict.fromkeys(range(-16, 17), 0.0)
            for i, p in enumerate(query[token]):
                for j, q in enumerate(key[other]):
                    expected[i - j] += p * q
            column = drawn(axes)[:, other]
            assert np.abs(column - [expected[d] for d in range(low + 1, high + 1)]).max() <= 1 / 128 + 1e-6
        (triangle,) = [line for line in axes.get_lines() if line.get_marker() == "v"]
        assert triangle.get_xdata()[0] == seen[f"layer.{pair.layer}.attention"][0, pair.head, token].argmax()


def test_parameters_are_drawn_head_by_head(counters):
    left, middle, right = parameters(counters).axes
    points = sorted(value for line in left.get_lines() for value in line.get_ydata())
    assert points == pytest.approx(sorted([*counters.encoding.alpha.abs().flatten().tolist(), 1.0, 1.0]))
    assert labels(left.xaxis) == ["0.0", "0.1", "1.0", "1.1"]
    shares = [line.get_ydata()[0] for line in middle.get_lines()][:4]
    assert shares == pytest.approx(torch.sigmoid(counters.encoding.mu_logit).flatten().tolist())
    finite = sum(int(counters.within.seen[f"prism.0.gamma.{side}"].isfinite().sum()) for side in ("query", "key"))
    assert finite == 14  # two key cursors only increment
    assert len(right.get_lines()) == finite + 1


def test_attention_is_drawn_as_recorded_a_row_for_each_run(counters):
    other = stirred(config_of(start_token=True, copy_every=3), scale=0.1)
    second = read(other, counters.config, Example("427=", "427."), ("layer.*.attention",))
    figure = attention("t", [("one", counters.within), ("two", second), ("three", "it cannot")])
    maps = [axes for axes in figure.axes if axes.get_images() and len(drawn(axes)) == 8]
    assert len(maps) == 8
    for place, axes in enumerate(maps):
        seen = (counters.within, second)[place // 4].seen
        layer, head = divmod(place % 4, 2)
        assert np.abs(drawn(axes) - seen[f"layer.{layer}.attention"][0, head].numpy()).max() <= 1 / 128
        assert labels(axes.xaxis) == labels(axes.yaxis) == [START, *"427=427"]
    assert any("it cannot" in text.get_text() for axes in figure.axes for text in axes.texts)


def test_of_many_heads_the_sharpest_of_each_layer_is_shown():
    seen = {f"layer.{layer}.attention": torch.full((1, 5, 4, 4), 0.25) for layer in range(2)}
    seen["layer.0.attention"][0, 3, 2:] = torch.eye(4)[2:]
    seen["layer.1.attention"][0, 1, 2:] = torch.eye(4)[2:]
    seen["layer.1.attention"][0, 0, :2] = torch.eye(4)[:2]  # sharp, but not where it writes
    found = heads_of(Reading(("1", "2", "=", "1"), 2, seen))  # type: ignore[arg-type]
    assert [name for name, _ in found] == ["layer 0, head 3", "layer 1, head 1"]
    assert_close(found[0][1], seen["layer.0.attention"][0, 3].numpy())


# --- From a run to files ---


def test_every_figure_of_a_run_is_written_and_the_same_twice(runs, tmp_path):
    said: list[str] = []
    written = draw_inside(runs / "prism", tmp_path / "a", say=said.append)
    stems = [*PRISM_STEMS, "attention", "attention-beyond"]
    assert [path.name for path in written] == [f"{stem}.{suffix}" for stem in stems for suffix in ("png", "pdf")]
    assert not said
    for path in written:
        assert path.read_bytes()[:4] == (b"\x89PNG" if path.suffix == ".png" else b"%PDF")
        assert path.stat().st_size < 200_000, path
    for path in draw_inside(runs / "prism", tmp_path / "b"):
        assert path.read_bytes() == (tmp_path / "a" / path.name).read_bytes(), path


def test_a_prompt_and_lengths_can_be_chosen(runs, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("prism.inside.figures.save_figure", lambda figure, out, stem: seen.append((stem, figure)) or [])
    draw_inside(runs / "learned", tmp_path, prompt="31=", longer=4, say=lambda _: None)
    assert [stem for stem, _ in seen] == ["attention", "attention-beyond"]
    assert labels(seen[0][1].axes[0].xaxis) == list("31=31")
    assert len(labels(seen[1][1].axes[0].xaxis)) == 9
    draw_inside(runs / "learned", tmp_path, length=2, longer=4, say=lambda _: None)
    assert len(labels(seen[2][1].axes[0].xaxis)) == 5


def test_a_run_without_cursors_has_attention_and_one_sentence(runs, tmp_path):
    said: list[str] = []
    written = draw_inside(runs / "learned", tmp_path, say=said.append)
    assert {path.stem for path in written} == {"attention"}
    assert len(said) == 2
    assert "has no cursors (learned): of its inside, attention is drawn" in said[0]
    assert said[1].endswith("so there is no attention-beyond")


def test_a_run_beside_is_drawn_or_says_why_not(runs, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("prism.inside.figures.save_figure", lambda figure, out, stem: seen.append((stem, figure)) or [])
    draw_inside(runs / "prism", tmp_path, beside=runs / "learned")
    figures = dict(seen)
    titles = [axes.get_title(loc="left") for axes in figures["attention"].axes]
    assert [title.splitlines()[0] for title in titles if "\n" in title] == [
        "copy ≤ 3, PRISM, seed 0", "copy ≤ 3, learned, seed 0"
    ]
    texts = [text.get_text() for axes in figures["attention-beyond"].axes for text in axes.texts]
    assert any("learned has places for 12 tokens, and a sequence here has" in text for text in texts)


def test_what_cannot_be_drawn_is_said(runs, tmp_path):
    with pytest.raises(UserError, match="no attention to look at: it is the architecture lstm"):
        draw_inside(runs / "lstm", tmp_path)
    with pytest.raises(UserError, match=r"is of the task reverse, .* of copy: figures beside one another"):
        draw_inside(runs / "prism", tmp_path, beside=runs / "reverse")
    with pytest.raises(UserError, match="is not a run folder"):
        draw_inside(tmp_path / "nowhere", tmp_path)


# --- What the shipped models' figures are quoted for ---


@pytest.mark.parametrize(("name", "met"), [
    ("copy-10", lambda step, length: step),  # the symbol to write next, from the first
    ("reverse-10", lambda step, length: length - 1 - step),  # ... from the last
])
@pytest.mark.parametrize("length", [10, 50])
def test_the_program_counter_of_a_shipped_model_meets_the_symbol_to_write(name, met, length):
    trained = open_run(MODELS / name)
    reading = read(trained.model, trained.config, example_of(trained.config, length), EVERYTHING)
    pair = by_say(trained.model.encoding, reading.seen)[0]
    assert pair.layer == 0
    query, key = (pair.of(reading.seen, "histograms", side) for side in ("query", "key"))
    opens = trained.config.model.start_token
    for step in range(length):
        symbol = met(step, length) + opens
        asking = modes(query)[reading.answer + step]
        assert asking == modes(key)[symbol]
        assert int((modes(key) == asking).sum()) == 1  # and no other token's
    assert query[reading.written].amax(-1).min() > 0.8


def test_the_most_telling_cursor_of_reverse_is_needed_and_is_enough():
    """Its alpha alone, of eight, keeps every answer right at five times the training length; without it none is."""
    trained = open_run(MODELS / "reverse-10")
    alpha = trained.model.encoding.alpha
    kept = alpha.detach().clone()
    tested = batch(trained.config.task, seed=0, stream="test", step=0, size=10, length=50)
    reading = read(trained.model, trained.config, example_of(trained.config, 10), EVERYTHING)
    pair = by_say(trained.model.encoding, reading.seen)[0]

    def right() -> int:
        with torch.no_grad():
            wrong = (trained.model(tested.tokens).argmax(-1) != tested.targets) & tested.mask
        return int((~wrong.any(1)).sum())

    with torch.no_grad():
        alpha[pair.layer, pair.head, pair.cursor] = 0
        assert right() == 0
        alpha.zero_()
        alpha[pair.layer, pair.head, pair.cursor] = kept[pair.layer, pair.head, pair.cursor]
        assert right() == 10


# --- The page ---


def test_the_code_of_the_page_runs_and_gives_the_shapes_it_names(monkeypatch):
    root = MODELS.parent
    monkeypatch.chdir(root)
    blocks = re.findall(r"^```python\n(.*?)^```", (root / "docs" / "inside.md").read_text(), re.M | re.S)
    named = 0
    for block in blocks:
        name: dict[str, Any] = {"__name__": "page"}
        exec(compile(block, "inside.md", "exec"), name)
        for expression, shape in re.findall(r"^(seen\[.*?\]) +# (\[[\d, ]+\])", block, re.M):
            assert str(list(eval(expression, name).shape)) == shape, expression
            named += 1
    assert len(blocks) == 3
    assert named == 4


def test_the_page_names_all_that_is_recorded_and_every_figure():
    page = (MODELS.parent / "docs" / "inside.md").read_text()
    seen = record(stirred(config_of(copy_every=2)), torch.zeros(1, 4, dtype=torch.int64))
    for name in seen:
        *front, last = re.sub(r"^layer\.\d", "layer.N", re.sub(r"^prism\.\d", "prism.D", name)).split(".")
        assert f"`{'.'.join([*front, last])}`" in page or (
            f"`.{last}`" in page and f"`{'.'.join(front)}." in page), name
    for stem in (*PRISM_STEMS, "attention", "attention-beyond"):
        assert f"`{stem}`" in page
