"""What every architecture owes the trainer, and the recurrent ones against networks written out number by number."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism.architectures import all_architectures, find_architecture
from prism.architectures.architecture import Architecture
from prism.architectures.recurrent import count_parameters
from prism.architectures.tape_rnn import Shift
from prism.config import NO_ENCODING, PRESETS, RunConfig, preset
from prism.data import vocabulary
from prism.encodings import find_encoding
from prism.errors import UserError
from prism.runs import RunFolder
from prism.tasks import find_task
from prism.trained import build as untrained
from tests.small import prism_says, refused
from tests.tolerances import assert_close, relative_error

BATCH, TIME, VOCABULARY, EQUALS = 3, 9, 13, 10
COPY = find_task("copy")()
NAMES = [name for name in all_architectures() if name != "transformer"]
SIZES = {"lstm, two layers": {"layers": 2}, "stack_rnn, three stacks": {"stacks": 3, "cells": 2},
         "tape_rnn, narrow": {"cells": 3, "writer": 5}}


def run_of(label: str) -> RunConfig:
    name = label.partition(",")[0]
    size = find_architecture(name).Config(width=12, vocabulary=VOCABULARY, **SIZES.get(label, {}))
    return RunConfig(task=COPY, encoding=NO_ENCODING, positions=find_encoding(NO_ENCODING).Config(),
                     architecture=name, model=size)


def build(label: str, seed: int = 0) -> Architecture:
    """A small model in float64 whose parameters are all far from their start, so that every part has its say."""
    torch.manual_seed(seed)
    model = find_architecture(label.partition(",")[0]).build(run_of(label)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=[*NAMES, *SIZES])
def label(request) -> str:
    return request.param


@pytest.fixture
def model(label) -> Architecture:
    return build(label)


def tokens(batch: int = BATCH, time: int = TIME, seed: int = 1) -> Tensor:
    """Random ids; the end of the prompt stands at another place in each sequence, and in the last nowhere."""
    drawn = torch.randint(VOCABULARY - 1, (batch, time), generator=torch.Generator().manual_seed(seed))
    drawn[drawn == EQUALS] = VOCABULARY - 1
    for row in range(batch - 1):
        drawn[row, (3 + 2 * row) % time] = EQUALS
    return drawn


# --- Promises ---


def test_a_later_token_never_changes_an_earlier_logit(model):
    before = tokens()
    for place in (1, TIME // 2, TIME - 1):
        for other in (EQUALS, 2, 3):
            after = before.clone()
            after[:, place] = other
            changed = after[:, place] != before[:, place]
            here, there = model(before), model(after)
            assert_close(there[:, :place], here[:, :place])
            assert relative_error(there[changed, place], here[changed, place]) > 1e-3


def test_a_longer_pass_says_the_same_of_its_beginning(model):
    """What a sequence is padded with must not reach it, nor how many others it was padded for."""
    long = tokens(BATCH, 40)
    assert_close(model(long[:, :TIME]), model(long)[:, :TIME])


@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, TIME - 5], [TIME - 1, 1]], ids=str)
@pytest.mark.parametrize("capacity", [TIME, 50])
def test_chunks_with_a_cache_give_what_the_whole_gives(model, sizes, capacity):
    cache = model.new_cache(capacity)
    parts = [model(chunk, cache) for chunk in tokens().split(sizes, dim=1)]
    assert_close(torch.cat(parts, 1), model(tokens()))


def test_two_caches_do_not_touch(model):
    one, other = model.new_cache(TIME), model.new_cache(TIME)
    model(tokens()[:, :4], one)
    model(tokens(seed=5)[:, :4], other)
    assert_close(model(tokens()[:, 4:], one), model(tokens())[:, 4:])


def test_sequences_of_a_batch_do_not_touch(model):
    order = torch.tensor([2, 0, 1])
    whole = model(tokens())
    assert_close(model(tokens()[order]), whole[order])
    assert_close(model(tokens()[:1]), whole[:1])


def test_any_length_can_be_read(model):
    for time in (1, 2, 60):
        logits = model(tokens(2, time))
        assert logits.shape == (2, time, VOCABULARY)
        assert logits.isfinite().all()
        assert model.numbers_per_token(time) >= VOCABULARY
        assert model.numbers_kept(time) > 0


def test_a_pass_leaves_nothing_behind_and_training_mode_changes_nothing(model):
    first = model(tokens())
    model.train()
    assert torch.equal(model(tokens()), first)
    model.eval()
    assert torch.equal(model(tokens()), first)


def test_weights_saved_and_loaded_are_the_same_model(label, model):
    other = build(label, 1)
    assert relative_error(other(tokens()), model(tokens())) > 1e-3
    saved = {name: copy.deepcopy(tensor) for name, tensor in model.state_dict().items()}
    other.load_state_dict(saved, strict=True)
    assert torch.equal(other(tokens()), model(tokens()))


def test_gradients_reach_every_parameter(model):
    model.train()
    F.cross_entropy(model(tokens(4, TIME)).flatten(0, 1), tokens(4, TIME, seed=2).flatten()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-12, name


def test_a_sequence_of_one_token_trains(model):
    model(tokens(2, 1)).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_model_first_used_without_gradients_trains(model):
    with torch.inference_mode():
        model(tokens(2, 13))
    model(tokens(2, 13)).square().sum().backward()


def test_a_step_leaves_no_number_to_the_host(model):
    """On a device that holds no numbers, whoever asks for one is found out."""
    on_meta = copy.deepcopy(model).to("meta")
    on_meta(tokens().to("meta")).sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_introduces_itself(name):
    kind = find_architecture(name)
    assert kind.summary
    assert kind.citation
    assert "\n" not in kind.summary
    assert kind.Config() == kind.Config()
    assert not kind.takes_encoding


@pytest.mark.parametrize("chosen", PRESETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_preset_means_as_many_parameters_as_its_transformer_has(name, chosen):
    reference = count_parameters(untrained(preset(chosen, COPY, NO_ENCODING)))
    own = count_parameters(untrained(preset(chosen, COPY, NO_ENCODING, architecture=name)))
    assert abs(own / reference - 1) < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_a_positional_encoding_beside_it_is_refused(name, capsys):
    with pytest.raises(UserError, match="takes no positional encoding"):
        preset("quick", COPY, "sinusoidal", architecture=name)
    line = refused(capsys, "train", "copy", "--architecture", name, "--encoding", "prism")
    assert "takes no positional encoding" in line


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_evaluates_and_generates(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = prism_says(
        capsys, "train", "copy", "--architecture", name, "--steps", "20", "--max-length", "3", "--batch-size", "8",
        "--model.width", "16", "--evaluation.every", "10", "--evaluation.below-loss", "99", "--evaluation.lengths",
        "2", "4", "--evaluation.examples", "4", "--evaluation.final-examples", "5", "--out", "run", "--device", "cpu",
    )
    assert code == 0, err
    config = RunConfig.from_json(RunFolder.open("run").config)
    assert (config.architecture, config.model.width, config.label) == (name, 16, name)
    code, out, err = prism_says(capsys, "evaluate", "run", "--lengths", "1,600", "--examples", "2", "--device", "cpu")
    assert code == 0, err
    assert "600" in out  # too long for one pass: read in chunks
    code, out, err = prism_says(capsys, "generate", "run", "12=", "--limit", "3", "--device", "cpu")
    assert code == 0, err


# --- Oracles: one sequence, one number at a time ---


def numbers(model: Architecture) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in model.state_dict().items()}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def softmax(x: np.ndarray) -> list[float]:
    powers = [math.exp(one - max(x)) for one in x]
    return [one / sum(powers) for one in powers]


def linear(at: dict[str, np.ndarray], name: str, x: np.ndarray) -> np.ndarray:
    bias = at.get(f"{name}.bias")
    rows = [sum(weight * number for weight, number in zip(row, x, strict=True)) for row in at[f"{name}.weight"]]
    return np.array(rows) + (0 if bias is None else bias)


def logits_of(at: dict[str, np.ndarray], hidden: np.ndarray) -> np.ndarray:
    centred = hidden - hidden.mean()
    normed = centred / math.sqrt((centred**2).mean() + 1e-5) * at["norm.weight"] + at["norm.bias"]
    return at["embedding.weight"] @ normed


def lstm_by_hand(at: dict[str, np.ndarray], sequence: list[int], layers: int) -> list[np.ndarray]:
    width = at["embedding.weight"].shape[1]
    hidden, cell = np.zeros((layers, width)), np.zeros((layers, width))
    made = []
    for token in sequence:
        x = at["embedding.weight"][token] * math.sqrt(width)
        for layer in range(layers):
            weights, recurrent = at[f"lstm.weight_ih_l{layer}"], at[f"lstm.weight_hh_l{layer}"]
            bias = at[f"lstm.bias_ih_l{layer}"] + at[f"lstm.bias_hh_l{layer}"]
            gates = weights @ x + recurrent @ hidden[layer] + bias
            taken, kept, new, shown = gates[:width], gates[width : 2 * width], gates[2 * width : 3 * width], \
                gates[3 * width :]
            cell[layer] = sigmoid(kept) * cell[layer] + sigmoid(taken) * np.tanh(new)
            hidden[layer] = x = sigmoid(shown) * np.tanh(cell[layer])
        made.append(logits_of(at, x))
    return made


def controlled(at: dict[str, np.ndarray], token: int, hidden: np.ndarray, read: np.ndarray) -> np.ndarray:
    x = at["embedding.weight"][token] * math.sqrt(len(hidden))
    return np.maximum(0, linear(at, "controller.take", x)
                      + linear(at, "controller.recur", np.concatenate((hidden, read))))


def stack_rnn_by_hand(at: dict[str, np.ndarray], sequence: list[int], stacks: int, cells: int) -> list[np.ndarray]:
    hidden, empty, made = np.zeros(at["embedding.weight"].shape[1]), np.zeros(cells), []
    contents: list[list[np.ndarray]] = [[] for _ in range(stacks)]
    for token in sequence:
        tops = [stack[0] if stack else empty for stack in contents]
        hidden = controlled(at, token, hidden, np.concatenate(tops))
        actions, values = linear(at, "act", hidden), linear(at, "push", hidden)
        for place, stack in enumerate(contents):
            push, pop, stay = softmax(actions[3 * place : 3 * place + 3])
            value = values[cells * place : cells * (place + 1)]
            pushed, stayed, popped = [value, *stack], [*stack, empty], [*stack[1:], empty, empty]
            contents[place] = [push * a + stay * b + pop * c
                               for a, b, c in zip(pushed, stayed, popped or [empty], strict=False)]
        made.append(logits_of(at, hidden))
    return made


def tape_rnn_by_hand(at: dict[str, np.ndarray], sequence: list[int], cells: int) -> list[np.ndarray]:
    """The tape is a dictionary: place relative to the head -> what stands there."""
    hidden, tape, length, made = np.zeros(at["embedding.weight"].shape[1]), {}, 0, []
    for read, token in enumerate(sequence, start=1):
        length = read if EQUALS not in sequence[:read] else sequence.index(EQUALS)
        hidden = controlled(at, token, hidden, tape.get(0, np.zeros(cells)))
        value = np.maximum(0, linear(at, "write.0", hidden))
        tape[0] = linear(at, "write.4", np.maximum(0, linear(at, "write.2", value)))
        moved: dict[int, np.ndarray] = {}
        for probability, step in zip(softmax(linear(at, "act", hidden)), (0, -1, 1, -length, length), strict=True):
            for place, content in tape.items():  # the head goes by `step`, so what stands still is nearer by that
                if abs(place - step) <= 2 * read:
                    moved[place - step] = moved.get(place - step, np.zeros(cells)) + probability * content
        tape = moved
        made.append(logits_of(at, hidden))
    return made


def by_hand(model: Architecture, sequence: list[int]) -> list[np.ndarray]:
    at, size = numbers(model), model.config
    if model.name == "lstm":
        return lstm_by_hand(at, sequence, size.layers)
    if model.name == "stack_rnn":
        return stack_rnn_by_hand(at, sequence, size.stacks, size.cells)
    return tape_rnn_by_hand(at, sequence, size.cells)


@pytest.mark.parametrize("kind", [*NAMES, *SIZES])
def test_it_is_the_network_of_its_paper(kind):
    model, read = build(kind), tokens(BATCH, 23)
    read[0, 15] = EQUALS  # a second one, which must change nothing
    whole = model(read)
    for row in range(BATCH):
        assert_close(whole[row], np.stack(by_hand(model, read[row].tolist())), what=f"{kind}, sequence {row}")


def test_the_length_a_tape_jumps_by_is_counted_and_stops_at_the_end_of_the_prompt():
    model = build("tape_rnn")
    read = vocabulary(COPY).encode("8349=8349.=1")
    nothing = torch.zeros(1, dtype=torch.long)
    lengths, over = model._lengths(torch.from_numpy(read)[None], nothing, nothing.bool())
    assert lengths.tolist() == [[1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4]]
    assert over.tolist() == [[False] * 4 + [True] * 8]


def test_a_stack_returns_what_was_pushed_however_long_ago():
    """As many pushes as pops, at twice any depth theirs has: a stack with a bottom would have lost the first."""
    model, deep = build("stack_rnn").eval(), 80
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.weight[1, 0], model.embedding.weight[2, 1], model.embedding.weight[3, 2] = 1, 1, 1
        model.controller.take.weight.copy_(torch.eye(12))
        model.act.weight[0, 0] = model.act.weight[0, 1] = model.act.weight[1, 2] = 1e3  # 1 and 2 push, 3 pops
        model.push.weight[0, 1] = 1  # 2 is pushed as a number, 1 as nothing
        model.controller.recur.weight[5, 12] = 1
    read = torch.tensor([[2] + [1] * deep + [3] * deep + [3, 3]])
    with torch.no_grad():
        hidden, _ = model.unroll(model.embedding(read) * math.sqrt(12), read, None)
    seen = hidden[0, :, 5]
    assert seen[-2] > 3
    assert seen[1] == pytest.approx(float(seen[-2]))
    assert seen[2:-2].abs().max() < 1e-9
    assert seen[-1] < 1e-9


def test_the_gradient_of_a_shift_is_the_shift_back():
    torch.manual_seed(0)
    tape = torch.randn(4, 7, 2, dtype=torch.float64, requires_grad=True)
    by = torch.tensor([0, 3, -2, 9])
    assert torch.autograd.gradcheck(Shift.apply, (tape, by))
    out = Shift.apply(tape, by)
    assert torch.equal(out[1], F.pad(tape[1, 3:], (0, 0, 0, 3)))
    assert torch.equal(out[2], F.pad(tape[2, :-2], (0, 0, 2, 0)))
    assert not out[3].any()
