"""Whatever is wrong with a command: one clear sentence, exit code 2 or 1, nothing half-written, no traceback."""

import builtins
import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import prism.train
from prism.cli import main
from prism.config import RunConfig
from prism.errors import RunError
from prism.runs import RunFolder
from prism.train import train
from tests.saved_steps import unprivileged
from tests.small import prepared, prism_says, refused, small_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run, and one that has no checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    train(small_config("addition", "nope", steps=10), folder / "nope")
    prepared(folder / "unstarted", small_config("addition"))
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


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize(("line", "sentence"), [
    ("trian", "unknown command 'trian'; did you mean 'train'?"),
    ("train", "needs a task first"),
    ("train --steps 5", "needs a task first"),
    ("train cpoy", "unknown task 'cpoy'; did you mean 'copy'?"),
    ("train copy --encoding prsm", "unknown encoding 'prsm'; did you mean 'prism'?"),
    ("train copy --preset papr", "unknown preset 'papr'; did you mean 'paper'?"),
    ("train copy --max-length 0", "max_length must be at least 1"),
    ("train copy --max-length ten", "--max-length must be a whole number, got 'ten'"),
    ("train copy --max-length ²", "--max-length must be a whole number, got '²'"),
    ("train copy --seed=--5", "--seed must be a whole number"),
    ("train copy --seed -1", "seed must be at least 0"),
    ("train copy --steps 0", "steps must be at least 1"),
    ("train copy --model.vocabulary 5", "vocabulary must be at least 12"),
    ("train copy --device cuda:99", "--device must be cpu"),
    ("train copy --resume", "there is no run in"),
    ("train copy --resume --out nowhere", "nowhere is not a run folder"),
    ("train scan_cot --max-length 2", "scan_cot has no"),
    ("evaluate nowhere", "nowhere is not a run folder"),
    ("evaluate nowhere --lengths 10,x", "separated by commas; got 'x'"),
    ("evaluate nowhere --lengths 10,0", "separated by commas; got '0'"),
    ("evaluate nowhere --lengths -3", "separated by commas; got '-3'"),
    ("evaluate nowhere --lengths 1.5", "separated by commas; got '1.5'"),
    ("evaluate nowhere --lengths ²", "separated by commas; got '²'"),
    ("evaluate nowhere --lengths 99999999999999999999999", "separated by commas"),
    ("evaluate nowhere --examples 0", "--examples must be at least 1"),
    ("generate nowhere 1=", "nowhere is not a run folder"),
    ("figures", "needs at least one run folder"),
    ("figures nowhere --beside x", "--beside goes with --inside"),
    ("figures nowhere --length 5", "--length goes with --inside"),
    ("figures nowhere --inside --length 0", "--length must be from 1 to"),
    ("figures a b --inside", "--inside draws one run, got 2"),
    ("figures nowhere", "nowhere is not a run folder"),
    ("quickstart --steps 0", "steps must be at least 1"),
    ("quickstart --seed -1", "seed must be at least 0"),
])
def test_bad_input_is_one_sentence_and_leaves_nothing_behind(line, sentence, here, capsys):
    assert sentence in refused(capsys, *line.split())
    assert list(here.iterdir()) == []


@pytest.mark.usefixtures("_no_training")
@pytest.mark.parametrize(("line", "sentence"), [
    ("train copy --optimizer.rate nan", "rate must be a finite number"),
    ("train copy --optimizer.rate -1", "rate must be greater than 0"),
    ("train copy --optimizer.weight-decay inf", "weight_decay must be a finite number"),
    ("train copy --optimizer.rte 1", "--optimizer.rate"),
    ("train copy --steps 1.5", "--steps"),
    ("train copy --steps", "--steps"),
    ("train copy --optimizer.decay slow", "linear"),
    ("train copy reverse", "reverse"),
    ("tasks copy", "copy"),
    ("evaluate", "RUN"),
    ("evaluate a --step one", "--step"),
    ("generate a", "PROMPT"),
])
def test_bad_flags_are_explained_by_the_parser(line, sentence, here, capsys):
    code, out, err = prism_says(capsys, *line.split())
    assert (code, out) == (2, "")
    assert sentence in " ".join(err.replace("│", " ").split())
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(("prompt", "sentence"), [
    ("", "the prompt is empty"), ("  ", "the prompt is empty"),
    ("1+a=", "'a' at position 3 of '1+a=' is not a symbol of addition (its symbols: 0 1 2"),
    ("1+\udcff=", "at position 3"),
])
def test_a_prompt_of_other_symbols_is_refused(prompt, sentence, runs, capsys):
    assert sentence in refused(capsys, "generate", str(runs / "nope"), prompt)


def test_a_prompt_the_task_would_not_write_is_still_completed(runs, capsys):
    code, out, err = prism_says(capsys, "generate", str(runs / "nope"), "1+2", "--limit", "2")
    assert code == 0
    assert out.strip()
    assert err.startswith("(a prompt of addition is ")
    assert err.endswith("got '1+2')\n")


@pytest.mark.parametrize(("line", "sentence"), [
    ("evaluate {}/unstarted", "has no checkpoint yet"),
    ("generate {}/unstarted 1=", "has no checkpoint yet"),
    ("figures {}/unstarted", "is not finished"),
    ("evaluate {}/nope --step 3", "has no checkpoint of step 3; it has"),
    ("evaluate {}/nope --device tpu", "--device must be cpu"),
    ("generate {}/nope 1= --limit 0", "from 1 to"),
    ("train addition --out {}/nope", "already holds a run: continue it with --resume"),
    ("train copy --out {}/nope --resume", "is a run of addition, not of copy"),
    ("train addition --out {}/nope --resume --seed 4", "seed: 0 in the folder, 4 asked for"),
    ("train copy --out {}", "is not empty and not a run"),
    ("train copy --out {}/nope/config.json", "is a file, not a folder"),
    ("figures {}/nope/config.json", "is not the result of a run"),
    ("figures {}/nope/metrics.jsonl", "is not the result of a run"),
])
@pytest.mark.usefixtures("_no_training")
def test_the_wrong_folder_is_one_sentence(line, sentence, runs, capsys):
    def content():
        return {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.name != ".lock"}

    before = content()
    assert sentence in refused(capsys, *line.format(runs).split())
    assert content() == before


