"""The arena: equal terms, encodings in files of a user's own, one table and one figure."""

import json
import re
from pathlib import Path

import pytest

import prism.encodings
from prism.architectures import all_architectures, count_parameters
from prism.compare import Grid, InRunFolders
from prism.compare.table import as_markdown, as_text, comparisons, draw, results_under
from prism.compare.terms import MOST_APART, contenders
from prism.config import preset
from prism.encodings import add_encoding, all_encodings, find_encoding
from prism.encodings.encoding import Encoding
from prism.errors import UserError
from prism.figures import models_of
from prism.reproduce.cells import Cell
from prism.reproduce.runner import train_cell
from prism.tasks import find_task
from prism.trained import build
from tests.small import prism_says, refused

PAGE = Path(__file__).parents[1] / "docs" / "your-encoding.md"
TABLES = {"learned", "abacus", "bipe", "randomized_learned"}  # a row for each place they may meet


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    return code


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the page's example as a user would have it; what is loaded from it is forgotten afterwards."""
    monkeypatch.setattr(prism.encodings, "_own", {})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recent.py").write_text(example())
    return tmp_path


def config_of(name: str, given: str = "quick", task: str = "copy", length: int = 10, architectures: bool = False):
    (model,) = contenders(() if architectures else (name,), (name,) if architectures else (), given,
                          find_task(task)(), length)
    return Cell("compare", task, length, model, 0, {}).config()


# --- Equal terms ---


@pytest.mark.parametrize(("given", "task", "length"), [("quick", "copy", 10), ("paper", "reverse", 40)])
def test_all_encodings_but_prism_share_one_transformer_and_the_budget(given, task, length):
    names = [model.label for model in contenders(("all",), (), given, find_task(task)(), length)]
    assert {"prism", "nope", "rope", "alibi", "sinusoidal_plain", "sinusoidal_shifted"} <= set(names)
    configs = {name: config_of(name, given, task, length) for name in names}
    shared = configs["nope"].model
    for name, config in configs.items():
        size = config.model
        assert (size.width, size.layers) == (shared.width, shared.layers)
        assert size.heads * size.head_width == shared.heads * shared.head_width
        assert size.feedforward == shared.feedforward or name == "prism"
        for equal in ("steps", "batch_size", "optimizer", "curriculum", "evaluation", "matmul", "task", "max_length"):
            assert getattr(config, equal) == getattr(configs["nope"], equal), (name, equal)


def test_parameters_are_within_a_tenth_but_for_tables_of_positions():
    measure = count_parameters(build(config_of("prism")))
    for name in set(all_encodings()) - TABLES:
        assert abs(count_parameters(build(config_of(name))) - measure) <= MOST_APART * measure, name
    for name in [name for name, kind in all_architectures().items() if not kind.takes_encoding]:
        assert abs(count_parameters(build(config_of(name, architectures=True))) - measure) <= MOST_APART * measure, name


def test_all_leaves_out_what_a_task_gives_no_hints_for():
    def of(task):
        return {model.label for model in contenders(("all",), (), "quick", find_task(task)(), 10)}

    assert {"abacus", "position_coupling"} <= of("addition")
    assert not {"abacus", "position_coupling"} & of("stack")


def test_names_are_unique_and_each_is_run_once():
    assert not set(all_encodings()) & set(all_architectures())
    models = contenders(("rope", "all", "rope"), (), "quick", find_task("copy")(), 10)
    labels = [model.label for model in models]
    assert labels[0] == "rope"
    assert len(labels) == len(set(labels))


# --- A file of one's own ---


def test_dropping_one_file_into_the_folder_is_all_it_takes(tmp_path, monkeypatch):
    """What a contributor does: the folder of encodings, and one file more."""
    (tmp_path / "recent.py").write_text(example())
    monkeypatch.setattr(prism.encodings, "__path__", [*prism.encodings.__path__, str(tmp_path)])
    all_encodings.cache_clear()
    try:
        assert find_encoding("recent").summary.startswith("a learned penalty")
        assert preset("quick", find_task("copy")(), "recent").positions.horizon == 20.0
        assert "recent" in [one.label for one in contenders(("all",), (), "quick", find_task("copy")(), 10)]
    finally:
        monkeypatch.undo()
        all_encodings.cache_clear()
    assert "recent" not in all_encodings()


SMALL = ["--steps", "12", "--batch-size", "4", "--model.width", "16", "--model.layers", "1", "--max-length", "3",
         "--evaluation.lengths", "2", "--evaluation.final-examples", "4"]


