"""Configurations: what the paper's are, that JSON brings them back, and that nothing impossible gets through."""

import copy
import dataclasses
import json
import math
import warnings

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from prism.config import PRESETS, CurriculumConfig, ModelConfig, OptimizerConfig, RunConfig, preset
from prism.curriculum import longest_at
from prism.data import batch
from prism.encodings import all_encodings
from prism.errors import UserError
from prism.step import completion_loss
from prism.tasks import all_tasks, find_task
from prism.trained import build
from tests.small import ENCODINGS, small_config

TASKS = sorted(all_tasks())
TIMES = pytest.mark.parametrize("name", TASKS)
BASES = [small_config(task, encoding).to_json() for task in TASKS for encoding in ENCODINGS]
SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def of(name: str, task: str, encoding: str = "prism", **options) -> RunConfig:
    return preset(name, find_task(task)(), encoding, **options)


# --- The paper's values ---


def test_the_papers_model_has_2562127_parameters_and_140_query_cursors():
    config = of("paper", "copy")
    model = build(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == 2_562_127
    assert sum(layer.cursors for layer in model.encoding.prism_layers.values()) == 140
    sizes = (config.model.width, config.model.layers, config.model.heads, config.model.head_width)
    assert sizes == (192, 5, 7, 32)
    assert (config.model.feedforward, config.model.vocabulary) == (4, 64)
    positions = config.positions
    assert (positions.gates, positions.gate_features, positions.pe_width, positions.cursors) == ("gru", 100, 340, 4)
    assert (positions.reset_start, positions.gamma_start, positions.alpha_start) == (0.5, 2.0, 1.0)
    assert (positions.norm, positions.absolute, positions.support) == ("constant", False, None)


def test_the_papers_training():
    config = of("paper", "reverse")
    optimizer = config.optimizer
    assert (optimizer.rate, optimizer.betas, optimizer.decay) == (9e-5, (0.9, 0.98), "constant")
    assert (config.steps, config.batch_size) == (150_000, 100)
    assert (config.positions.alpha_rate, config.positions.alpha_betas) == (0.03, (0.8, 0.92))


def test_the_papers_baseline():
    model = of("paper", "copy", "sinusoidal").model
    assert (model.width, model.heads, model.layers) == (512, 8, 5)


@TIMES
def test_copy_branch_and_depths_of_each_task(name):
    paper = of("paper", name).positions
    assert paper.copy_every == (5 if name in ("reverse", "scan_cot", "dyn_str_cpy") else 0)
    assert paper.depths == ((0, 3) if name in ("odds_first", "stack") else (0,))
    assert of("best", name).positions.copy_every == paper.copy_every


def test_two_prism_layers_split_the_cursors_between_them():
    layers = build(of("paper", "odds_first")).encoding.prism_layers
    assert {depth: layer.cursors for depth, layer in layers.items()} == {"0": 84, "3": 56}


@TIMES
def test_every_tasks_default_length_and_the_papers_curriculum(name):
    config = of("paper", name)
    wanted = {
        "addition": 10, "copy": 10, "reverse": 40, "odds_first": 40, "stack": 40, "dyn_str_cpy": 10,
        "multiplication": 9, "scan_cot": 80,
    }
    assert config.max_length == wanted[name]
    assert config.task.has_curriculum == (name != "scan_cot")
    seen = [longest_at(step, config.curriculum, config.max_length) for step in range(0, 60_000, 2_500)]
    if config.max_length == 40:
        # 5,000 steps at 5, 5,000 at 10, then 10 more every 10,000 steps.
        assert seen == [5] * 2 + [10] * 2 + [20] * 4 + [30] * 4 + [40] * 12
    elif config.task.has_curriculum:
        assert seen == [5] * 2 + [config.max_length] * 22


def test_the_best_preset_is_what_the_facts_say():
    config = of("best", "copy")
    assert (config.optimizer.rate, config.optimizer.weight_decay, config.optimizer.clip) == (5e-4, 0.1, 5.0)
    assert config.positions.alpha_rate == 0.02
    assert math.log(config.positions.reset_start / (1 - config.positions.reset_start)) == pytest.approx(-3, abs=0.02)
    assert config.curriculum.stages[0] == (5, 2_000)


# --- There and back ---


@pytest.mark.parametrize("encoding", sorted(all_encodings()))
@pytest.mark.parametrize("chosen", PRESETS)
def test_json_brings_every_preset_back(encoding, chosen):
    hint = all_encodings()[encoding].hint
    for name, task in all_tasks().items():
        if hint is None or hint in task.hint_kinds():
            config = of(chosen, name, encoding)
            assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_missing_keys_take_their_defaults_and_whole_numbers_pass_for_numbers():
    config = RunConfig.from_json({"task": {"name": "copy"}, "encoding": "nope", "positions": {},
                                  "optimizer": {"rate": 1, "betas": [0, 0.5]}})  # fmt: skip
    assert config.optimizer == OptimizerConfig(rate=1.0, betas=(0.0, 0.5))
    assert type(config.optimizer.rate) is float
    assert config.model == ModelConfig()
    assert config.curriculum == CurriculumConfig()


# --- Strictness ---

BAD = [
    (("steps",), 0, "steps must be at least 1, got 0"),
    (("steps",), True, "steps must be a whole number, got True"),
    (("steps",), 1.5, "steps must be a whole number, got 1.5"),
    (("steps",), "10", "steps must be a whole number, got '10'"),
    (("seed",), -1, "seed must be at least 0"),
    (("seed",), 2**31, "seed must be at most"),
    (("max_length",), 0, "max_length must be at least 1"),
    (("batch_size",), None, "batch_size must be a whole number"),
    (("preset",), "fast", "preset must be one of 'quick', 'paper', 'best'"),
    (("optimizer", "rate"), math.nan, "rate must be"),
    (("optimizer", "rate"), math.inf, "rate must be"),
    (("optimizer", "rate"), 0, "rate must be greater than 0"),
    (("optimizer", "rate"), 10**400, "rate"),
    (("optimizer", "weight_decay"), -0.1, "weight_decay must be at least 0"),
    (("optimizer", "clip"), -1, "clip must be greater than 0"),
    (("optimizer", "betas"), [0.9], "betas must be a list of"),
    (("optimizer", "betas"), [0.9, 1.0], "betas must be at most"),
    (("optimizer", "betas"), [0.9, math.nan], "betas must be a finite number"),
    (("evaluation", "lengths"), [10, 0], "lengths must be at least 1"),
    (("evaluation", "lengths"), 10, "lengths must be a list of"),
    (("curriculum", "stages"), [[5, 0]], "stages must be at least 1"),
    (("curriculum", "stages"), [[5]], "stages must be a list of"),
    (("positions", "gates"), "lstm", "gates must be one of 'gru', 'local'"),
    (("positions", "reset_start"), 1.0, "reset_start must be at most"),
    (("positions", "depths"), [0, "1"], "depths must be a list of"),
    (("model", "width"), 10**400, "width"),
    (("model",), [], "model must be an object"),
    (("task",), "copy", "task must be an object with a name"),
    (("task", "name"), "cpoy", "did you mean 'copy'"),
    (("task", "name"), ["copy"], "copy"),
    (("task", "size"), 3, "unknown setting 'task.size'"),
    (("encoding",), "prsm", "did you mean 'prism'"),
    (("encoding",), 7, "7"),
    (("optimizer", "learning_rate"), 1, "unknown setting 'optimizer.learning_rate'"),
    (("optimizer", "rat"), 1, "did you mean 'optimizer.rate'"),
    (("stepz",), 1, "did you mean 'steps'"),
]


def changed(path: tuple[str, ...], value: object) -> dict:
    data = copy.deepcopy(small_config().to_json())
    inner = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return data


@pytest.mark.parametrize(("path", "value", "sentence"), BAD, ids=lambda part: str(part)[:40])
def test_a_bad_value_is_refused_by_name(path, value, sentence):
    with pytest.raises(UserError) as caught:
        RunConfig.from_json(changed(path, value))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["task", "encoding", "positions"])
