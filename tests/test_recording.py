"""Recordings against what is computed from the weights, or from other recordings, by other means.

The oracles are numpy: Algorithm 1 by dense matrices, Algorithms 2 to 4 by the kernel of the sinusoids, softmax in full.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from prism.architectures.lstm import Lstm, LstmConfig
from prism.config import ModelConfig
from prism.cursors import CursorState, PrismConfig, PrismLayer
from prism.encodings import Encoding, all_encodings
from prism.encodings.encoding import Stream
from prism.encodings.prism import Prism
from prism.errors import RunError, UserError
from prism.inside import Recording, record, recording
from prism.transformer import Transformer
from tests.histogram_oracles import Case, dense_scan
from tests.tolerances import FUSED, assert_close

BATCH, TIME, VOCABULARY, LAYERS, HEADS, WIDTH, HEAD_WIDTH = 2, 8, 11, 3, 2, 12, 6
SMALL = {"gate_features": 6, "cursors": 2, "pe_width": 12, "superposition": "full", "copy_width": 4,
         "copy_null_start": 0.5, "reset_start": 0.1}
LATER = np.triu(np.ones((TIME, TIME), dtype=bool), 1)  # keys still to come
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "local gates": {"gates": "local"},
    "copy": {"copy_every": 3},
    "copy, trained keys": {"copy_every": 2, "copy_key": "trained"},
    "two PRISM layers": {"depths": (0, 2), "copy_every": 2},
    "positions only, later": {"content": False, "depths": (1,)},
    "absolute": {"absolute": True},
}


def build(kind: type[Encoding], config: Any = None, start_token: bool = False) -> Any:
    """A model in float64, every parameter away from its start."""
    torch.manual_seed(0)
    size = ModelConfig(width=WIDTH, layers=LAYERS, heads=HEADS, head_width=HEAD_WIDTH, vocabulary=VOCABULARY,
                       start_token=start_token)
    model = Transformer(size, kind(WIDTH, LAYERS, HEADS, HEAD_WIDTH, config)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def prism(start_token: bool = False, **options: Any) -> Any:
    model = build(Prism, PrismConfig(**{**SMALL, **options}), start_token)
    with torch.no_grad():
        model.encoding.alpha[:, 0] *= -1  # its sign means nothing
    return model


def tokens(batch: int = BATCH, time: int = TIME, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def visible(scores: Tensor | np.ndarray) -> Tensor:
    """What lies on and below the diagonal, in a row."""
    return torch.from_numpy(np.asarray(scores)[..., ~LATER])


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS)
def model(request) -> Any:
    return prism(**request.param)


# --- What is recorded is what is ---


@pytest.mark.parametrize("name", ["prism", "nope", "rope", "alibi", "t5", "relative", "cable"])
def test_attention_is_the_softmax_of_the_scores_of_visible_keys(name):
    model = prism() if name == "prism" else build(all_encodings()[name])
    seen = record(model, tokens())
    for layer in range(LAYERS):
        scores, attention = (seen[f"layer.{layer}.{what}"].numpy() for what in ("scores", "attention"))
        assert np.isneginf(scores[..., LATER]).all()
        assert np.isfinite(visible(scores).numpy()).all()
        assert_close(torch.from_numpy(attention), softmax(scores))


def test_scores_are_the_recorded_queries_and_keys_times_one_another(model):
    seen = record(model, tokens())
    for layer in range(LAYERS):
        query, key = (seen[f"layer.{layer}.{what}"].numpy() for what in ("query", "key"))
        expected = np.einsum("bhqw,bhkw->bhqk", query, key)
        assert_close(visible(seen[f"layer.{layer}.scores"]), visible(expected))


def test_scores_have_a_part_from_content_and_a_part_from_positions(model):
    """eq:hybrid-score, its position part from the recorded histograms by the kernel f(i) . f(j) alone."""
    seen, config, first = record(model, tokens()), model.encoding.config, model.encoding.config.depths[0]
    entering = [seen["embedding"], *(seen[f"layer.{layer}.out"] for layer in range(LAYERS))]
    assert not [name for name in seen if "scores." in name and int(name.split(".")[1]) < first]
    for layer in range(first, LAYERS):
        content, position = content_scores(model, layer, entering[layer]), position_scores(seen, config, layer)
        mu = seen["prism.mu"][layer - first].numpy()[:, None, None]
        parts = {"content": mu * content, "position": (1 - mu) * position}
        for part, expected in parts.items():
            recorded = seen[f"layer.{layer}.scores.{part}"]
            assert np.isneginf(recorded.numpy()[..., LATER]).all()
            if config.content or part == "position":
                assert_close(visible(recorded), visible(expected))
            else:
                assert not visible(recorded).any()
        total = sum(seen[f"layer.{layer}.scores.{part}"] for part in parts)
        assert_close(visible(total), visible(seen[f"layer.{layer}.scores"]))


def content_scores(model: Any, layer: int, entering: Tensor) -> np.ndarray:
    attention = model.blocks[layer].attention
    with torch.no_grad():
        projected = attention.project(model.blocks[layer].attention_norm(entering)).numpy()
    query, key, _ = projected.reshape(BATCH, TIME, 3, HEADS, HEAD_WIDTH).transpose(2, 0, 3, 1, 4)
    return np.einsum("bhqw,bhkw->bhqk", query, key) / math.sqrt(HEAD_WIDTH)


def position_scores(seen: Recording, config: PrismConfig, layer: int) -> np.ndarray:
    depth = max(depth for depth in config.depths if depth <= layer)
    query, key = (seen[f"prism.{depth}.histograms.{which}"].numpy() for which in ("query", "key"))
    offsets = np.arange(query.shape[-1]) - query.shape[-1] // 2
    frequencies = 10000.0 ** (-np.arange(0, config.pe_width, 2) / config.pe_width)
    kernel = np.cos(frequencies[:, None, None] * (offsets[:, None] - offsets[None])).sum(0)
    alpha, channels = seen["prism.alpha"][layer - config.depths[0]].numpy(), config.cursors + config.absolute
    scores = np.zeros((BATCH, HEADS, TIME, TIME))
    for head in range(HEADS):
        for channel in range(channels):
            if channel < config.cursors:
                number = ((layer - depth) * HEADS + head) * config.cursors + channel
                asking, asked = query[:, number], key[:, number]
            else:  # the absolute one
                asking = asked = np.tile(np.eye(len(offsets))[len(offsets) // 2 + 1 :][:TIME], (BATCH, 1, 1))
            met = np.einsum("bqi,ij,bkj->bqk", asking, kernel, asked) * (2 / channels)
            scores[:, head] += alpha[head, channel] * met / math.sqrt(channels * config.pe_width)
    return scores


def test_histograms_are_what_the_recorded_gates_make_of_them(model):
    """Algorithm 1 by dense matrices, from recorded gates, copy attention and exponents."""
    seen, config = record(model, tokens()), model.encoding.config
    for depth in config.depths:
        keys = seen[f"prism.{depth}.histograms.key"]
        for which in ("query", "key"):
            gates, histograms, gamma = (
                seen[f"prism.{depth}.{what}.{which}"] for what in ("gates", "histograms", "gamma")
            )
            assert_close(gates[..., :3].sum(-1), np.ones(gates.shape[:3]))
            for cursor in range(gates.shape[1]):
                if gamma[cursor].isinf():
                    continue
                copied = no_copy = None
                if which == "query" and config.copy_every and (cursor + 1) % config.copy_every == 0:
                    slot = cursor // config.copy_every
                    weights, no_copy = seen[f"prism.{depth}.copy"][:, slot].split((TIME, 1), dim=-1)
                    no_copy = no_copy[..., 0]
                    assert_close(weights.sum(-1) + no_copy, np.ones((BATCH, TIME)))
                    copied = torch.einsum("bts,bsn->btn", weights, keys[:, cursor])[:, None]
                    no_copy = no_copy[:, None]
                start = torch.zeros(BATCH, 1, keys.shape[-1], dtype=torch.float64)
                start[..., keys.shape[-1] // 2] = 1
                one = gates[:, cursor, None]
                case = Case(start, one[..., 3], one[..., :3], gamma[cursor, None], no_copy, copied)
                assert_close(histograms[:, cursor, None], dense_scan(case), what=f"{depth} {which} {cursor}")


def test_gates_are_those_of_the_prism_layer_in_the_cursors_order():
    """Cursor by cursor, from the gates' own network; a key cursor that only increments says so."""
    model = prism(copy_every=3)
    seen, layer = record(model, tokens()), model.encoding.prism_layers["0"]
    cursors = LAYERS * HEADS * SMALL["cursors"]
    copying = [cursor for cursor in range(cursors) if cursor % 3 == 2]
    rest = [cursor for cursor in range(cursors) if cursor % 3 != 2]
    with torch.no_grad():
        logits = layer.gates.project if hasattr(layer.gates, "project") else layer.cursor_gates.project
        features, _ = layer.gates(seen["embedding"], None)
        made = logits(features).numpy().reshape(BATCH, TIME, -1, 4).transpose(0, 2, 1, 3)
    action, reset = softmax(made[..., :3]), 1 / (1 + np.exp(-made[..., 3:]))
    expected = np.concatenate((action, reset), -1)
    for place, (which, cursor) in enumerate(
        [*(("query", one) for one in rest), *(("key", one) for one in rest), *(("query", one) for one in copying)]
    ):
        assert_close(seen[f"prism.0.gates.{which}"][:, cursor], expected[:, place])
        exponent = 1 + math.log1p(math.exp(layer.raw_gamma[place].item()))
        assert seen[f"prism.0.gamma.{which}"][cursor].item() == pytest.approx(exponent, rel=1e-12)
    for cursor in copying:
        assert torch.equal(seen["prism.0.gates.key"][:, cursor], torch.tensor([1.0, 0, 0, 0]).expand(BATCH, TIME, 4))
        assert seen["prism.0.gamma.key"][cursor].isinf()
        at = seen["prism.0.histograms.key"][:, cursor].argmax(-1) - TIME
        assert torch.equal(at, torch.arange(1, TIME + 1).expand(BATCH, TIME))


