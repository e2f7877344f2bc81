"""A run that was killed, stopped or damaged goes on to the very bytes of one that was not.

PRISM_KILLS sets at how many random moments a training is killed.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prism.train
from prism.errors import Interrupted, RunError, UserError
from prism.progress import Progress
from prism.runs import RunFolder
from prism.train import train
from tests.saved_steps import needs_fork, warm_processes
from tests.small import ended, fingerprint, prepared, small_config, start_training, trained_to_end  # fmt: skip

KILLS = int(os.environ.get("PRISM_KILLS", "3"))
# A validation of its own at many steps, checkpoints between and on evaluations, shifts drawn at random.
CONFIGS = {
    "prism": small_config("reverse", "prism", {"copy_every": 2}, {"every": 5, "checkpoint_every": 3}, steps=33),
    "sinusoidal": small_config("addition", "sinusoidal", None, {"every": 5, "checkpoint_every": 4}, steps=33),
}
pytestmark = needs_fork


@pytest.fixture(scope="module")
def processes():
    """Processes of one thread each: bits are promised for one machine and one number of threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield warm_processes(patch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, processes):
    """The uninterrupted runs, and how long they took."""
    found = {}
    for name, config in CONFIGS.items():
        folder = prepared(tmp_path_factory.mktemp("whole") / name, config)
        began = time.monotonic()
        end = trained_to_end(processes, folder, config.task.name)
        assert end.code == 0, end.said
        found[name] = fingerprint(folder), time.monotonic() - began
    return found


def test_two_whole_runs_are_alike(whole, tmp_path, processes):
    config = CONFIGS["prism"]
    folder = prepared(tmp_path / "run", config)
    assert trained_to_end(processes, folder, config.task.name).code == 0
    assert fingerprint(folder) == whole["prism"][0]


@pytest.mark.parametrize("number", range(KILLS))
def test_a_run_killed_at_a_random_moment_resumes_to_the_same_bytes(number, whole, tmp_path, processes):
    name = list(CONFIGS)[number % len(CONFIGS)]
    config, (wanted, seconds) = CONFIGS[name], whole[name]
    folder = prepared(tmp_path / "run", config)
    moment = random.uniform(0, seconds)
    process = start_training(processes, folder, config.task.name)
    time.sleep(moment)
    process.kill()
    process.join()
    where = RunFolder.open(folder).checkpoint_steps()
    end = trained_to_end(processes, folder, config.task.name)
    assert end.code == 0, end.said
    assert fingerprint(folder) == wanted, f"killed after {moment:.3f} s of {seconds:.3f} s, with checkpoints {where}"


# A method of the run folder, and which of its calls is the run's last.
FATAL = [("append_evaluation", 1), ("append_evaluation", 2), ("save_checkpoint", 1), ("save_checkpoint", 3),
         ("append_metrics", 0), ("write_result", 0), ("truncate", 0)]  # fmt: skip


@pytest.mark.parametrize(("place", "fatal"), FATAL)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_dies_around_any_write_resumes_to_the_same_bytes(place, fatal, when, tmp_path, monkeypatch):
    """In this process: what is written later than the death is as gone as after a kill."""
    config = small_config("copy", "sinusoidal", None, {"every": 5, "checkpoint_every": 4, "lengths": (2,)}, steps=12)
    train(config, tmp_path / "whole")
    wanted = fingerprint(tmp_path / "whole")
    real, turns = getattr(RunFolder, place), iter(range(99))

    def dying(self, *arguments, **more):
        mortal = next(turns) == fatal
        if mortal and when == "before":
            raise KeyboardInterrupt
        real(self, *arguments, **more)
        if mortal:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, place, dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run")
    monkeypatch.undo()
    train(config, tmp_path / "run", resume=True)
    assert fingerprint(tmp_path / "run") == wanted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(number, whole, tmp_path, processes):
    config, (wanted, _) = CONFIGS["prism"], whole["prism"]
    folder = prepared(tmp_path / "a run", config)
    process = start_training(processes, folder, config.task.name)
    while not RunFolder.open(folder).metrics():  # the tenth step is done
        assert process.is_alive()
        time.sleep(0.005)
    os.kill(process.pid, number)
    end = ended(process, folder)
    assert end.code == 128 + number, end.said
    stopped = re.search(rf"stopped by {number.name} after step (\d+); all of it is saved", end.said)
    assert stopped, end.said
    assert RunFolder.open(folder).checkpoint_steps()[-1] == int(stopped[1])
    assert f"prism train reverse --out '{folder}' --resume" in end.said
    assert "Traceback" not in end.said
    assert trained_to_end(processes, folder, config.task.name).code == 0
    assert fingerprint(folder) == wanted


