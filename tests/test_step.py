"""The training step: its eager forms, the latch that closes on a bad number, and the CUDA graph that replays it.

What needs a GPU is skipped without one. There, cuBLAS wants CUBLAS_WORKSPACE_CONFIG=:4096:8 to be deterministic.
"""

import math

import pytest
import torch

import prism.step
from prism.data import Batch, batch, collate, vocabulary
from prism.device import matmul_precision
from prism.errors import RunError
from prism.optimizer import load_optimizer, make_optimizer, optimizer_tensors
from prism.step import Fault, GraphedStep, Latch, LatchedStep, TrainingStep, completion_loss, make_step, step_seed
from prism.trained import build
from tests.small import ENCODINGS, short_examples, small_config

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


def test_padding_has_no_say_in_the_loss():
    """To a model that knows no positions, so that nothing else changes with the width."""
    config = small_config("copy", "nope")
    model, words, examples = build(config), vocabulary(config.task), short_examples(config.task, 4)
    narrow, wide = (completion_loss(model, collate(words, examples, multiple=multiple)) for multiple in (1, 8))
    assert narrow[0].item() == pytest.approx(wide[0].item(), rel=1e-6)
    assert narrow[1].item() == wide[1].item()


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