def test_an_own_encoding_is_trained_tested_and_used_by_naming_its_file(own, capsys):
    train = ["train", "copy", "--encoding", "recent.py", "--positions.horizon", "5", "--out", "run", *SMALL]
    assert prism_says(capsys, *train)[0] == 0
    assert json.loads((own / "run/config.json").read_text())["encoding"] == "recent"
    assert json.loads((own / "run/config.json").read_text())["positions"] == {"horizon": 5.0}
    assert (own / "run/encoding.py").read_text() == example()
    assert prism_says(capsys, "evaluate", "run", "--encoding", "recent.py", "--lengths", "2", "--examples", "3")[0] == 0
    assert prism_says(capsys, "generate", "run", "12=", "--encoding=recent.py")[0] == 0
    assert "is a run of recent" in refused(capsys, "evaluate", "run", "--encoding", "nope")
    assert prism_says(capsys, *train, "--resume")[0] == 0
    (own / "recent.py").write_text(example() + "\n# changed\n")
    assert "has changed since this run began" in refused(capsys, *train, "--resume")


def test_a_run_never_executes_the_code_it_holds(own, capsys):
    assert prism_says(capsys, "train", "copy", "--encoding", "recent.py", "--out", "run", *SMALL)[0] == 0
    prism.encodings._own.clear()
    (own / "run/encoding.py").write_text("raise SystemExit('executed')")
    sentence = refused(capsys, "evaluate", "run", "--lengths", "2")
    assert "unknown encoding 'recent'" in sentence
    assert "--encoding path/to/file.py" in sentence


@pytest.mark.parametrize(("code", "sentence"), [
    ("import nonsense_of_some_kind", r"mine\.py does not import: ModuleNotFoundError at line 1: No module"),
    ("x = 1\ny = (", r"mine\.py does not import: SyntaxError at line 2"),
    ("x = 1", r"mine\.py must define one encoding, a subclass of Encoding with a `name`; found none"),
    (example() + example().replace("class Recent(", "class Second("), "found Recent, Second"),
    ("import sys\nsys.exit(0)", r"mine\.py does not import: SystemExit at line 2"),
    (example().replace('"recent"', '"../evil"'), r"mine\.py: a name is made of small letters, digits and _"),
    (example().replace('"recent"', '"all"'), r"and is not 'all'; got 'all'"),
    (example().replace('"recent"', '"lstm"'), r"is called 'lstm', which is the name of one of prism's own"),
    (example().replace('"recent"', '"rope"'), r"mine\.py: Recent is called 'rope', which is the name of one of prism"),
    (example().replace("(self, layer: int, stream: Stream) -> Tensor", "(self, layer, stream)").replace(
        "return (-slope", "return (slope[:, None, None] + stream.tokens[0].roll(-1)) + (-slope"),
     r"mine\.py: recent breaks the rule 'causality: .*': changing token \d moved"),
    (example().replace("horizon[:, None, None]))[None]", "horizon[:, None, None]))"),
     r"mine\.py: recent breaks the rule 'hooks keep their shapes': bias has the shape \[2, 9, 9\], where \["),
])
def test_a_file_that_will_not_do_is_named_with_the_rule_and_what_was_seen(code, sentence, own):
    (own / "mine.py").write_text(code)
    with pytest.raises(UserError, match=sentence):
        add_encoding("mine.py")
    assert "recent" not in prism.encodings._own


def test_paths_may_have_spaces_and_annotations_may_be_texts(own, capsys):
    (own / "my files, old").mkdir()
    code = "from __future__ import annotations\n" + example().split('"""', 2)[2]
    (own / "my files, old/recent.py").write_text(code)
    assert prism_says(capsys, "train", "copy", "--encoding", "my files, old/recent.py", "--positions.horizon", "3",
                      "--out", "run", *SMALL)[0] == 0
    assert prism_says(capsys, "export", "run", "--out", "kept", "--encoding", "my files, old/recent.py")[0] == 0
    code, _, err = prism_says(capsys, "train", "copy", "--encoding", "my files, old/recent.py",
                              "--positions.horizon=-3")
    assert code == 2
    assert "horizon must be greater than 0" in " ".join(err.replace("│", " ").split())


def test_a_preset_that_returns_no_run_is_said(own):
    code = example() + "\n    @classmethod\n    def preset(cls, name, base):\n        return None\n"
    (own / "mine.py").write_text(code)
    add_encoding("mine.py")
    with pytest.raises(UserError, match="the preset of recent must return a run's configuration, got None"):
        preset("quick", find_task("copy")(), "recent")


def test_two_files_of_one_name_are_told_apart(own):
    (own / "other.py").write_text(example())
    assert issubclass(add_encoding("recent.py"), Encoding)
    add_encoding("recent.py")
    with pytest.raises(UserError, match=r"other\.py and recent\.py both call their encoding 'recent'"):
        add_encoding("other.py")