def test_parameters_are_the_models_own(model):
    seen = record(model, tokens(), ["prism.alpha", "prism.mu"])
    assert_close(seen["prism.alpha"], np.abs(model.encoding.alpha.detach().numpy()))
    if model.encoding.config.content:
        assert_close(seen["prism.mu"], 1 / (1 + np.exp(-model.encoding.mu_logit.detach().numpy())))
    else:
        assert not seen["prism.mu"].any()


def test_residual_stream_and_logits_are_those_of_the_pass():
    model = prism()
    seen = record(model, tokens())
    with torch.no_grad():
        assert torch.equal(seen["logits"], model(tokens()))
        out = model.norm(seen[f"layer.{LAYERS - 1}.out"]) @ model.embedding.weight.T
        assert_close(seen["embedding"], (model.embedding(tokens()) * math.sqrt(WIDTH)).numpy())
    assert_close(seen["logits"], out.numpy())


def test_a_start_token_is_first_everywhere_but_in_the_logits():
    seen = record(prism(start_token=True, copy_every=3), tokens())
    assert seen["logits"].shape[1] == TIME
    assert seen["embedding"].shape[1] == TIME + 1
    assert seen["layer.0.attention"].shape[2:] == (TIME + 1, TIME + 1)
    assert seen["prism.0.histograms.query"].shape[2:] == (TIME + 1, 2 * (TIME + 1) + 1)
    assert seen["prism.0.copy"].shape[2:] == (TIME + 1, TIME + 2)


