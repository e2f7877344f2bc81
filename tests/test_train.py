"""Training: the loss that is meant, an update only from finite numbers, and records that repeat to the byte."""

import json
import math

import pytest
import torch

import prism.step
import prism.train
from prism.data import batch, collate, vocabulary
from prism.errors import RunError, UserError
from prism.gates import RecurrentGates
from prism.generate import generate
from prism.runs import RunFolder
from prism.step import completion_loss
from prism.tasks import all_tasks
from prism.tasks.scan_cot import ScanCot
from prism.train import train
from prism.trained import build
from tests.small import ENCODINGS, MODEL, fingerprint, memorise, short_examples, small_config, stirred, weights_of

TASKS = sorted(all_tasks())


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- The loss ---


@pytest.mark.parametrize("name", TASKS)
def test_the_loss_is_the_mean_over_completion_tokens(name):
    """Against a loop over the examples' own text, one at a time, without padding."""
    config = small_config(name)
    model, task = stirred(config).double(), config.task
    words, examples = vocabulary(task), short_examples(task, 5)
    loss, exact = completion_loss(model, collate(words, examples))
    surprises, right = [], 0
    for prompt, completion in examples:
        tokens = (prompt + " " + completion).split() if task.separator else list(prompt + completion)
        answer = completion.split() if task.separator else list(completion)
        ids = [task.alphabet.index(token) for token in tokens]
        odds = torch.log_softmax(model(torch.tensor([ids]))[0], -1)
        whole = True
        for place in range(len(tokens) - len(answer), len(tokens)):
            surprises.append(-odds[place - 1, ids[place]].item())
            whole &= int(odds[place - 1].argmax()) == ids[place]
        right += whole
    assert loss.item() == pytest.approx(sum(surprises) / len(surprises), rel=1e-9)
    assert exact.item() == pytest.approx(right / len(examples))


def test_the_share_of_right_examples_is_of_whole_completions():
    config = small_config("copy", "nope")
    words, examples = vocabulary(config.task), short_examples(config.task, 8)
    model = memorise(build(config), config.task, examples[:3])
    made = generate(model, words, [example.prompt for example in examples], 9)
    right = sum(text == example.completion for text, example in zip(made, examples, strict=True))
    assert 0 < right < 8
    assert completion_loss(model, collate(words, examples))[1].item() == right / 8


def test_what_the_prompt_predicts_has_no_say_in_the_loss():
    config = small_config("reverse")
    model = stirred(config)
    made = collate(vocabulary(config.task), short_examples(config.task, 6))
    loss, exact = completion_loss(model, made)
    other = made._replace(targets=torch.where(made.mask, made.targets, 3))
    assert [part.item() for part in completion_loss(model, other)] == [loss.item(), exact.item()]
    changed = made._replace(targets=torch.where(made.mask, (made.targets + 1) % 12, made.targets))
    assert completion_loss(model, changed)[0].item() != loss.item()

    with_nonsense = model.register_forward_hook(lambda _, __, out: torch.where(made.mask[..., None], out, 77 * out))
    assert [part.item() for part in completion_loss(model, made)] == [loss.item(), exact.item()]
    with_nonsense.remove()


