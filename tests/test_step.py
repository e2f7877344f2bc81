"""The training step: its eager forms, the latch that closes on a bad number, and the CUDA graph that replays it.

What needs a GPU is skipped without one. There, cuBLAS wants CUBLAS_WORKSPACE_CONFIG=:4096:8 to be deterministic.
"""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import prism.step
import prism.train
from prism.data import Batch, batch, collate, vocabulary
from prism.device import matmul_precision, wants_graph
from prism.errors import RunError, UserError
from prism.optimizer import load_optimizer, make_optimizer, optimizer_tensors
from prism.runs import RunFolder
from prism.step import Fault, GraphedStep, Latch, LatchedStep, TrainingStep, completion_loss, make_step, step_seed
from prism.tasks import Example
from prism.train import train
from prism.trained import build
from tests.small import ENCODINGS, fingerprint, refused, short_examples, small_config

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]
LENGTHS = [3, 3, 9, 3, 14, 9]  # longest example of each step, in turn: three widths of batch


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Replayed:
    """A recorder without a GPU: it runs what is recorded before it, and replays by running it again."""

    recorded = 0

    def __init__(self, device):
        pass

    def __call__(self, update, optimizer):
        Replayed.recorded += 1
        for _ in range(prism.step.WARM_UP):
            update()
        return update


@pytest.fixture
def _recorder(monkeypatch):
    """Recordings of whatever kind this machine can make."""
    monkeypatch.setattr(Replayed, "recorded", 0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(prism.step, "Recorder", Replayed)


def made_for(step: TrainingStep, number: int, longest: int = 3) -> Batch:
    config = step.config
    return step.prepare(batch(config.task, seed=config.seed, stream="train", step=number, size=config.batch_size,
                              max_length=longest, multiple=step.width_multiple))  # fmt: skip


def walk(kind: type[TrainingStep], config, device: str, steps: int, lengths=(3,)) -> tuple[list, TrainingStep]:
    """The numbers of so many steps, and the step that took them."""
    step = kind(build(config).to(device), config)
    numbers = []
    for number in range(steps):
        result = step(made_for(step, number, lengths[number % len(lengths)]), number)
        numbers.append([result.loss.item(), result.exact.item(), result.norm.item(), result.rate])
    return numbers, step


def state_of(step: TrainingStep) -> dict[str, torch.Tensor]:
    """Weights and optimiser state, copied."""
    tensors = {**step.model.state_dict(), **optimizer_tensors(step.model, step.optimizer)}
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor.nan_to_num(12345.0), other[name].nan_to_num(12345.0)) for name, tensor in one.items()
    )


# --- The forms agree ---


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_latched_form_is_the_plain_one_up_to_rounding(encoding):
    """A fused AdamW divides in another order; rates rounded to float32 do the rest."""
    config = small_config("reverse", encoding, steps=12)
    plain, _ = walk(TrainingStep, config, "cpu", 12)
    latched, _ = walk(LatchedStep, config, "cpu", 12)
    assert [row[0] for row in latched] == pytest.approx([row[0] for row in plain], rel=1e-4)
    assert [row[3] for row in latched] == [row[3] for row in plain]


CASES = [("prism", {}), ("prism", {"gates": "local"}), ("prism", {"copy_every": 2}), ("sinusoidal", {}), ("nope", {})]


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("encoding", "options"), CASES, ids=str)
def test_a_replay_is_the_eager_step(encoding, options, device):
    """Thirty steps over batches of several widths, the baseline's random shifts among them."""
    config = small_config("reverse", encoding, options, steps=30)
    with matmul_precision(config.matmul):
        eager, one = walk(LatchedStep, config, device, 30, LENGTHS)
        replayed, other = walk(GraphedStep, config, device, 30, LENGTHS)
    assert [row[0] for row in replayed] == pytest.approx([row[0] for row in eager], rel=1e-6)
    assert [row[2] for row in replayed] == pytest.approx([row[2] for row in eager], rel=1e-4)
    assert len({width for _, width in other._recorded}) >= 2
    assert all(width % prism.step.WIDTH_MULTIPLE == 0 for _, width in other._recorded)
    if device == "cpu":
        assert Replayed.recorded == len(other._recorded)
        assert (eager, True) == (replayed, same(state_of(one), state_of(other)))
    assert len({row[0] for row in replayed}) > 25  # not one batch over and over


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("device", DEVICES)
def test_recording_changes_nothing(device):
    config = small_config("copy", "sinusoidal")
    _, step = walk(GraphedStep, config, device, 3)
    before, seen = state_of(step), step.latch.seen.tolist()
    step._ready(made_for(step, 3, 14))
    assert len(step._recorded) == 2
    assert same(state_of(step), before)
    assert step.fault() is None
    assert step.latch.seen.tolist() == seen
    assert all(parameter.grad is None for parameter in step.model.parameters())


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_a_function_of_seed_and_step(device):
    """Whatever was drawn before."""
    config = small_config("copy", "sinusoidal")
    found = []
    for disturbance in (0, 17):
        step = LatchedStep(build(config).to(device), config)
        torch.manual_seed(disturbance)
        torch.rand(disturbance + 1, device=device)
        found.append(step(made_for(step, 0), 0).loss.item())
    assert found[0] == found[1]
    other = LatchedStep(build(config).to(device), config)
    assert other(made_for(other, 0), 1).loss.item() != found[0]
    assert (step_seed(0, 0), step_seed(3, 14)) == (30006508550344704, 33017037998475884)