def test_what_has_no_default_must_be_there(key):
    data = small_config().to_json()
    del data[key]
    with pytest.raises(UserError, match=f"lacks '{key}'"):
        RunConfig.from_json(data)


@pytest.mark.parametrize("data", [None, 3, "copy", [], [1]])
def test_a_configuration_is_an_object(data):
    with pytest.raises(UserError):
        RunConfig.from_json(data)


def test_a_vocabulary_must_hold_the_tasks_alphabet():
    with pytest.raises(UserError, match=r"vocabulary must be at least 12, the symbols of copy; got 11"):
        small_config(model=ModelConfig(vocabulary=11))
    assert small_config(model=ModelConfig(vocabulary=12)).model.vocabulary == 12


@pytest.mark.parametrize("changes", [{"width": 10**9}, {"layers": 10**9}, {"heads": 10**12}, {"vocabulary": 2**70}])
def test_a_model_that_no_machine_holds_is_refused_before_it_is_built(changes):
    with pytest.raises(UserError, match=f"{next(iter(changes))} must be at most"):
        dataclasses.replace(ModelConfig(), **changes)


LEAF = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**400), 1e308, "copy", "nan", "NaN", "gru", "linear"])
)
JSON = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def places(value: object, at: tuple = ()) -> list[tuple]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([at] if at else []) + [place for key, inner in inside for place in places(inner, (*at, key))]