@pytest.mark.parametrize("recurrence", ["penalty", "orthogonal"])
def test_a_step_follows_the_gradient_of_loss_and_penalty(recurrence, tmp_path, monkeypatch):
    """Its norm, before clipping, against one computed here from the same batch."""
    monkeypatch.setattr(prism.train, "LOG_EVERY", 1)
    monkeypatch.setattr(RecurrentGates, "penalty_weight", 1.0)  # the paper's 1e-3 would drown
    config = small_config("copy", "prism", {"recurrence": recurrence}, steps=1)
    train(config, tmp_path / "run")
    model, layer = build(config), "0"
    made = batch(config.task, seed=0, stream="train", step=0, size=8, max_length=2)
    loss = completion_loss(model, made)[0]
    if recurrence == "penalty":
        for square in model.encoding.prism_layers[layer].gates.gru.weight_hh_l0.chunk(3):
            loss = loss + (square.T @ square - torch.eye(len(square))).square().sum()
    loss.backward()
    norm = math.sqrt(sum(one.grad.square().sum().item() for one in model.parameters() if one.grad is not None))
    (record,) = RunFolder.open(tmp_path / "run").metrics()
    assert record["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert record["loss"] == pytest.approx(completion_loss(build(config), made)[0].item(), rel=1e-5)
    assert record["longest"] == 2


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_loss_falls(tmp_path, encoding):
    config = small_config("copy", encoding, steps=60, max_length=1, evaluation={"every": 100, "checkpoint_every": 100})
    result = train(config, tmp_path / "run")
    losses = [record["loss"] for record in RunFolder.open(tmp_path / "run").metrics()]
    assert losses[-1] < 0.7 * losses[0]
    assert [record["step"] for record in RunFolder.open(tmp_path / "run").metrics()] == [10, 20, 30, 40, 50, 60]
    assert result["final"]["step"] == 60


# --- Numbers that are not finite ---


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_a_number_that_is_not_finite_stops_before_the_update(tmp_path, monkeypatch, fault):
    config, real, calls, seen = small_config("copy", "nope", steps=30), completion_loss, [], {}

    def faulty(model, made):
        loss, exact = real(model, made)
        calls.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        seen["model"] = model
        if len(calls) == 10:
            # 0 * sqrt(0) is 0, and its derivative is 0 * inf.
            loss = loss * math.nan if fault == "loss" else loss + 0 * (0 * model.norm.weight.sum()).sqrt()
        return loss, exact

    monkeypatch.setattr(prism.step, "completion_loss", faulty)
    with pytest.raises(RunError, match=rf"{fault}.* is nan at step 10 \(seed 0\).*last checkpoint is of step 7"):
        train(config, tmp_path / "run")
    now = seen["model"].state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in calls[-1].items())
    folder = RunFolder.open(tmp_path / "run")
    assert folder.checkpoint_steps() == [7]
    assert folder.metrics() == []
    assert folder.result() is None
    monkeypatch.undo()
    assert train(config, tmp_path / "run", resume=True)["final"]["step"] == 30


def test_memory_that_runs_out_is_one_sentence(tmp_path, monkeypatch):
    def hungry(model, made):
        return torch.empty(1 << 50), None

    monkeypatch.setattr(prism.step, "completion_loss", hungry)
    with pytest.raises(RunError, match=r"out of memory at step 1: 8 sequences of \d+ tokens.*--batch-size"):
        train(small_config(), tmp_path / "run")


# --- Records ---


def test_two_runs_write_the_same_bytes(tmp_path):
    config = small_config("addition", "sinusoidal")
    for name in "ab":
        train(config, tmp_path / name)
    a, b = (fingerprint(tmp_path / name) for name in "ab")
    assert a == b
    assert set(json.loads(a["metrics"].splitlines()[0])) == {
        "step", "longest", "loss", "exact", "gradient_norm", "rate"
    }
    timing = RunFolder.open(tmp_path / "a").timings()
    assert [record["step"] for record in timing] == [10, 20, 24]
    assert set(timing[0]) == {"step", "seconds", "steps_per_second"}


def test_another_seed_is_another_run(tmp_path):
    for seed in (0, 1):
        train(small_config("copy", "nope", steps=10, seed=seed), tmp_path / str(seed))
    assert (tmp_path / "0" / "metrics.jsonl").read_bytes() != (tmp_path / "1" / "metrics.jsonl").read_bytes()


def test_evaluations_come_when_they_are_due_and_at_the_end(tmp_path):
    config = small_config("addition", "nope", evaluation={"lengths": (2, 5), "every": 8})
    result = train(config, tmp_path / "run")
    records = RunFolder.open(tmp_path / "run").evaluations()
    assert [record["step"] for record in records] == [8, 16, 24]
    assert [record["test"]["5"]["examples"] for record in records] == [5, 5, 6]
    assert set(records[0]["test"]) == {"2", "5"}
    assert set(records[0]["test"]["2"]["parts"]) == {"chain of thought", "final sum"}
    assert result["history"] == records
    assert result["final"] == {"step": 24, "test": records[-1]["test"]}


def test_no_evaluation_before_the_loss_has_been_low(tmp_path):
    train(small_config("copy", "nope", evaluation={"below_loss": 1e-6}), tmp_path / "run")
    assert [record["step"] for record in RunFolder.open(tmp_path / "run").evaluations()] == [24]


