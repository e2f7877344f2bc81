"""The command line as a user meets it: help, defaults, and results."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import prism.figures
import prism.quickstart
import prism.train
from prism.cli import VERBS
from prism.config import RunConfig
from prism.errors import Interrupted
from prism.runs import RunFolder
from prism.tasks import all_tasks
from prism.train import train
from tests.small import prism_says, small_config

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two finished runs."""
    folder = tmp_path_factory.mktemp("runs")
    for encoding in ("nope", "sinusoidal"):
        train(small_config("addition", encoding, steps=10), folder / encoding)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def _no_training(monkeypatch):
    def refuse(*arguments, **more):
        raise AssertionError("nothing here should train")

    monkeypatch.setattr(prism.train, "_Training", refuse)


# --- Help ---


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself_with_defaults_and_an_example(verb, capsys):
    code, out, _ = prism_says(capsys, verb, "--help")
    assert code == 0
    assert f"Example: prism {verb}" in out
    if verb not in ("tasks", "encodings"):
        assert "(default:" in out


def test_the_help_of_train_shows_the_values_of_the_preset_named(capsys):
    _, out, _ = prism_says(capsys, "train", "reverse", "--preset", "paper", "--help")
    frameless = " ".join(out.replace("│", " ").split())
    for flag, default in {"--batch-size": 100, "--max-length": 40, "--positions.pe-width": 340}.items():
        _, _, rest = frameless.partition(f"{flag} INT")
        assert re.search(r"\(default: (\d+)\)", rest)[1] == str(default)
    assert "--positions.shift" in prism_says(capsys, "train", "copy", "--encoding", "sinusoidal", "--help")[1]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_prism_alone_lists_its_commands(arguments, capsys):
    code, out, _ = prism_says(capsys, *arguments)
    assert code == 0
    assert all(re.search(rf"^  {verb} +\S", out, re.M) for verb in VERBS)


def test_lists_name_every_task_and_encoding(capsys):
    code, out, _ = prism_says(capsys, "tasks")
    assert code == 0
    assert all(re.search(rf"^{name} ", out, re.M) for name in all_tasks())
    code, out, _ = prism_says(capsys, "encodings")
    assert code == 0
    assert all(re.search(rf"^{name} ", out, re.M) for name in ("prism", "sinusoidal", "nope"))


def outside(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "prism", *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, **environment},
    )


def test_python_m_prism_is_the_same_command():
    end = outside("tasks", PYTHONIOENCODING="ascii")  # the arrow of addition is not in this terminal's alphabet
    assert (end.returncode, end.stderr) == (0, "")
    assert "8349216=8349216." in end.stdout
    end = outside("trian")
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr.startswith("prism: unknown command 'trian'; did you mean 'train'?")


def test_torch_is_not_waited_for_where_it_is_not_needed():
    end = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "prism", "tasks"], capture_output=True, text=True, cwd=ROOT,
        timeout=120,
    )  # fmt: skip
    assert end.returncode == 0
    assert "| torch" not in end.stderr


# --- What works ---