def test_a_cpu_keeps_its_own_form_and_widths():
    config = small_config("copy", "nope")
    step = make_step(build(config), config, graph=False)
    assert type(step) is TrainingStep
    assert made_for(step, 0).tokens.shape[1] == 7
    assert made_for(LatchedStep(build(config), config), 0).tokens.shape[1] == 8
    assert step.optimizer.defaults["fused"] is None
    assert all(isinstance(group["lr"], float) for group in step.optimizer.param_groups)
    assert not hasattr(step.optimizer, "found_inf")


@pytest.mark.parametrize("kind", [TrainingStep, LatchedStep])
def test_a_batch_without_a_target_is_refused(kind):
    config = small_config("copy", "nope")
    step = kind(build(config), config)
    made = made_for(step, 0)
    with pytest.raises(RunError, match="batch of step 5 has no completion token"):
        step(made._replace(mask=torch.zeros_like(made.mask)), 4)


# --- Numbers that are not finite ---


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [TrainingStep, LatchedStep, GraphedStep])
def test_nothing_changes_from_a_bad_step_on(kind, device):
    if kind is TrainingStep and device == "cuda":
        pytest.skip("a GPU has forms of its own")
    config = small_config("copy", "nope")
    _, step = walk(kind, config, device, 5)
    weight, good = step.model.norm.weight, step.model.norm.weight.detach().clone()
    with torch.no_grad():
        weight[0] = math.nan
    before = state_of(step)
    step(made_for(step, 5), 5)
    assert same(state_of(step), before)
    fault = step.fault()
    assert fault is not None
    assert (fault.step, math.isnan(fault.loss), math.isnan(fault.norm)) == (6, True, True)
    with torch.no_grad():
        weight.copy_(good)
    before = state_of(step)
    for number, longest in enumerate((3, 14, 3), start=6):  # one of them to be recorded with the latch closed
        assert math.isfinite(step(made_for(step, number, longest), number).loss.item())
    assert same(state_of(step), before)
    assert step.fault().step == 6
    assert all(int(value) == 5 for name, value in before.items() if name.endswith(".step"))


def test_the_latch_keeps_what_it_saw_first():
    latch, number = Latch(torch.device("cpu")), torch.tensor
    for step, loss, norm in [(1, 2.0, 3.0), (2, 4.0, math.inf), (3, math.nan, 5.0), (4, 1.0, 1.0)]:
        latch.step.fill_(step)
        latch.look(number(loss), number(norm))
    assert latch.fault() == Fault(2, 4.0, math.inf)


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


# --- The optimiser's state ---


@pytest.mark.parametrize("device", DEVICES)
def test_state_goes_from_one_form_to_the_other_and_back(device):
    """A run begun on a GPU can go on on a CPU, and the other way round."""
    config = small_config("copy", "prism")
    _, plain = walk(TrainingStep, config, "cpu", 4)
    kept = {name: tensor.cpu() for name, tensor in optimizer_tensors(plain.model, plain.optimizer).items()}
    for fused, place in ((True, device), (False, "cpu"), (True, device)):
        model = build(config).to(place)
        optimizer = make_optimizer(model, config.optimizer, fused)
        load_optimizer(model, optimizer, kept)
        for state in optimizer.state.values():
            assert state["step"].device.type == place
            assert state["exp_avg"].device.type == place
        back = {name: tensor.cpu() for name, tensor in optimizer_tensors(model, optimizer).items()}
        assert back.keys() == kept.keys()
        assert all(back[name].dtype == kept[name].dtype for name in kept)
        assert same(back, kept)


@pytest.mark.usefixtures("_recorder")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kinds", [(TrainingStep, GraphedStep), (GraphedStep, TrainingStep)])
def test_steps_after_a_change_of_form_go_on_where_the_other_stood(kinds, device):
    """Against the same form all the way."""
    config = small_config("copy", "prism", steps=8)
    first, second = kinds
    place = {TrainingStep: "cpu", GraphedStep: device}
    wanted, _ = walk(first, config, place[first], 8)
    _, before = walk(first, config, place[first], 4)
    after = second(build(config).to(place[second]), config)
    state = state_of(before)
    after.model.load_state_dict({name: state[name] for name in after.model.state_dict()})
    load_optimizer(after.model, after.optimizer, state)
    losses = [after(made_for(after, number), number).loss.item() for number in range(4, 8)]
    assert losses == pytest.approx([row[0] for row in wanted[4:]], rel=2e-3)


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


def test_the_loss_of_short_examples_needs_no_padding():
    """Padding to a wider batch changes no loss of a model that sees no positions."""
    config = small_config("copy", "nope")
    model, words, examples = build(config), vocabulary(config.task), short_examples(config.task, 4)
    narrow, wide = (completion_loss(model, collate(words, examples, multiple=multiple)) for multiple in (1, 8))
    assert narrow[0].item() == pytest.approx(wide[0].item(), rel=1e-6)
    assert collate(words, [Example("123=", "123.")], multiple=8).tokens.shape == (1, 8)
    assert collate(words, [Example("1234=", "123.")], multiple=8).tokens.shape == (1, 8)
    assert collate(words, [Example("1234=", "1234.")], multiple=8).tokens.shape == (1, 16)