@pytest.mark.parametrize("content", ["{}", "[]", "3", "", "{", '{"config": {}, "final": {"test": {}}}', "[" * 5000])
def test_a_result_that_is_none_is_refused(content, here, capsys):
    (here / "result.json").write_text(content)
    assert "result" in refused(capsys, "figures", "result.json")


@pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
def test_a_damaged_checkpoint_is_named(damage, runs, tmp_path, capsys):
    run = shutil.copytree(runs / "nope", tmp_path / "run")
    newest = sorted(run.glob("checkpoints/*"))[-1]
    tensors = newest / "state.safetensors"
    content = bytearray(tensors.read_bytes())
    if damage == "gone":
        tensors.unlink()
    else:
        content[len(content) // 2] ^= 1
        tensors.write_bytes(content if damage == "flip" else content[:-9])
    step = str(int(newest.name.removeprefix("step-")))
    assert newest.name in refused(capsys, "evaluate", str(run), "--step", step, code=1)
    code, out, err = prism_says(capsys, "evaluate", str(run), "--lengths", "1", "--examples", "2")
    assert newest.name in err
    if len(list(run.glob("checkpoints/*"))) > 1:
        assert code == 0
        assert err.startswith("skipped the checkpoint")
        assert "step 7" in out
    else:
        assert code == 1


def test_a_folder_in_use_is_said_with_its_holder(runs, capsys):
    folder = runs / "unstarted"
    with RunFolder.create(folder, RunFolder.open(folder).config, resume=True):
        sentence = refused(capsys, "train", "addition", "--out", str(folder), "--resume")
    assert f"is in use by process {os.getpid()}" in sentence


def test_a_folder_that_cannot_be_written_is_said(tmp_path, capsys, runs):
    locked = tmp_path / "locked"
    locked.mkdir()
    tmp_path.chmod(0o755)
    locked.chmod(0o555)
    small = ["--steps", "1", "--model.width", "4", "--model.layers", "1"]
    with unprivileged():
        line = refused(capsys, "train", "copy", "--encoding", "nope", "--out", f"{locked}/run", *small, code=1)
    assert re.search(r"could not .*locked.*Permission denied", line)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
        line = refused(capsys, "figures", str(runs / "nope"), "--out", str(locked / "drawn"), code=1)
    assert re.search(r"could not create .*drawn: Permission denied", line)
    assert list(locked.iterdir()) == []


def test_work_that_fails_ends_with_one(here, capsys, monkeypatch):
    for error, sentence in [
        (RunError("the loss is nan at step 3"), "prism: the loss is nan at step 3"),
        (MemoryError(), "out of memory"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"), "pip install"),
    ]:
        def fail(*arguments, error=error, **more):
            raise error

        monkeypatch.setattr(prism.train, "train", fail)
        assert sentence in refused(capsys, "train", "copy", code=1)
    monkeypatch.setattr(prism.train, "train", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    assert refused(capsys, "train", "copy", code=130) == "prism: stopped"


def test_a_programming_error_keeps_its_traceback(here, monkeypatch):
    monkeypatch.setattr(prism.train, "train", lambda *_, **__: builtins.int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        main(["train", "copy"])


# --- Anything at all ---

FLAGS = (
    "--steps", "--seed", "--max-length", "--batch-size", "--encoding", "--preset", "--out", "--resume", "--no-resume",
    "--device", "--help", "--lengths", "--optimizer.rate", "--optimizer.betas", "--evaluation.lengths",
    "--curriculum.stages", "--model.width", "--positions.depths", "--positions.support", "--positions.gates",
)
WORDS = st.sampled_from(["copy", "prism", "nope", "paper", "1", "0", "-1", "nan", "1e9", "x", "None", "--", "=", ""])
WORD = WORDS | st.text(max_size=6) | st.integers().map(str) | st.floats().map(str)
FLAG = st.sampled_from(FLAGS)
ARGUMENT = FLAG | WORD | st.builds("{}={}".format, FLAG, WORD)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(verb=st.sampled_from(["train"] * 6 + ["evaluate", "generate", "figures", "tasks", ""]) | st.text(max_size=8),
       first=st.sampled_from(["copy", "scan_cot", "stack"]) | WORD, rest=st.lists(ARGUMENT, max_size=6))
@example(verb="train", first="copy", rest=["--seed", "9" * 5000])
@example(verb="train", first="copy", rest=["--steps", "9" * 5000])
@example(verb="train", first="copy", rest=["--max-length=1_0", "--out"])
@example(verb="evaluate", first="x", rest=["--lengths", "9" * 5000])
def test_no_words_whatever_give_a_traceback(verb, first, rest, capsys, tmp_path_factory):
    def reached(config, out, **more):
        assert RunConfig.from_json(config.to_json()) == config
        raise RunError("would train now")

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("argv"))
        patch.setattr(prism.train, "train", reached)
        code, out, err = prism_says(capsys, verb, first, *rest)
        assert code in (0, 1, 2)
        assert (out if code == 0 else err).strip()
        if code == 1:
            assert "would train now" in err
        assert list(Path().iterdir()) == []
