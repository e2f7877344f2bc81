"""Whole runs by the steps of a GPU: stopped at a bad number, resumed, with graphs and without.

What needs a GPU is skipped without one. There, cuBLAS wants CUBLAS_WORKSPACE_CONFIG=:4096:8 to be deterministic.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prism.arguments
import prism.step
import prism.train
from prism.device import wants_graph
from prism.errors import RunError, UserError
from prism.runs import RunFolder
from prism.step import LatchedStep, completion_loss
from prism.train import train
from tests.small import fingerprint, refused, small_config

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DEVICES)
def late_checks(request, monkeypatch):
    """Training that looks at its numbers now and then, as on a GPU."""
    if request.param == "cpu":
        monkeypatch.setattr(prism.train, "make_step", lambda model, config, graph: LatchedStep(model, config))
    return request.param


@pytest.mark.parametrize(("at", "saved"), [(5, None), (8, 7), (12, 10), (17, 14), (21, 20), (24, 21)])
def test_a_run_stops_at_the_next_look_and_names_the_step(at, saved, late_checks, tmp_path, monkeypatch):
    """Looks come every 10 steps and before every evaluation and save; none of what is saved is of a bad step."""
    real = prism.train._Training._step

    def poisoned(self, made):
        if self.standing.step == at - 1:
            with torch.no_grad():
                self.model.norm.weight[0] = math.nan
        real(self, made)

    monkeypatch.setattr(prism.train._Training, "_step", poisoned)
    config = small_config("copy", "nope")
    with pytest.raises(RunError, match=rf"the loss is nan at step {at} \(seed 0\)") as stopped:
        train(config, tmp_path / "run", device=late_checks)
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoint_steps()[-1:] == ([saved] if saved else [])
    assert (f"last checkpoint is of step {saved}" if saved else "no checkpoint yet") in str(stopped.value)
    assert all(step < at for step in [record["step"] for record in folder.metrics() + folder.evaluations()])
    assert folder.result() is None
    monkeypatch.setattr(prism.train._Training, "_step", real)
    assert train(config, tmp_path / "run", resume=True, device=late_checks)["final"]["step"] == 24


def test_a_latched_run_stops_and_resumes_to_the_same_bytes(late_checks, tmp_path, monkeypatch):
    """On one machine; on a GPU, with the graphs recorded anew after the resume."""
    config = small_config("addition", "sinusoidal", evaluation={"every": 5, "checkpoint_every": 4})
    train(config, tmp_path / "whole", device=late_checks)
    real = RunFolder.save_checkpoint

    def dying(self, step, *arguments, **more):
        real(self, step, *arguments, **more)
        if step == 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", device=late_checks)
    monkeypatch.setattr(RunFolder, "save_checkpoint", real)
    train(config, tmp_path / "run", resume=True, device=late_checks)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


@pytest.mark.usefixtures("late_checks")
def test_readiness_comes_from_the_steps_that_are_looked_at(tmp_path, monkeypatch):
    """A loss that is low between two looks is not seen; evaluations follow from what is recorded."""
    seen = []
    monkeypatch.setattr(prism.train, "LOG_EVERY", 4)
    real = prism.train._Training._step

    def watched(self, made):
        real(self, made)
        seen.append(self.standing.ready)

    monkeypatch.setattr(prism.train._Training, "_step", watched)
    train(small_config("copy", "nope", steps=6), tmp_path / "run")
    assert seen == [False] * 3 + [True] * 3


# --- What may be asked for ---


def test_a_graph_on_a_cpu_is_refused(tmp_path, capsys):
    with pytest.raises(UserError, match="--graph needs a GPU, and this run is on cpu"):
        train(small_config(), tmp_path / "run", graph=True)
    assert not (tmp_path / "run").exists()
    line = ("train", "copy", "--device", "cpu", "--graph", "--out", str(tmp_path / "run"))
    assert refused(capsys, *line) == "prism: --graph needs a GPU, and this run is on cpu: leave it out"
    assert not (tmp_path / "run").exists()
    answers = [wants_graph(asked, device) for asked in (None, False) for device in ("cpu", "cuda", "cuda:1")]
    assert answers == [False, True, True, False, False, False]
    assert wants_graph(True, "cuda:0")


@pytest.mark.parametrize(("default", "graph", "flag"), [
    (True, True, ""), (True, False, " --no-graph"), (False, False, ""), (False, True, " --graph"),
])  # fmt: skip
def test_going_on_takes_the_same_steps(default, graph, flag, monkeypatch):
    monkeypatch.setattr(prism.arguments, "graph_is_default", lambda device: default)
    again = prism.arguments.TrainCommand(small_config("copy"), graph=graph).again("run")
    assert again == f"prism train copy --out run --resume{flag}"


def test_the_precision_of_products_is_the_runs_and_then_again_the_processs(tmp_path, monkeypatch):
    cudnn, found = torch.backends.cudnn, []

    def now():
        return [switch.fp32_precision for switch in (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)]

    before, real = now(), prism.train._Training.run
    monkeypatch.setattr(prism.train._Training, "run", lambda self: found.append(now()) or real(self))
    for chosen in ("tf32", "float32"):
        train(small_config("copy", "nope", steps=2, matmul=chosen), tmp_path / chosen)
    assert found == [["tf32"] * 3, ["ieee"] * 3]
    assert now() == before
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"


# --- What only a GPU can show ---


@on_gpu
def test_memory_that_runs_out_in_a_recording_names_the_batch(tmp_path, monkeypatch):
    def hungry(model, made):
        if torch.cuda.is_current_stream_capturing():
            torch.empty(1 << 50, device="cuda")
        return completion_loss(model, made)

    monkeypatch.setattr(prism.step, "completion_loss", hungry)
    with pytest.raises(RunError, match=r"out of memory at step 1: 8 sequences of 8 tokens"):
        train(small_config("copy", "nope"), tmp_path / "run", device="cuda")


WAITS = """
import sys
import prism.step
from prism.errors import RunError
from prism.train import train
from tests.small import small_config

