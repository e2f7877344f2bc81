"""AdamW as asked for: every parameter once, each group with its own settings, one schedule, a state that comes back."""

import math

import pytest
import torch

from prism.config import OptimizerConfig
from prism.data import collate, vocabulary
from prism.optimizer import load_optimizer, make_optimizer, optimizer_tensors, schedule, set_rates
from prism.step import completion_loss
from prism.trained import build
from tests.small import ENCODINGS, short_examples, small_config


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("decay", [True, False])
def test_every_parameter_is_in_exactly_one_group(encoding, decay):
    options = {"gate_decay": decay, "copy_every": 2, "depths": (0, 1)} if encoding == "prism" else {}
    model = build(small_config("copy", encoding, options))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1))
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert len(held) == len(set(held))
    assert set(held) == {id(parameter) for parameter in model.parameters()}


def test_alpha_and_the_gates_have_settings_of_their_own():
    config = small_config("copy", "prism", {"gate_decay": False, "alpha_rate": 0.02})
    model = build(config)
    rest, alpha, gates = make_optimizer(model, OptimizerConfig(rate=1e-3, weight_decay=0.1)).param_groups
    assert [id(parameter) for parameter in alpha["params"]] == [id(model.encoding.alpha)]
    assert (alpha["lr"], alpha["betas"], alpha["weight_decay"]) == (0.02, (0.8, 0.92), 0.0)
    assert {id(one) for one in gates["params"]} == {id(one) for one in model.encoding.prism_layers.parameters()}
    assert (gates["lr"], gates["betas"], gates["weight_decay"]) == (1e-3, (0.9, 0.98), 0.0)
    assert (rest["lr"], rest["weight_decay"]) == (1e-3, 0.1)


def test_rates_follow_one_schedule():
    config = OptimizerConfig(rate=1e-3, warmup=4, decay="cosine", final_rate=0.1)
    optimizer = make_optimizer(build(small_config()), config)
    for step in range(24):
        warm, done = (step + 1) / 4, (step - 4) / 20
        wanted = warm if step < 4 else 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done))
        assert schedule(config, step, 24) == pytest.approx(wanted)
        assert set_rates(optimizer, config, step, 24) == pytest.approx(1e-3 * wanted)
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.03 * wanted)
    assert [schedule(OptimizerConfig(), step, 10) for step in (0, 5, 9)] == [1.0, 1.0, 1.0]


def test_the_optimisers_state_comes_back_whole():
    config = small_config()
    model, other = build(config), build(config)
    optimizer = make_optimizer(model, config.optimizer)
    made = collate(vocabulary(config.task), short_examples(config.task, 4))
    for _ in range(3):
        optimizer.zero_grad()
        completion_loss(model, made)[0].backward()
        optimizer.step()
    kept = optimizer_tensors(model, optimizer)
    assert len(kept) == 3 * len(list(model.parameters()))
    again = make_optimizer(other, config.optimizer)
    load_optimizer(other, again, kept)
    back = optimizer_tensors(other, again)
    assert back.keys() == kept.keys()
    assert all(torch.equal(back[name], kept[name]) and back[name] is not kept[name] for name in kept)
    assert all(int(value) == 3 for name, value in kept.items() if name.endswith(".step"))
