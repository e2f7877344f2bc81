"""What every positional encoding owes a Transformer. An encoding is tested here by being found."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism.config import ModelConfig
from prism.cursors import PrismConfig
from prism.encodings import Encoding, all_encodings
from prism.settings import Settings
from prism.transformer import Transformer
from tests.tolerances import assert_close, relative_error

BATCH, TIME, VOCABULARY = 3, 9, 11

# Each way to configure PRISM keeps the same promises.
PRISM = {
    "local": {"gates": "local", "window": 3},
    "local, window 1": {"gates": "local", "window": 1},
    "landmark": {"gates": "landmark", "window": 3, "landmarks": 2},
    "landmark, window 1": {"gates": "landmark", "window": 1, "landmarks": 5},
    "normalised": {"recurrence": "normalised"},
    "penalty": {"recurrence": "penalty"},
    "free": {"recurrence": "free"},
    "two PRISM layers": {"depths": (0, 3)},
    "a late PRISM layer": {"depths": (2,)},
    "copy": {"copy_every": 2},
    "copy, all cursors": {"copy_every": 1},
    "copy, trained keys": {"copy_every": 2, "copy_key": "trained"},
    "absolute": {"absolute": True},
    "joint norm": {"norm": "joint"},
    "full table": {"superposition": "full"},
    "expected position": {"superposition": "expected", "absolute": True},
    "positions only": {"content": False},
    "learned start": {"start_spread": 3},
    "small support": {"support": 3, "copy_every": 2, "start_spread": 5, "absolute": True},
    "large support": {"support": 20, "copy_every": 2},
    "everything": {"depths": (0, 3), "copy_every": 2, "copy_key": "trained", "absolute": True, "start_spread": 2},
}


def build(
    encoding: type[Encoding], config: Settings | None = None, seed: int = 0, start_token: bool = False
) -> Transformer:
    """A small model in float64 whose parameters are all far from their start, so that every part has its say."""
    torch.manual_seed(seed)
    size = ModelConfig(width=12, layers=4, heads=2, head_width=8, vocabulary=VOCABULARY, start_token=start_token)
    model = Transformer(size, encoding(12, 4, 2, 8, config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prism_config(**options: object) -> PrismConfig:
    return PrismConfig(**{"gate_features": 6, "cursors": 2, "pe_width": 16, "copy_width": 4,
                          "copy_null_start": 1.0, **options})


found = [pytest.param((kind, None), id=name) for name, kind in all_encodings().items()]
options = [
    pytest.param((all_encodings()["prism"], prism_config(**chosen)), id=f"prism: {label}",
                 marks=pytest.mark.filterwarnings("ignore:up to"))
    for label, chosen in PRISM.items()
]


started = [
    pytest.param((all_encodings()[name], config, 0, True), id=f"{name}, start token")
    for name, config in (("nope", None), ("sinusoidal", None), ("prism", prism_config(copy_every=2, depths=(0, 2))))
]


@pytest.fixture(params=[*found, *options, *started])
def model(request) -> Transformer:
    return build(*request.param)


def tokens(batch: int = BATCH, time: int = TIME, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


# --- Promises ---


def test_a_later_token_never_changes_an_earlier_logit(model):
    before = tokens()
    for place in (1, TIME // 2, TIME - 1):
        after = before.clone()
        after[:, place] = (after[:, place] + 1) % VOCABULARY
        here, there = model(before), model(after)
        assert_close(there[:, :place], here[:, :place])
        assert relative_error(there[:, place], here[:, place]) > 1e-3


@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, TIME - 5], [TIME - 1, 1]], ids=str)
def test_chunks_with_a_cache_give_what_the_whole_gives(model, sizes):
    whole, cache = model(tokens()), model.new_cache(TIME)
    parts = [model(chunk, cache) for chunk in tokens().split(sizes, dim=1)]
    assert_close(torch.cat(parts, 1), whole)
    assert cache.stream.seen == TIME + model.config.start_token


def test_a_cached_key_is_as_wide_as_the_encoding_says(model):
    cache = model.new_cache(TIME)
    with torch.no_grad():
        model(tokens(), cache)
    widths = [key.shape[3] for key in cache.keys.values()]
    assert max(widths) == model.encoding.key_width(TIME)


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


def test_a_pass_leaves_nothing_behind(model):
    first = model(tokens())
    model.train()
    assert model(tokens(2, 5)).isfinite().all()
    model.eval()
    assert torch.equal(model(tokens()), first)


def test_weights_saved_and_loaded_are_the_same_model(model):
    other = build(type(model.encoding), model.encoding.config, 1, model.config.start_token)
    assert relative_error(other(tokens()), model(tokens())) > 1e-3
    saved = {name: copy.deepcopy(tensor) for name, tensor in model.state_dict().items()}
    other.load_state_dict(saved, strict=True)
    assert torch.equal(other(tokens()), model(tokens()))


def test_gradients_reach_every_parameter(model):
    model.train()
    loss = F.cross_entropy(model(tokens(4, TIME)).flatten(0, 1), tokens(4, TIME, seed=2).flatten())
    penalty = model.encoding.penalty()
    (loss if penalty is None else loss + penalty).backward()
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


def test_optimizer_groups_share_no_parameter(model):
    own = {id(parameter) for parameter in model.encoding.parameters()}
    grouped = [id(parameter) for group in model.encoding.optimizer_groups() for parameter in group["params"]]
    assert set(grouped) <= own
    assert len(set(grouped)) == len(grouped)


@pytest.mark.parametrize("kind", all_encodings().values(), ids=all_encodings())
def test_an_encoding_introduces_itself(kind):
    assert kind.summary
    assert kind.citation
    assert "\n" not in kind.summary
    assert kind.Config() == kind.Config()
