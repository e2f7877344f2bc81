"""Two processes on one folder, folders nobody may write, and kills: exactly one writer, and a resume bit for bit.

PRISM_KILLS sets the number of races and of kills.
"""

import json
import os
import random
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch

from prism.errors import RunError, UserError
from prism.runs import RunFolder
from tests.saved_steps import needs_fork, unprivileged, warm_processes

CONFIG = {"task": "copy", "model": {"width": 192, "heads": [7, 7]}, "lr": 5e-4, "seed": None}
ROUNDS = int(os.environ.get("PRISM_KILLS", "6"))


@needs_fork
def test_a_read_only_place_is_named():
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o555)
        with unprivileged(), pytest.raises(RunError, match=re.escape(f"could not create {place / 'run'}: Permission")):
            RunFolder.create(place / "run", CONFIG)
        (place / "old").mkdir()
        with unprivileged(), pytest.raises(RunError, match=r"could not lock .*old.*: Permission"):
            RunFolder.create(place / "old", CONFIG)
    finally:
        place.chmod(0o755)
        shutil.rmtree(place)


# --- Two processes, one folder ---


def test_the_second_opener_learns_who_holds_the_run(tmp_path):
    run = RunFolder.create(tmp_path, CONFIG)
    for resume in (False, True):
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}:"):
            RunFolder.create(run.path, CONFIG, resume=resume)
    run.close()
    RunFolder.create(run.path, CONFIG, resume=True).close()


def test_a_refused_opener_lets_go_of_the_lock(tmp_path):
    RunFolder.create(tmp_path, CONFIG).close()
    for _ in range(2):
        with pytest.raises(UserError, match="another configuration"):
            RunFolder.create(tmp_path, {}, resume=True)


def _race(path: Path, resume: bool, start, finish, answers) -> None:
    start.wait()
    try:
        with RunFolder.create(path, CONFIG, resume=resume):
            answers.put((os.getpid(), None))
            finish.wait()
    except UserError as error:
        answers.put((os.getpid(), str(error)))
        finish.wait()


@needs_fork
@pytest.mark.parametrize("resume", [False, True])
def test_of_three_processes_exactly_one_wins(tmp_path, monkeypatch, resume):
    context = warm_processes(monkeypatch)
    for number in range(ROUNDS):
        path, answers = tmp_path / str(number), context.Queue()
        if resume:
            RunFolder.create(path, CONFIG).close()
        start, finish = context.Barrier(3), context.Barrier(3)
        racers = [context.Process(target=_race, args=(path, resume, start, finish, answers)) for _ in range(3)]
        for racer in racers:
            racer.start()
        outcomes = dict(answers.get(timeout=60) for _ in racers)
        for racer in racers:
            racer.join()
        (winner,) = [pid for pid, error in outcomes.items() if error is None]
        assert all(f"in use by process {winner}:" in error for error in outcomes.values() if error is not None)


# --- Kill and resume ---


def _train(path: Path, steps: int, started=None) -> None:
    """A stand-in for training: each weight depends on every step before it."""
    torch.set_num_threads(1)
    resume = path.exists()
    with RunFolder.create(path, CONFIG, resume=resume) as run:
        step, weight = 0, torch.zeros(50_000)
        if run.checkpoint_steps():
            loaded = run.load_checkpoint(expected={"weight": (torch.float32, (50_000,))})
            step, weight = loaded.step, loaded.tensors["weight"]
        run.truncate(step)
        if started is not None:
            started.send(step)
        while step < steps:
            step += 1
            weight = torch.sin(weight * 1.7 + step)
            run.append_metrics({"step": step, "loss": weight[0].item()})
            run.append_timing({"step": step, "seconds": time.time()})
            if step % 5 == 0:
                run.append_evaluation({"step": step, "exact": weight[1].item()})
                run.save_checkpoint(step, {"weight": weight}, {"step": step})
        run.write_result({"final": weight[2].item()})


@needs_fork
def test_killed_and_resumed_it_ends_bit_for_bit_where_it_would_have(tmp_path, monkeypatch):
    context, generator, kills = warm_processes(monkeypatch), random.Random(1), 0
    _train(tmp_path / "whole", 200)
    while kills < ROUNDS or not (tmp_path / "killed/result.json").exists():
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_train, args=(tmp_path / "killed", 200, send))
        process.start()
        receive.recv()
        process.join(generator.uniform(0, 0.15) if kills < ROUNDS else 60)
        process.kill()
        process.join()
        kills += 1
    last = "checkpoints/step-00000200/manifest.json"
    for name in ("metrics.jsonl", "evaluations.jsonl", "result.json", "config.json", last):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert [record["step"] for record in RunFolder.open(tmp_path / "killed").timings()] == list(range(1, 201))
    assert json.loads((tmp_path / "killed/environment.json").read_text())["resumed"]