def test_the_best_is_chosen_by_validation_and_never_by_test(tmp_path, monkeypatch):
    """Validation peaks at step 8, test at step 16: the best must be of step 8."""
    real = prism.train.sweep

    def told(model, task, lengths, examples, stream="test", **more):
        found = real(model, task, lengths, examples, stream, **more)
        if stream == "validation":
            assert list(lengths) == [3]
            told.step += 8
            rate = {8: 0.8, 16: 0.4, 24: 0.4}[told.step]
        else:
            rate = {8: 0.2, 16: 1.0, 24: 0.6}[told.step]
        return {name: type(one)(10, round(10 * rate), one.loss) for name, one in found.items()}

    told.step = 0
    monkeypatch.setattr(prism.train, "sweep", told)
    config = small_config("copy", "nope", evaluation={"every": 8, "checkpoint_every": 5})
    result = train(config, tmp_path / "run")
    assert result["best"]["step"] == 8
    assert result["final"]["step"] == 24
    assert 8 in RunFolder.open(tmp_path / "run").checkpoint_steps()  # pinned, though older than the kept ones
    assert result["top3"]["test"]["2"]["exact"] == pytest.approx((0.2 + 1.0 + 0.6) / 3)


def test_the_best_result_is_of_the_best_weights(tmp_path, monkeypatch):
    seen = []
    real = prism.train.sweep

    def watched(model, task, lengths, examples, stream="test", **more):
        found = real(model, task, lengths, examples, stream, **more)
        seen.append((stream, {name: tensor.clone() for name, tensor in model.state_dict().items()}))
        rate = 10 - len(seen)  # ever worse
        return {name: type(one)(10, rate, one.loss) for name, one in found.items()}

    monkeypatch.setattr(prism.train, "sweep", watched)
    result = train(small_config("copy", "nope"), tmp_path / "run")
    assert result["best"]["step"] == 10
    stream, last = seen[-1]
    assert stream == "test"
    best = weights_of(tmp_path / "run", 10)
    assert all(torch.equal(last[name], best[name]) for name in best)
    assert any(not torch.equal(last[name], other) for name, other in weights_of(tmp_path / "run").items())


def test_a_finished_run_is_returned_and_not_trained(tmp_path, monkeypatch):
    config = small_config("copy", "nope", steps=5)
    result = train(config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")}
    monkeypatch.setattr(prism.train, "_Training", None)
    assert train(config, tmp_path / "run", resume=True) == result
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.jsonl")} == before
    with pytest.raises(UserError, match="already holds a run"):
        train(config, tmp_path / "run")


# --- Tasks ---


def test_scan_trains_without_a_curriculum_and_scores_its_subsets(tmp_path, monkeypatch):
    few = {name: examples[:2] for name, examples in ScanCot().subsets().items()}
    monkeypatch.setattr(ScanCot, "subsets", lambda self: few)
    config = small_config("scan_cot", "nope", steps=10, max_length=30, evaluation={"lengths": (60,), "examples": 2})
    result = train(config, tmp_path / "run")
    assert set(result["final"]["test"]) == {"60", "test set", "longer than training"}
    assert RunFolder.open(tmp_path / "run").metrics()[0]["longest"] == 30


@pytest.mark.parametrize(("changes", "lengths"), [({"max_length": 3}, (60,)), ({"max_length": 30}, (60, 5))])
def test_lengths_without_examples_are_said_before_anything_is_made(tmp_path, changes, lengths):
    with pytest.raises(UserError, match="scan_cot has no"):
        train(small_config("scan_cot", "nope", evaluation={"lengths": lengths}, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# --- Losses as they have always been ---

# The first twenty losses of a tiny run: a change of model, data or optimiser must be meant.
STORED = {
    "prism": [
        5.16996, 4.83853, 5.06939, 4.98053, 4.70543, 4.46556, 4.11281, 3.73073, 3.80867, 3.98473,
        3.35177, 3.29305, 3.23187, 3.19136, 3.11716, 3.18773, 3.04953, 2.99237, 3.13469, 3.02065,
    ],
    "sinusoidal": [
        5.23386, 4.62890, 4.67797, 4.73520, 4.88689, 4.37508, 4.08537, 4.09101, 3.74855, 3.89230,
        3.54364, 3.81063, 3.30527, 3.27648, 3.16294, 3.02266, 3.33432, 3.25572, 3.36461, 3.36033,
    ],
    "nope": [
        5.25247, 4.71676, 4.89500, 4.83868, 5.13571, 4.48792, 4.23048, 4.04201, 3.95700, 3.92095,
        3.54662, 3.85199, 3.25476, 3.32752, 3.16680, 3.15055, 3.39606, 3.22504, 3.31120, 3.35074,
    ],
}


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_twenty_losses_are_what_they_were(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(prism.train, "LOG_EVERY", 1)
    options = {"copy_every": 2} if encoding == "prism" else {}
    train(small_config("reverse", encoding, options, steps=20, model=MODEL), tmp_path / "run")
    losses = [record["loss"] for record in RunFolder.open(tmp_path / "run").metrics()]
    assert losses == pytest.approx(STORED[encoding], rel=1e-3)
