"""Rotary encodings against complex numbers, one pair at a time, and against x-transformers."""

import cmath
import dataclasses
import math
import warnings
from types import ModuleType

import pytest
import torch
from torch import Tensor

from prism.config import ModelConfig, preset
from prism.data import draw, vocabulary
from prism.encodings import Encoding, Stream, find_encoding
from prism.encodings.rope import Rope, RopeConfig
from prism.encodings.selective_rope import SelectiveRope, SelectiveRopeConfig
from prism.errors import UserError
from prism.tasks import all_tasks, find_task
from prism.transformer import Transformer
from tests.tolerances import assert_close, relative_error

BATCH, LAYERS, HEADS = 2, 2, 3


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def queries_and_keys(time: int, features: int) -> tuple[Tensor, Tensor]:
    return normal(BATCH, HEADS, time, features, seed=1), normal(BATCH, HEADS, time, features, seed=2)


def scores(encoding: Encoding, time: int, features: int, chunks: tuple[int, ...] = ()) -> Tensor:
    """All inner products of one layer's turned queries and keys, read whole or in chunks."""
    query, key = queries_and_keys(time, features)
    x = normal(BATCH, time, encoding.width, seed=3)
    stream, turned = encoding.start(time), []
    for size in chunks or (time,):
        here = slice(stream.seen, stream.seen + size)
        stream.time = size
        encoding.embed(x[:, here], stream)
        encoding.attention_input(x[:, here], 1, stream)
        turned.append(encoding.transform(query[:, :, here], key[:, :, here], 1, stream))
        stream.seen += size
    q, k = (torch.cat(parts, 2) for parts in zip(*turned, strict=True))
    return q @ k.mT