def test_train_evaluate_generate_and_draw(here, capsys):
    line = """train copy --encoding nope --max-length 2 --seed 3 --steps 12 --batch-size 4
        --model.width 16 --model.layers 1 --model.heads 2 --model.head-width 8
        --evaluation.lengths 2 4 --evaluation.final-examples 5 --evaluation.every 5"""
    code, out, err = prism_says(capsys, *line.split())
    assert (code, err) == (0, "")
    folder = "runs/copy-nope-quick-2-seed3"
    assert f"run folder: {folder}" in out
    assert "exact match in %, by test length" in out
    config = RunConfig.from_json(RunFolder.open(folder).config)
    assert (config.model.width, config.steps, config.seed, config.max_length) == (16, 12, 3, 2)

    code, out, err = prism_says(capsys, "evaluate", folder, "--lengths", "1,3", "--examples", "7")
    assert (code, err) == (0, "")
    assert re.findall(r"^ +(\d+) +[\d.]+ +[\d.]+ - +[\d.]+ +(\d+)$", out, re.M) == [("1", "7"), ("3", "7")]

    code, out, err = prism_says(capsys, "generate", folder, "12=", "--limit", "3")
    assert code == 0
    assert out.count("\n") == 1
    assert err.startswith(("right", "wrong; right would be\n12."))

    code, out, _ = prism_says(capsys, "figures", folder, "--out", "drawn")
    assert code == 0
    assert out.startswith("copy, trained up to 2: exact match in %")
    assert re.search(r"^nope, seed 3 +[\d.]+ \([\d.]+-\d+\) +[\d.]+ \([\d.]+-\d+\)$", out, re.M)
    assert out.splitlines()[-3:] == ["drawn/copy-2.png", "drawn/copy-2.pdf", ""]
    assert Path("drawn/copy-2.png").read_bytes().startswith(PNG)
    assert Path("drawn/copy-2.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.usefixtures("_no_training")
def test_a_finished_run_is_shown_and_not_trained(runs, capsys):
    before = {path: path.stat().st_mtime_ns for path in runs.glob("nope/*.jsonl")}
    code, out, _ = prism_says(capsys, "train", "addition", "--out", str(runs / "nope"), "--resume")
    assert code == 0
    assert "best on validation" in out
    assert {path: path.stat().st_mtime_ns for path in runs.glob("nope/*.jsonl")} == before


@pytest.mark.usefixtures("_no_training")
def test_figures_read_runs_and_results_and_give_the_same_bytes(runs, here, capsys):
    shutil.copy(runs / "nope" / "result.json", here / "kept.json")
    paths = [str(here / "kept.json"), str(runs / "sinusoidal")]
    code, out, _ = prism_says(capsys, "figures", *paths, "--out", "a")
    assert code == 0
    assert prism_says(capsys, "figures", *paths, "--out", "b")[0] == 0
    drawn = [line for line in out.splitlines() if line.startswith("a/")]
    assert len(drawn) == 2
    for line in drawn:
        assert Path(line).read_bytes() == Path(line.replace("a/", "b/", 1)).read_bytes()
    for run in ("nope", "sinusoidal"):
        assert re.search(rf"^{run}, seed \d+ ", out, re.M)


def test_a_curve_is_one_model_and_a_band_its_seeds(runs):
    def result(seed, encoding="nope", **changes):
        config = {**json.loads((runs / "nope" / "config.json").read_text()), "seed": seed, "encoding": encoding}
        score = {"exact": 0.5, "interval": [0.4, 0.6]}
        return {"config": {**config, **changes}, "final": {"test": {"2": score, "20": score}}}

    given_twice = [result(0), result(0), result(1), result(0, preset="best"), result(0, "sinusoidal")]
    axes = prism.figures.extrapolation(prism.figures.models_of(given_twice)).axes[0]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        "NoPE (2 seeds: mean, range)", "NoPE, best (1 seed, 95 % interval)",
        "sinusoidal APE (1 seed, 95 % interval)",
    ]
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [list(line.get_xdata()) for line in dashed] == [[3, 3]]


def test_quickstart_trains_both_draws_and_says_what_next(here, capsys, monkeypatch):
    def tiny(encoding, seed, steps=None):
        lengths = {"lengths": prism.quickstart.LENGTHS[:3], "final_examples": 3}
        return small_config("copy", encoding, {"gates": "local"} if encoding == "prism" else {}, lengths,
                            steps=steps or 4, seed=seed)  # fmt: skip

    monkeypatch.setattr(prism.quickstart, "quickstart_config", tiny)
    monkeypatch.setattr(prism.quickstart, "LENGTHS", prism.quickstart.LENGTHS[:3])
    code, out, err = prism_says(capsys, "quickstart", "--seed", "1", "--out", "q")
    assert (code, err) == (0, "")
    assert re.search(r"^prism +[\d.]+ \(", out, re.M)
    assert re.search(r"^sinusoidal +[\d.]+ \(", out, re.M)
    assert "try next" in out
    (picture,) = Path("q").glob("*.png")
    assert picture.read_bytes().startswith(PNG)
    monkeypatch.setattr(prism.train, "_Training", None)
    assert prism_says(capsys, "quickstart", "--seed", "1", "--out", "q")[0] == 0  # nothing is trained twice


@pytest.mark.parametrize(("line", "again"), [
    ("train copy --out 'a run' --threads 1", "prism train copy --out 'a run' --resume --threads 1"),
    ("quickstart --seed 2 --steps 7 --out 'a run'", "prism quickstart --seed 2 --steps 7 --out 'a run'"),
])  # fmt: skip
def test_a_stopped_command_says_how_to_go_on(line, again, here, capsys, monkeypatch):
    def stopped(*arguments, **more):
        raise Interrupted(15, 4)

    monkeypatch.setattr(prism.train, "train", stopped)
    monkeypatch.setattr(prism.quickstart, "train", stopped)
    code, _, err = prism_says(capsys, *shlex.split(line))
    assert code == 128 + 15
    said, command = err.splitlines()
    assert "stopped by SIGTERM after step 4; all of it is saved" in said
    assert command == f"go on with:  {again}"