real = prism.step.completion_loss

def waiting(model, made):
    loss, exact = real(model, made)
    loss.item()
    return loss, exact

prism.step.completion_loss = waiting
try:
    train(small_config("copy", "nope"), sys.argv[1], device="cuda")
except RunError as error:
    print(error)
train(small_config("copy", "nope"), sys.argv[1], resume=True, device="cuda", graph=False)
"""


@on_gpu
def test_a_model_that_waits_for_the_host_is_told_of_the_other_form(tmp_path):
    """In a process of its own: a recording that failed leaves its marks."""
    end = subprocess.run([sys.executable, "-c", WAITS, str(tmp_path / "run")], capture_output=True, text=True,
                         timeout=300, cwd=Path(__file__).parents[1])  # fmt: skip
    assert end.returncode == 0, end.stderr
    assert "the training step cannot be a CUDA graph (" in end.stdout
    assert end.stdout.strip().endswith("--no-graph trains without")


@on_gpu
def test_a_run_is_the_same_with_graphs_and_without(tmp_path):
    """Whole runs: curriculum, evaluations and saves between the replays."""
    config = small_config("addition", "sinusoidal")
    for graph in (True, False):
        train(config, tmp_path / str(graph), device="cuda", graph=graph)
    with_graphs, without = (RunFolder.open(tmp_path / str(graph)).metrics() for graph in (True, False))
    for one, other in zip(with_graphs, without, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@on_gpu
@pytest.mark.parametrize(("first", "second"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_changes_device(first, second, tmp_path, monkeypatch):
    config = small_config("copy", "nope", steps=8, evaluation={"every": 4, "checkpoint_every": 4})
    real = RunFolder.save_checkpoint

    def dying(self, step, *arguments, **more):
        real(self, step, *arguments, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", dying)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", device=first)
    monkeypatch.setattr(RunFolder, "save_checkpoint", real)
    assert train(config, tmp_path / "run", resume=True, device=second)["final"]["step"] == 8