def test_compare_trains_a_grid_with_an_own_encoding_to_its_table_and_figure(own, capsys):
    command = ["compare", "copy", "--encodings", "nope,recent.py", "--seeds", "1", "--steps", "8", "--lengths", "2,11",
               "--out", "arena"]
    code, out, err = prism_says(capsys, *command)
    assert (code, err) == (0, "")
    assert re.search(r"^model +told +parameters +steps/s +memory +seeds +2 +11$", out, re.M)
    for name in ("nope", "recent"):
        assert re.search(rf"^{name} +- +120,7\d\d +[\d.]+ +[\d,]+ MiB +1 +0 +0$", out, re.M), out
        assert (own / f"arena/{name}-seed0/result.json").is_file()
    assert {path.name for path in (own / "arena").glob("compare-*")} == {
        f"compare-copy-10-quick-8.{kind}" for kind in ("png", "pdf", "md")}
    code, again, _ = prism_says(capsys, *command)  # nothing is trained twice
    assert "started" not in again
    assert prism_says(capsys, "compare", "--from", "arena", "--out", "drawn")[0] == 0
    page = "compare-copy-10-quick-8.md"
    assert (own / "drawn" / page).read_text() == (own / "arena" / page).read_text()
    (own / "recent.py").write_text(example().replace("-2.0", "-1.0"))  # another method under the same name
    assert "started   compare/copy-10/recent-seed0" in prism_says(capsys, *command)[1]
    (aside,) = (own / "arena").glob("recent-seed0-before-*")
    assert (aside / "encoding.py").read_text() == example()


def test_compare_hands_every_setting_to_its_workers_and_says_what_failed(own, capsys):
    """Also: each seed is its own, and one model that fails keeps no other from its row."""
    refusal = "        if stream.time > 40:\n            raise KeyError('too much')\n"
    (own / "failing.py").write_text(
        example().replace('"recent"', '"failing"').replace("        distance =", f"{refusal}        distance ="))
    code, out, err = prism_says(
        capsys, "compare", "copy", "--encodings", "failing.py,nope", "--seeds", "2", "--steps", "3", "--lengths", "30",
        "--preset", "quick", "--max-length", "3", "--at-once", "2", "--out", "arena")
    assert code == 1
    assert "not every model could be trained" in err
    assert re.search(r"FAILED +compare/copy-3/failing-seed\d \(exit 1\): KeyError: 'too much'", out)
    assert re.search(r"^nope .* 2 +0$", out, re.M)
    stored = [json.loads((own / f"arena/nope-seed{seed}/config.json").read_text()) for seed in (0, 1)]
    assert [(one["seed"], one["max_length"], one["preset"], one["steps"]) for one in stored] == [
        (0, 3, "quick", 3), (1, 3, "quick", 3)]


@pytest.mark.parametrize(("line", "sentence"), [
    ("compare", "needs a task first"),
    ("compare cpoy", "did you mean 'copy'"),
    ("compare copy --encodings prsm", "did you mean 'prism'"),
    ("compare copy --encodings nope.py", "there is no file nope.py"),
    ("compare copy --encodings ,", "there is nothing to compare"),
    ("compare copy --architectures transformer --encodings ,", "transformer is what every encoding is tried in"),
    ("compare copy --seeds 0", "--seeds must be at least 1"),
    ("compare copy --minutes 0", "--minutes must be a number above 0"),
    ("compare copy --at-once 0 --encodings nope", "--at-once must be at least 1"),
    ("compare copy --train rope-seed9 --encodings rope --seeds 1", "--train must be one of rope-seed0"),
    ("compare stack --encodings abacus", "abacus needs a task that tells its digits, and stack does not; tasks"),
    ("compare --from nowhere", "there is no folder nowhere"),
    ("compare --from .", "there is no result of a finished run"),
])
def test_what_cannot_be_compared_is_said(line, sentence, own, capsys):
    assert sentence in refused(capsys, *line.split())


# --- The table ---


def a_result(encoding: str, seed: int, scores: dict[int, float], parameters: int = 1000, **config) -> dict:
    return {
        "config": {"task": {"name": "copy"}, "encoding": encoding, "max_length": 10, "seed": seed, "steps": 5,
                   "preset": "quick", **config},
        "parameters": parameters, "cost": {"steps_per_second": 10.0 + seed, "peak_memory": 2**20 * (seed + 1)},
        "final": {"step": 5, "test": {str(length): {"exact": exact, "examples": 200, "interval": [0.0, 1.0]}
                                      for length, exact in scores.items()}},
    }


RESULTS = [
    *(a_result("nope", seed, {10: 1.0, 20: exact}) for seed, exact in enumerate((0.25, 0.75))),
    a_result("prism", 0, {10: 0.9, 20: 0.8}, 1050),
    a_result("learned", 0, {10: 1.0}, 1300),
    a_result("abacus", 0, {10: 1.0, 20: 0.8}),
    a_result("nope", 0, {10: 0.5}, architecture="lstm"),
    a_result("rope", 0, {10: 1.0, 20: 1.0}, steps=6),
]