def test_a_signal_in_this_process_stops_after_its_step_and_the_old_handler_is_back(tmp_path, monkeypatch):
    config, before, steps = small_config("copy", "nope"), signal.getsignal(signal.SIGTERM), []

    def stopped_at_the_fourth(self, made):
        steps.append(self.standing.step)
        if len(steps) == 4:
            signal.raise_signal(signal.SIGTERM)
        return real(self, made)

    real = prism.train._Training._step
    monkeypatch.setattr(prism.train._Training, "_step", stopped_at_the_fourth)
    with pytest.raises(Interrupted, match="stopped by SIGTERM after step 4") as stop:
        train(config, tmp_path / "run")
    assert (stop.value.signal, stop.value.step, steps) == (signal.SIGTERM, 4, [0, 1, 2, 3])
    assert signal.getsignal(signal.SIGTERM) is before
    assert RunFolder.open(tmp_path / "run").checkpoint_steps() == [4]


def test_a_signal_that_comes_while_saving_ends_the_next_step(tmp_path, monkeypatch):
    """What is said to be saved is saved, whenever the signal came."""
    real = RunFolder.save_checkpoint

    def struck(self, step, *arguments, **more):
        real(self, step, *arguments, **more)
        if step == 7 and not struck.already:
            struck.already = True
            signal.raise_signal(signal.SIGTERM)

    struck.already = False  # a second signal would be final
    monkeypatch.setattr(RunFolder, "save_checkpoint", struck)
    with pytest.raises(Interrupted) as stop:
        train(small_config("copy", "nope"), tmp_path / "run")
    assert stop.value.step == RunFolder.open(tmp_path / "run").checkpoint_steps()[-1] == 8


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_used(damage, whole, tmp_path, processes):
    config, (wanted, _) = CONFIGS["sinusoidal"], whole["sinusoidal"]
    folder = prepared(tmp_path / "run", config)
    process = start_training(processes, folder, config.task.name)
    while len(RunFolder.open(folder).checkpoint_steps()) < 2:
        assert process.is_alive()
        time.sleep(0.005)
    process.kill()
    process.join()
    steps = RunFolder.open(folder).checkpoint_steps()
    broken = folder / "checkpoints" / f"step-{steps[-1]:08d}"
    content = bytearray((broken / "state.safetensors").read_bytes())
    if damage == "flip":
        place = random.randrange(8 * len(content))
        content[place // 8] ^= 1 << place % 8
    else:
        del content[random.randrange(len(content)) :]
    (broken / "state.safetensors").write_bytes(content)
    end = trained_to_end(processes, folder, config.task.name)
    assert end.code == 0, end.said
    assert f"skipped the checkpoint {broken}" in end.said
    assert f"going on from step {steps[-2]:,}" in end.said
    assert fingerprint(folder) == wanted


class Notes(Progress):
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, sentence: str) -> None:
        self.said.append(sentence)


def test_no_sound_checkpoint_at_all_is_one_sentence(tmp_path):
    config = small_config("copy", "nope", steps=10)
    train(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    for path in tmp_path.glob("run/checkpoints/*/state.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"no usable checkpoint in .*step-00000010"):
        train(config, tmp_path / "run", resume=True)


def test_a_damaged_best_checkpoint_does_not_cost_the_run(tmp_path, monkeypatch):
    """The best is an extra: without its weights the run still ends, and says what is missing."""
    real = prism.train.sweep

    def worse_and_worse(model, task, lengths, examples, stream="test", **more):
        found = real(model, task, lengths, examples, stream, **more)
        worse_and_worse.turn += 1
        return {name: type(one)(100, 100 - worse_and_worse.turn, one.loss) for name, one in found.items()}

    worse_and_worse.turn = 0
    monkeypatch.setattr(prism.train, "sweep", worse_and_worse)
    config = small_config("copy", "nope")
    train(config, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "run" / "checkpoints" / "step-00000010" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    notes = Notes()
    result = train(config, tmp_path / "run", resume=True, progress=notes)
    (sentence,) = notes.said
    assert "refused the checkpoint" in sentence
    assert "step-00000010" in sentence
    assert result["best"] == {"step": 10, "test": result["history"][0]["test"]}
    assert result["final"]["step"] == 24


@pytest.mark.parametrize(("change", "sentence"), [
    ({"seed": 1}, "seed: 0 in the folder, 1 asked for"),
    ({"steps": 48}, "steps: 24 in the folder, 48 asked for"),
    ({"evaluation": {"every": 3}}, "evaluation.every: 10 in the folder, 3 asked for"),
    ({"options": {"gamma_start": 3.5}}, "positions.gamma_start: 2 in the folder, 3.5 asked for"),
])
def test_a_resume_with_another_setting_is_refused_by_name(tmp_path, change, sentence):
    prepared(tmp_path / "run", small_config())
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(UserError, match=re.escape(sentence)):
        train(small_config(**change), tmp_path / "run", resume=True)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_second_run_in_one_folder_is_turned_away(tmp_path):
    """From outside, as a user would."""
    folder = prepared(tmp_path / "run", small_config())
    command = [sys.executable, "-m", "prism", "train", "copy", "--out", str(folder), "--resume"]
    with RunFolder.create(folder, small_config().to_json(), resume=True):
        end = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1])
    assert end.returncode == 2
    assert end.stdout == ""
    (line,) = end.stderr.splitlines()
    assert f"{folder} is in use by process {os.getpid()}" in line
    assert not (folder / "metrics.jsonl").exists()