# --- Chunks ---


@pytest.mark.parametrize("sizes", [[1] * TIME, [4, 1, TIME - 5]], ids=str)
@pytest.mark.parametrize("start_token", [False, True], ids=["", "start token"])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_chunks_with_a_cache_give_the_recording_of_the_whole(options, sizes, start_token):
    model = prism(start_token, **options)
    whole = record(model, tokens())
    with torch.no_grad(), recording(model) as chunks:
        cache = model.new_cache(TIME)
        for chunk in tokens().split(sizes, dim=1):
            model(chunk, cache)
    assert_same(chunks, whole)


@pytest.mark.parametrize("name", sorted(all_encodings()))
def test_a_model_of_any_encoding_is_recorded_whole_and_in_chunks_and_not_changed(name):
    model = build(all_encodings()[name])
    with torch.no_grad():
        plain = model(tokens())
    whole = record(model, tokens())
    assert torch.equal(whole["logits"], plain)
    assert (whole["layer.1.attention"] >= 0).all()
    assert whole["layer.1.attention"].amax() > 0
    assert not whole["layer.1.attention"].triu(1).any()
    with torch.no_grad(), recording(model) as chunks:
        cache = model.new_cache(TIME)
        parts = [model(chunk, cache) for chunk in tokens().split([3, 1, TIME - 4], dim=1)]
    assert_close(torch.cat(parts, 1), plain.numpy())
    assert_same(chunks, whole)


def assert_same(recorded: Recording, expected: Recording) -> None:
    assert list(recorded) == list(expected)
    for name, value in expected.items():
        hidden = value.isinf() | value.isnan()
        assert torch.equal(hidden, recorded[name].isinf() | recorded[name].isnan()), name
        assert_close(recorded[name].masked_fill(hidden, 0), value.masked_fill(hidden, 0), what=name)