@st.composite
def mutated(draw: st.DrawFn, values: st.SearchStrategy) -> dict:
    """A good configuration with one to three things replaced, removed or added."""
    data = copy.deepcopy(draw(st.sampled_from(BASES)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(data) or [("steps",)]))
        inner = data
        for key in place[:-1]:
            inner = inner[key]
        action = draw(st.sampled_from(["replace"] * 6 + ["remove", "add"]))
        if action == "replace":
            inner[place[-1]] = draw(values)
        elif action == "remove":
            del inner[place[-1]]
        elif isinstance(inner, dict):
            inner[draw(st.text(max_size=8))] = draw(values)
    return data


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW_OK)
@given(mutated(JSON) | JSON)
@example({"task": {"name": {}}, "encoding": [], "positions": {}})
def test_any_json_is_a_configuration_or_one_sentence(data):
    try:
        config = RunConfig.from_json(data)
    except UserError:
        return
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


WORDS = ["gru", "local", "penalty", "normalised", "free", "full", "expected", "norm", "trained", "linear"]
LIKE = {bool: st.booleans(), int: st.integers(0, 9), float: st.floats(0, 4), str: st.sampled_from(WORDS),
        list: st.lists(st.integers(0, 3), max_size=3), type(None): st.integers(1, 9)}  # fmt: skip


@st.composite
def plausible(draw: st.DrawFn) -> dict:
    """A small configuration with some of its model's values replaced by others of their kind."""
    data = copy.deepcopy(draw(st.sampled_from(BASES)))
    for section in ("positions", "positions", "model"):
        if data[section]:
            key = draw(st.sampled_from(sorted(data[section])))
            data[section][key] = draw(LIKE[type(data[section][key])])
    return data


@settings(max_examples=60, deadline=None, suppress_health_check=SLOW_OK)
@given(plausible())
def test_a_configuration_that_exists_can_run(data):
    try:
        config = RunConfig.from_json(data)
        model = build(config)
    except UserError:
        return
    made = batch(config.task, seed=0, stream="train", step=0, size=2, max_length=10)
    with warnings.catch_warnings():  # a support of a few offsets is said to be small; that is not at stake here
        warnings.filterwarnings("ignore", message=".*piled up at the edge")
        loss, _ = completion_loss(model, made)
    penalty = model.encoding.penalty()
    (loss if penalty is None else loss + penalty).backward()
    assert torch.isfinite(loss)