def test_the_table_has_mean_spread_and_cost_best_reach_first():
    one, other = comparisons(RESULTS)
    assert (one.steps, other.steps) == (5, 6)  # another budget is another table
    assert [contender.name for contender in one.contenders] == ["abacus", "prism", "nope", "learned", "lstm"]
    text = as_text(one)
    assert re.search(r"^nope +- +1,000 +10\.5 +2 MiB +2 +100 +50\.0 25-75$", text, re.M)
    assert re.search(r"^abacus +digits +1,000 ", text, re.M)
    assert re.search(r"^learned +- +1,300 ! .* 100 +-$", text, re.M)  # too many parameters, and refuses length 20
    assert "more than 10% off the 1,050 parameters" in text
    page = as_markdown(one, "figure.png")
    assert "| nope | - | 1,000 | 10.5 | 2 MiB | 2 | 100.0 | 50.0 (25.0 - 75.0) |" in page
    assert "80.0 (73.9 - 85.0)" in page  # one seed: the interval of its examples


def test_methods_apart_have_a_table_of_their_own_that_says_what_they_are_told(own, capsys):
    command = ["separate", "copy", "--steps", "2", "--lengths", "2", "--seeds", "2", "--out", "apart"]
    code, out, _ = prism_says(capsys, *command)
    assert code == 0
    assert re.search(r"^\| looped \| 104,256 \| 2 \| 0\.0 \|$", out, re.M)
    assert "looped is told how many tokens the answer has" in out
    assert "step" not in prism_says(capsys, *command)[1]  # nothing is trained twice
    assert sorted(path.name for path in (own / "apart/copy-10-quick").iterdir()) == [
        "looped-seed0.json", "looped-seed1.json"]
    assert "looped is defined for copy and reverse; got stack" in refused(capsys, "separate", "stack")
    assert "did you mean 'looped'" in refused(capsys, "separate", "copy", "--methods", "loped")


def test_a_length_that_is_refused_counts_as_wrong_in_the_ranking():
    far, near = {10: 1.0, 15: 0.9, 40: 0.5, 100: 0.2}, {10: 1.0, 15: 0.99}
    (one,) = comparisons([a_result("learned", 0, near), a_result("rope", 0, far)])
    assert [contender.name for contender in one.contenders] == ["rope", "learned"]


def test_terms_of_ones_own_and_foresight_are_marked():
    own = a_result("rope", 0, {10: 1.0, 20: 0.5}, batch_size=7)
    others = [a_result(name, 0, {10: 1.0, 20: 0.1}) for name in ("nope", "alibi", "rope_ntk")]
    (one,) = comparisons([own, *others])
    text = as_text(one)
    assert re.search(r"^rope ~ ", text, re.M)
    assert "rope was trained on terms of its own: batch_size" in text
    assert re.search(r"^rope_ntk +length ", text, re.M)
    assert "nope ~" not in text


def test_a_result_from_before_an_option_existed_is_the_same_model(tmp_path):
    kept = sorted((Path(__file__).parents[1] / "results/laptop/copy-10").glob("sinusoidal-seed[01].json"))
    results = [json.loads(path.read_text()) for path in kept]
    results[1]["config"]["architecture"] = "transformer"
    assert [len(runs) for runs in models_of(results).values()] == [2]


@pytest.mark.parametrize("models", [2, 12])
def test_few_models_are_curves_and_many_a_map(models, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("prism.compare.table.save_figure", lambda figure, *_: drawn.append(figure) or [tmp_path / "x"])
    names = sorted(all_encodings())[:models]
    (one,) = comparisons([a_result(name, 0, {10: 1.0, 20: 0.5}) for name in names])
    draw(one, tmp_path)
    assert bool(drawn[0].axes[0].images) == (models > 8)


def test_results_are_found_in_folders_of_any_depth(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/result.json").write_text(json.dumps(RESULTS[0]))
    (tmp_path / "a/config.json").write_text("{}")
    (tmp_path / "other.json").write_text(json.dumps(RESULTS[2]))
    assert len(results_under(tmp_path)) == 2


def test_a_comparisons_runs_are_ordinary_runs(tmp_path):
    asked = Grid(find_task("copy")(), 2, "quick", ("nope",), (), 1, tmp_path, 4, (1, 2))
    (cell,) = asked.cells()
    result = train_cell(cell, asked.places, "cpu")
    assert asked.places.result(cell).is_file()
    assert isinstance(asked.places, InRunFolders)
    assert result["cost"]["steps_per_second"] > 0
    assert result["cost"]["peak_memory"] > 2**20