def test_what_a_cache_has_read_before_the_recording_is_not_made_up():
    """Its keys are in the cache, but their content and their positions are no longer apart."""
    model = prism(copy_every=3)
    whole, read = record(model, tokens()), 3
    with torch.no_grad():
        cache = model.new_cache(TIME)
        model(tokens()[:, :read], cache)
        with recording(model) as seen:
            model(tokens()[:, read:5], cache)
            model(tokens()[:, 5:], cache)
        for name in ("layer.1.attention", "layer.1.scores", "prism.0.histograms.query", "prism.0.copy"):
            late = whole[name][:, :, read:]
            assert_close(seen[name].clamp_min(-1e9), late.clamp_min(-1e9).numpy(), what=name)
        for part in ("content", "position"):
            scores = seen[f"layer.1.scores.{part}"]
            assert scores[..., :read].isnan().all()
            late = whole[f"layer.1.scores.{part}"][:, :, read:, read:]
            assert_close(scores[..., read:].clamp_min(-1e9), late.clamp_min(-1e9).numpy())


def test_a_recording_is_off_when_it_is_over():
    model = prism()
    cache = model.new_cache(TIME)
    with torch.no_grad(), recording(model, "logits") as seen:
        model(tokens()[:, :3], cache)
    model(tokens()[:, 3:], cache)
    assert seen["logits"].shape[1] == 3
    assert model.recorder is None
    assert cache.stream.recorder is None
    assert not model._forward_pre_hooks
    with torch.no_grad(), recording(model, "logits") as seen:  # the cache is made inside, and used outside
        cache = model.new_cache(TIME)
        model(tokens()[:, :3], cache)
    model(tokens()[:, 3:], cache)
    assert seen["logits"].shape[1] == 3
    with pytest.raises(IndexError), recording(model):
        model(tokens() + VOCABULARY)
    assert model.recorder is None
    assert not model._forward_pre_hooks


def test_a_recording_within_a_recording_hears_alone():
    model = prism()
    with torch.no_grad(), recording(model, "layer.0.out") as outer:
        model(tokens())
        with recording(model, "logits") as inner:
            model(tokens(seed=2))
    assert list(outer) == ["layer.0.out"]
    assert outer["layer.0.out"].shape[1] == TIME
    assert_close(inner["logits"], model(tokens(seed=2)).detach().numpy())


def test_two_batches_are_not_taken_for_one():
    model = prism()
    for other in (lambda: model(tokens()), lambda: model(tokens()[:, :1], model.new_cache(TIME))):
        with torch.no_grad(), recording(model):
            model(tokens())
            with pytest.raises(UserError, match="each in a block of its own"):
                other()


# --- What is kept ---


def test_patterns_choose():
    model = prism(depths=(0, 2))
    assert list(record(model, tokens(), "logits")) == ["logits"]
    chosen = record(model, tokens(), ["layer.*.attention", "prism.2.gates.k*"])
    assert list(chosen) == ["layer.0.attention", "layer.1.attention", "prism.2.gates.key", "layer.2.attention"]
    assert len(record(model, tokens())) > 30


def test_an_unknown_name_is_said_with_those_there_are():
    model = prism()
    with pytest.raises(UserError, match=r"nothing of the name 'layer\.7\.\*' was there to record; what was: logits"):
        record(model, tokens(), ["logits", "layer.7.*"])
    with pytest.raises(KeyError, match=r"prism\.mu was not recorded; what was: logits"):
        record(model, tokens(), "logits")["prism.mu"]


def test_an_architecture_that_says_nothing_of_itself_is_refused():
    model = Lstm(LstmConfig(width=8, vocabulary=VOCABULARY))
    with pytest.raises(UserError, match=r"nothing of the name '\*' was there to record; what was: nothing"):
        record(model, tokens())


def test_memory_is_bounded_and_nothing_is_kept_by_halves():
    model = prism()
    full = record(model, tokens())
    assert full.bytes == sum(value.numel() * 8 for value in full.values())
    assert record(model, tokens(), most=full.bytes).bytes == full.bytes
    with torch.no_grad(), pytest.raises(
        RunError, match=r"recording logits of shape \[2, 8, 11\] takes the recording to 1 MiB, and 1 are allowed: "
    ), recording(model, most=full.bytes - 1) as seen:
        model(tokens())
    assert not seen
    assert seen.bytes == 0
    assert model.recorder is None
    assert len(record(model, tokens())) == len(full)


def test_a_parameter_counts_once_however_many_chunks_there_are():
    model = prism()
    with torch.no_grad(), recording(model, ["prism.alpha", "prism.mu", "prism.0.gamma.*"]) as seen:
        cache = model.new_cache(TIME)
        for chunk in tokens().split(1, dim=1):
            model(chunk, cache)
    assert seen["prism.alpha"].shape == (LAYERS, HEADS, SMALL["cursors"])
    assert seen.bytes == 8 * (12 + 6 + 2 * 12)


