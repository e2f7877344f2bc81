"""The promises of prism/runs.py: one writer, records a kill cannot spoil, and a resume that asks for the same run."""

import errno
import os
import platform
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prism import checkpoints, disk
from prism.errors import RunError, UserError
from prism.runs import RunFolder, config_hash
from tests.saved_steps import assert_is, tensors_of

CONFIG = {"task": "copy", "model": {"width": 192, "heads": [7, 7]}, "lr": 5e-4, "seed": None}


@pytest.fixture
def run(tmp_path):
    with RunFolder.create(tmp_path / "run", CONFIG) as folder:
        yield folder


def filled(run: RunFolder, *steps: int) -> RunFolder:
    for step in steps:
        run.append_metrics({"step": step, "loss": 1 / (step + 1)})
        run.append_timing({"step": step, "seconds": 0.5})
        run.append_evaluation({"step": step, "exact": 1.0})
        run.save_checkpoint(step, tensors_of(step), {"step": step})
    return run


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# --- Opening ---


def test_a_run_comes_back_as_it_was_written(run):
    filled(run, 10, 20)
    run.write_result({"exact": 0.5})
    seen = RunFolder.open(run.path)  # while the writer holds the lock
    assert seen.config == CONFIG
    assert seen.metrics() == [{"step": 10, "loss": 1 / 11}, {"step": 20, "loss": 1 / 21}]
    assert seen.timings() == [{"step": 10, "seconds": 0.5}, {"step": 20, "seconds": 0.5}]
    assert [record["step"] for record in seen.evaluations()] == [10, 20]
    assert seen.checkpoint_steps() == [10, 20]
    assert_is(seen.load_checkpoint(), 20)
    assert_is(seen.load_checkpoint(10), 10)
    assert seen.result() == {"exact": 0.5}
    run.close()
    assert names(run.path) == [".lock", "checkpoints", "config.json", "environment.json", "evaluations.jsonl",
                               "metrics.jsonl", "result.json", "timing.jsonl"]  # fmt: skip


def test_a_fresh_run_is_empty(run):
    assert (run.metrics(), run.timings(), run.evaluations(), run.checkpoint_steps()) == ([], [], [], [])
    assert run.result() is None


def test_only_the_writer_writes(run):
    for reader in (RunFolder.open(run.path), run):
        if reader is run:
            run.close()
        for write in (reader.append_metrics, reader.append_timing, reader.append_evaluation, reader.write_result):
            with pytest.raises(RunError, match="for reading only"):
                write({"step": 1})
        with pytest.raises(RunError, match="for reading only"):
            reader.save_checkpoint(1, {}, {})
        with pytest.raises(RunError, match="for reading only"):
            reader.truncate(1)


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "foreign"])
def test_what_is_not_a_run_is_said_in_one_sentence_and_left_alone(tmp_path, kind):
    path = tmp_path / "thesis"
    if kind == "file":
        path.write_text("chapter 1")
    elif kind != "missing":
        path.mkdir()
    if kind == "foreign":
        (path / "chapter.tex").write_text("chapter 1")
    with pytest.raises(UserError, match="thesis is not a run folder") as caught:
        RunFolder.open(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="file, not a folder" if kind == "file" else "no run in .* to resume"):
        RunFolder.create(path, CONFIG, resume=True)
    if kind in ("file", "foreign"):
        with pytest.raises(UserError, match="file, not a folder" if kind == "file" else r"holds 'chapter\.tex'"):
            RunFolder.create(path, CONFIG)
    assert names(tmp_path) == ([] if kind == "missing" else ["thesis"])
    assert kind != "foreign" or names(path) == ["chapter.tex"]


def test_an_existing_run_asks_for_resume(run):
    run.close()
    with pytest.raises(UserError, match=r"already holds a run: continue it with --resume, or choose another --out"):
        RunFolder.create(run.path, CONFIG)
    with RunFolder.create(run.path, CONFIG, resume=True) as again:
        assert again.config == CONFIG


def test_a_start_killed_before_it_was_a_run_can_be_started_again(tmp_path):
    (tmp_path / ".lock").write_text("1\n")
    (tmp_path / ".tmp-4194305-config.json").write_text("{")
    with RunFolder.create(tmp_path, CONFIG):
        assert ".tmp-4194305-config.json" not in names(tmp_path)


def test_a_resume_clears_what_a_killed_save_left(run):
    filled(run, 10)
    run.close()
    (run.path / "checkpoints/.tmp-4194305-20").mkdir()
    with RunFolder.create(run.path, CONFIG, resume=True) as again:
        assert names(again.path / "checkpoints") == ["step-00000010"]


def test_a_resume_of_another_run_names_every_difference(run):
    run.close()
    other = {"task": "copy", "model": {"width": 5, "heads": [7, 8]}, "lr": 5e-4, "new": {"deep": True}}
    with pytest.raises(UserError) as caught:
        RunFolder.create(run.path, other, resume=True)
    text = str(caught.value)
    for difference in ("model.width: 192 in the folder, 5 asked for", "new.deep: nothing in the folder, true asked for",
                       "model.heads: [7, 7] in the folder, [7, 8] asked for",
                       "seed: null in the folder, nothing asked for"):  # fmt: skip
        assert difference in text
    assert "task" not in text
    assert "lr" not in text
    assert RunFolder.open(run.path).config == CONFIG
    RunFolder.create(run.path, {**CONFIG, "model": {"heads": (7, 7), "width": 192.0}}, resume=True).close()