def turned_by(angle, time: int, features: int) -> Tensor:
    """sum_i Re(q_i conj(k_i) exp(i (angle(m, i) - angle(n, i)))), where q_i = q[2i] + i q[2i+1]."""
    query, key = queries_and_keys(time, features)
    out = torch.zeros(BATCH, HEADS, time, time, dtype=torch.float64)
    for b in range(BATCH):
        for h in range(HEADS):
            for m in range(time):
                for n in range(time):
                    for i in range(features // 2):
                        q = complex(*query[b, h, m, 2 * i : 2 * i + 2].tolist())
                        k = complex(*key[b, h, n, 2 * i : 2 * i + 2].tolist())
                        turn = cmath.exp(1j * (angle(b, h, m, i) - angle(b, h, n, i)))
                        out[b, h, m, n] += (q * k.conjugate() * turn).real
    return out


def rope(features: int, name: str = "rope", **options: object) -> Encoding:
    kind = find_encoding(name)
    return kind(HEADS * features, LAYERS, HEADS, features, kind.Config(**options)).double().eval()


def x_transformers() -> ModuleType:
    pytest.importorskip("x_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from x_transformers import x_transformers as module
    return module


# --- RoPE ---


@pytest.mark.parametrize("features", [2, 6, 8])
@pytest.mark.parametrize("base", [10_000.0, 17.0])
def test_rope_multiplies_pairs_by_complex_numbers(features, base):
    expected = turned_by(lambda b, h, m, i: m * base ** (-2 * i / features), 7, features)
    assert_close(scores(rope(features, base=base), 7, features), expected)
    assert_close(scores(rope(features, base=base), 7, features, (3, 1, 3)), expected)


@pytest.mark.parametrize(("options", "length", "theirs"), [
    ({}, 11, {}),
    ({"scaling": "interpolation", "trained": 8}, 20, {"interpolation_factor": 20 / 8}),
    ({"scaling": "ntk", "trained": 8}, 20, {"base_rescale_factor": 20 / 8}),
], ids=["plain", "interpolation", "ntk"])
def test_rope_is_that_of_x_transformers(options, length, theirs):
    module, features = x_transformers(), 8
    angles, scale = module.RotaryEmbedding(features, **theirs).forward_from_seq_len(length)
    query, key = queries_and_keys(length, features)
    q, k = (module.apply_rotary_pos_emb(x, angles, scale) for x in (query, key))
    encoding, stream = rope(features, **options), None
    stream = encoding.start(length)
    stream.time = length
    encoding.embed(normal(BATCH, length, encoding.width, seed=3), stream)
    for ours, expected in zip(encoding.transform(query, key, 0, stream), (q, k), strict=True):
        assert_close(ours, expected, dtype=torch.float32)  # their frequencies are


def test_rope_says_only_how_far_apart_tokens_are():
    encoding, features = rope(6), 6
    query, key = queries_and_keys(5, features)
    found = []
    for seen in (0, 41):
        stream = Stream(capacity=60, seen=seen, time=5)
        encoding.embed(normal(BATCH, 5, encoding.width, seed=3), stream)
        q, k = encoding.transform(query, key, 0, stream)
        found.append(q @ k.mT)
    assert_close(found[1], found[0])


@pytest.mark.parametrize("name", ["rope", "selective_rope", "randomized_rope"])
def test_an_odd_head_has_no_pairs(name):
    with pytest.raises(UserError, match="head_width must be even; got 7"):
        find_encoding(name)(21, LAYERS, HEADS, 7)


# --- Beyond the training length ---


@pytest.mark.parametrize(("name", "length"), [("rope_interpolated", 13), ("rope_ntk", 13), ("rope_ntk", 9)])
def test_scaling_turns_long_sequences_as_its_formula_says(name, length):
    features, trained = 6, 8

    def angle(b: int, h: int, m: int, i: int) -> float:
        if name == "rope_interpolated":
            return m * trained / length * 10_000 ** (-2 * i / features)
        return m * (10_000 * (length / trained) ** (features / (features - 2))) ** (-2 * i / features)

    expected = turned_by(angle, length, features)
    assert_close(scores(rope(features, name, trained=trained), length, features), expected)
    assert_close(scores(rope(features, name, trained=trained), length, features, (5, length - 5)), expected)
    assert relative_error(scores(rope(features), length, features), expected) > 1e-3


def test_ntk_interpolates_the_slowest_pair_and_leaves_the_fastest():
    base, pace = rope(32, "rope_ntk", trained=20)._scaled(200)
    assert pace == 1
    assert base ** (-30 / 32) == pytest.approx(10_000 ** (-30 / 32) * 20 / 200, rel=1e-12)


@pytest.mark.parametrize("name", ["rope_interpolated", "rope_ntk"])
@pytest.mark.parametrize(("trained", "length", "training"), [
    (8, 8, False), (8, 3, False), (5, 8, False), (0, 13, False), (4, 13, True),
])
def test_nothing_is_scaled_up_to_the_training_length_nor_in_training(name, trained, length, training):
    scaled = rope(6, name, trained=trained).train(training)
    assert torch.equal(scores(scaled, length, 6), scores(rope(6), length, 6))


def test_one_pair_has_no_base_to_grow():
    assert torch.equal(scores(rope(2, "rope_ntk", trained=2), 20, 2), scores(rope(2), 20, 2))


@pytest.mark.parametrize("kind", ["rope_interpolated", "rope_ntk"])
def test_a_scaled_model_reads_chunks_as_the_whole(kind):
    torch.manual_seed(0)
    chosen = find_encoding(kind)
    size = ModelConfig(width=12, layers=2, heads=2, head_width=6, vocabulary=7, start_token=True)
    model = Transformer(size, chosen(12, 2, 2, 6, chosen.Config(trained=8))).double().eval()
    tokens = torch.randint(7, (2, 15))
    cache = model.new_cache(15)
    parts = [model(chunk, cache) for chunk in tokens.split([4, 1, 8, 2], dim=1)]
    assert_close(torch.cat(parts, 1), model(tokens))


@pytest.mark.parametrize("task", all_tasks())
@pytest.mark.parametrize("name", ["rope", "rope_interpolated", "rope_ntk"])
def test_presets_know_how_many_tokens_training_shows(task, name):
    config = preset("quick", find_task(task)(), name)
    assert isinstance(config.positions, RopeConfig)
    split = vocabulary(config.task).split
    shown = max(len(split(one.prompt)) + len(split(one.completion)) - 1
                for one in draw(config.task, seed=5, stream="train", step=0, size=2_000, max_length=config.max_length))
    assert shown - 1 <= config.positions.trained <= shown + 1


@pytest.mark.parametrize("opens", [False, True])
def test_the_start_token_is_shown_too(opens):
    config = preset("quick", find_task("copy")(), "rope", max_length=10)
    given = dataclasses.replace(config, model=dataclasses.replace(config.model, start_token=opens))
    trained = Rope.preset("quick", given).positions.trained
    assert trained == 10 + 1 + 10 + opens  # digits, =, digits; the end token is asked for and never read


# --- Selective RoPE ---


def selective(width: int, features: int, **options: object) -> SelectiveRope:
    torch.manual_seed(4)
    encoding = SelectiveRope(width, LAYERS, HEADS, features, SelectiveRopeConfig(**options)).double().eval()
    for parameter in encoding.parameters():
        parameter.data.normal_(std=0.7)
    return encoding


def slow_angle(encoding: SelectiveRope, x: Tensor, b: int, h: int, t: int, i: int) -> Tensor:
    """The angle of pair i of head h at token t, straight from the definition."""
    config, width, pairs = encoding.config, encoding.width, encoding.head_width // 2
    down, up, channel = encoding.down[1].weight, encoding.up[1].weight, h * pairs + i

    def projected(s: int) -> Tensor:
        if s < 0:
            return torch.zeros((), dtype=torch.float64)
        total, part = torch.zeros((), dtype=torch.float64), width // HEADS
        for r in range(config.rank):
            for w in range(width):
                if width % HEADS == 0:
                    first = w // part * part
                    size = math.sqrt(sum(float(x[b, s, c]) ** 2 for c in range(first, first + part)) + 1e-6)
                else:
                    size = math.sqrt((sum(float(c) ** 2 for c in x[b, s]) + 1e-6) / HEADS)
                total = total + up[channel, r] * down[r, w] * x[b, s, w] / size
        return total

    turned = torch.zeros((), dtype=torch.float64)
    for s in range(t + 1):
        for lag in range(config.window):
            turned = turned + encoding.taps[1, config.window - 1 - lag, channel] * projected(s - lag)
    return turned * config.base ** (-2 * i / encoding.head_width)


@pytest.mark.parametrize(("width", "features", "options"), [
    (6, 4, {"rank": 2, "base": 50.0}), (7, 4, {"rank": 3, "window": 2}), (9, 2, {"rank": 1, "window": 1}),
], ids=str)
def test_selective_rope_sums_learned_rates(width, features, options):
    encoding, time = selective(width, features, **options), 6
    x = normal(BATCH, time, width, seed=3)
    angles = {(b, h, t, i): float(slow_angle(encoding, x, b, h, t, i).detach())
              for b in range(BATCH) for h in range(HEADS) for t in range(time) for i in range(features // 2)}
    expected = turned_by(lambda *place: angles[place], time, features)
    assert_close(scores(encoding, time, features).detach(), expected)
    for chunks in ((1,) * 6, (2, 3, 1)):
        assert_close(scores(encoding, time, features, chunks).detach(), expected)


def test_selective_rope_learns_as_its_definition_does():
    encoding, time = selective(6, 4, rank=2, window=3, base=50.0), 4
    x = normal(BATCH, time, 6, seed=3)
    upstream = normal(BATCH, HEADS, time, 2, seed=5)
    stream = encoding.start(time)
    encoding.attention_input(x, 1, stream)
    parameters = [encoding.down[1].weight, encoding.up[1].weight, encoding.taps]
    ours = torch.autograd.grad((stream.memory["angles"] * upstream).sum(), parameters)
    slow = sum(slow_angle(encoding, x, b, h, t, i) * upstream[b, h, t, i]
               for b in range(BATCH) for h in range(HEADS) for t in range(time) for i in range(2))
    for mine, expected in zip(ours, torch.autograd.grad(slow, parameters), strict=True):
        assert_close(mine, expected)


def test_constant_rates_make_selective_rope_rope():
    features, base = 6, 300.0
    encoding = selective(6, features, rank=1, window=1, base=base)
    x = torch.zeros(BATCH, 5, 6, dtype=torch.float64)
    x[..., 0] = 1.0
    with torch.no_grad():
        encoding.down[1].weight.zero_()[0, 0] = math.sqrt(1 + 1e-6)
        encoding.up[1].weight.fill_(1.0)
        encoding.taps.fill_(1.0)
    stream = encoding.start(5)
    encoding.attention_input(x, 1, stream)
    query, key = queries_and_keys(5, features)
    q, k = encoding.transform(query, key, 1, stream)
    assert_close((q @ k.mT).detach(), scores(rope(features, base=base), 5, features))


def test_selective_rope_starts_almost_as_nope():
    torch.manual_seed(0)
    encoding = SelectiveRope(64, 2, 2, 32).double()
    stream = encoding.start(50)
    encoding.attention_input(normal(2, 50, 64, seed=3), 0, stream)
    assert 0 < stream.memory["angles"].abs().max() < 0.05


def test_rope_is_a_rotation():
    assert isinstance(rope(8), Rope)
    query, _ = queries_and_keys(9, 8)
    encoding = rope(8)
    stream = Stream(capacity=9, time=9)
    encoding.embed(normal(BATCH, 9, encoding.width, seed=3), stream)
    turned, _ = encoding.transform(query, query, 0, stream)
    assert_close(turned.norm(dim=-1), query.norm(dim=-1))