def test_what_is_kept_is_a_copy_on_the_host_without_a_graph():
    model = prism()
    with recording(model, ["logits", "prism.0.histograms.query"]) as seen:
        logits = model(tokens())
    before = seen["logits"].clone()
    with torch.no_grad():
        logits.zero_()
    assert torch.equal(seen["logits"], before)
    assert not any(value.requires_grad for value in seen.values())
    histograms = seen["prism.0.histograms.query"]
    assert histograms.untyped_storage().nbytes() == histograms.numel() * 8  # not the whole it was a part of


# --- Who records nothing pays nothing ---


def test_nothing_is_noted_while_nobody_records(monkeypatch):
    model = prism(copy_every=3)

    def noted(*_: Any) -> None:
        raise AssertionError("computed for nobody")

    for owner, name in ((Recording, "note"), (Recording, "wants"), (Prism, "_note"), (Prism, "_note_scores"),
                        (PrismLayer, "_note_gates")):
        monkeypatch.setattr(owner, name, noted)
    model(tokens()).sum().backward()
    model.encoding.prism_layers["0"](torch.randn(1, 3, WIDTH).double(), 3, 0, CursorState())


class Counted(TorchDispatchMode):
    """How many operations there were."""

    count = 0

    def __torch_dispatch__(self, function, types, given=(), named=None):
        self.count += 1
        return function(*given, **(named or {}))


def test_nothing_is_computed_for_a_stream_that_nobody_records():
    layer, counts = prism(copy_every=3).encoding.prism_layers["0"], []
    for stream in (None, Stream(TIME)):
        with Counted() as counted:
            layer(torch.ones(1, 3, WIDTH).double(), TIME, 0, CursorState(), stream)
        counts.append(counted.count)
    assert counts[0] == counts[1] > 0


def test_a_model_scored_at_once_is_recorded_by_the_other_way(monkeypatch):
    """As on a GPU, where histograms are not kept unless somebody records."""
    pytest.importorskip("triton")
    fuses: Callable[..., bool] = lambda self, x, layer, stream: stream.recorder is None  # noqa: E731
    monkeypatch.setattr(Prism, "_fuses", fuses)
    model = build(Prism, PrismConfig(**{**SMALL, "superposition": "low_rank"})).float()
    with torch.no_grad():
        at_once = model(tokens())
    seen = record(model, tokens())
    assert_close(seen["logits"], at_once.numpy(), tolerance=FUSED)
    assert "prism.0.histograms.key" in seen


def test_recording_leaves_the_mode_and_draws_nothing():
    model = prism().train()
    state = torch.get_rng_state()
    record(model, tokens(), "logits")
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UserError):
        record(model, tokens(), "nothing")
    assert model.training


# --- An encoding of your own ---


class Nearness(Encoding):
    """A user's: notes a thing with four dimensions, one with three, and one that is only a number."""

    name, summary, citation, extrapolates = "nearness", "for a test", "none", True

    def bias(self, layer, stream):
        distance = stream.distances(torch.device("cpu")).double()
        if layer == 1:
            stream.note("mine.distance", distance[None, None])
            stream.note("mine.total", distance.sum())
        return -distance.abs()[None, None]

    def embed(self, x, stream):
        stream.note("mine.squares", x * x)
        return x


def test_an_encoding_of_your_own_notes_what_it_likes():
    model = build(Nearness)
    seen = record(model, tokens(), "mine.*")
    expected = np.arange(TIME)[:, None] - np.arange(TIME)[None]
    assert_close(seen["mine.distance"][0, 0], expected)
    assert seen["mine.squares"].shape == (BATCH, TIME, WIDTH)
    with torch.no_grad(), recording(model, "mine.*") as chunks:
        cache = model.new_cache(TIME)
        for chunk in tokens().split(3, dim=1):
            model(chunk, cache)
    assert_close(chunks["mine.distance"][0, 0].tril(), np.tril(expected))
    assert_close(chunks["mine.squares"], seen["mine.squares"].numpy())
    assert chunks["mine.total"].item() == expected[6:].sum()


def test_a_stream_of_your_own_can_be_recorded():
    """A Transformer of one's own has no recorder; the stream it gives to PRISM has."""
    positions = prism().encoding
    x = torch.randn(BATCH, TIME, WIDTH, dtype=torch.float64)
    stream, seen = positions.start(TIME), Recording("prism.*")
    stream.recorder = seen
    positions.observe(x, 0, stream)
    query, key = positions.histograms(0, positions.read(x))
    assert_close(seen["prism.0.histograms.query"], query.detach().numpy())
    assert_close(seen["prism.0.histograms.key"], key.detach().numpy())