def test_the_hash_of_a_config_knows_values_not_their_order():
    assert config_hash({"a": 1, "b": {"c": 2, "d": [3]}}) == config_hash({"b": {"d": (3,), "c": 2.0}, "a": 1})
    assert len({config_hash({"a": value}) for value in (1, 2, True, "1", None, 1.5, [1], {"a": 1})}) == 8
    assert config_hash({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_fewer_than_two_checkpoints_are_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="at least 2"):
        RunFolder.create(tmp_path / "run", CONFIG, keep=1)
    assert names(tmp_path) == []


def test_keep_and_pins_reach_the_checkpoints(tmp_path):
    with RunFolder.create(tmp_path, CONFIG, keep=3) as run:
        for step in range(10, 70, 10):
            run.save_checkpoint(step, {}, {}, pins=[10])
        assert run.checkpoint_steps() == [10, 40, 50, 60]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"a": NaN}', '{"a": 1, "a": 2}', "\x00"])
@pytest.mark.parametrize("name", ["config.json", "result.json"])
def test_a_damaged_file_is_named(run, name, damage):
    run.close()
    (run.path / name).write_text(damage)
    with pytest.raises(RunError, match=re.escape(str(run.path / name)) + " is damaged"):
        RunFolder.open(run.path).result()


def test_the_environment_tells_versions_and_no_secrets(run, monkeypatch):
    run.close()
    monkeypatch.setattr(platform, "node", lambda: "secret-machine")
    monkeypatch.setattr(socket, "gethostname", platform.node)
    RunFolder.create(run.path, CONFIG, resume=True).close()
    stored = RunFolder.open(run.path).environment()
    assert stored["python"] == sys.version.split()[0]
    assert stored["torch"] == torch.__version__
    assert {"numpy", "prism", "cpu", "gpus", "cores", "threads", "commit", "dirty", "date"} <= stored.keys()
    assert [later["torch"] for later in stored["resumed"]] == [torch.__version__]
    text = (run.path / "environment.json").read_text()
    assert "secret-machine" not in text
    assert str(Path.home()) not in text
    assert str(Path(__file__).parents[1]) not in text


def test_code_without_a_repository_may_be_told_its_commit(tmp_path, monkeypatch):
    from prism.environment import _commit

    (tmp_path / "environment.py").touch()
    monkeypatch.delenv("PRISM_COMMIT", raising=False)
    assert _commit(tmp_path) == {"commit": None, "dirty": None}
    monkeypatch.setenv("PRISM_COMMIT", "0123abc")
    assert _commit(tmp_path) == {"commit": "0123abc", "dirty": None}


def test_listing_runs_does_not_wait_for_torch(run):
    code = f"""import sys; from prism.runs import RunFolder
assert RunFolder.open({str(run.path)!r}).checkpoint_steps() == []
assert "torch" not in sys.modules"""
    source = str(Path(checkpoints.__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})


# --- Records ---


@pytest.mark.parametrize("record", [{"loss": 1.0}, {"step": 1.0}, {"step": True}, {"step": -1}])
def test_a_record_has_a_step(run, record):
    with pytest.raises(RunError, match=r"metrics\.jsonl needs a step"):
        run.append_metrics(record)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"deep": [1, float("-inf")]}, torch.ones(1), {1: 2}])
def test_what_json_cannot_hold_is_refused_by_name(run, value):
    with pytest.raises(RunError, match=r"metrics\.jsonl, step 3, loss"):
        run.append_metrics({"step": 3, "loss": value})
    with pytest.raises(RunError, match=r"result\.json, loss"):
        run.write_result({"loss": value})
    assert run.metrics() == []
    assert run.result() is None


@pytest.mark.parametrize("tail", ['{"step": 3', '{"step": 3}', "\x00\x00"])
def test_a_torn_last_line_never_counts(run, tail):
    filled(run, 1, 2)
    run.close()
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(tail)
    assert [record["step"] for record in RunFolder.open(run.path).metrics()] == [1, 2]
    with RunFolder.create(run.path, CONFIG, resume=True) as again:
        again.append_metrics({"step": 3, "loss": 0.0})
        assert [record["step"] for record in again.metrics()] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1}', '{"step": NaN}', '{"step": "1"}', ""])
def test_a_damaged_line_is_named(run, line):
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged"):
        run.metrics()
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2 is damaged"):
        run.truncate(1)


def test_truncate_takes_the_whole_run_back(run):
    filled(run, 1)
    after_one = {name: (run.path / f"{name}.jsonl").read_bytes() for name in ("metrics", "timing", "evaluations")}
    filled(run, 2)
    run.append_metrics({"step": 3, "loss": 0.0})
    run.write_result({"exact": 1.0})
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    run.truncate(1)
    assert {name: (run.path / f"{name}.jsonl").read_bytes() for name in after_one} == after_one
    assert run.checkpoint_steps() == [1]
    assert run.result() is None
    filled(run, 2)
    assert [record["step"] for record in run.metrics()] == [1, 2]


def test_a_full_disk_leaves_whole_lines_and_the_old_result(run, monkeypatch):
    filled(run, 1)
    run.write_result({"exact": 0.1})
    real, calls = os.write, []

    def write(descriptor, data):
        calls.append(len(data))
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        with pytest.raises(RunError, match=r"metrics\.jsonl \(\d+ bytes needed\): No space left"):
            run.append_metrics({"step": 2, "loss": 1.0})
        run.append_timing({"step": 2, "short": "writes are finished"})
    assert len(calls) > 5
    run.append_metrics({"step": 3})
    assert [record["step"] for record in run.metrics()] == [1, 3]
    assert run.timings()[-1]["short"] == "writes are finished"
    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "fsync", lambda descriptor: os.stat("/nowhere"))
        with pytest.raises(RunError, match=r"result\.json \(\d+ bytes needed\): No such file"):
            run.write_result({"exact": 0.2})
    assert run.result() == {"exact": 0.1}
    assert not list(run.path.glob(".tmp-*"))
