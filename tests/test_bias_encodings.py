"""Encodings that add to scores or embeddings, against their papers' formulas written out pair by pair.

The oracles below loop over heads, queries and keys with plain numbers; none shares code with what it tests.
"""

import dataclasses
import math
import warnings
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prism.config import ModelConfig, RunConfig, preset
from prism.encodings import Encoding, Stream, find_encoding
from prism.encodings.alibi import Alibi
from prism.encodings.dape import Dape, DapeConfig
from prism.encodings.fire import Fire, FireConfig
from prism.encodings.hard_alibi import HardAlibi, HardAlibiConfig
from prism.encodings.kerple import Kerple, KerpleConfig
from prism.encodings.learned import Learned, LearnedConfig
from prism.encodings.sandwich import Sandwich, SandwichConfig
from prism.encodings.t5 import T5, T5Config, bucket_starts
from prism.errors import TooLong, UserError
from prism.ops.attention import attend, visible
from prism.tasks import find_task
from prism.transformer import Transformer
from tests.tolerances import assert_close

LAYERS = 3


def x_transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers.x_transformers")


def made(kind: type[Encoding], heads: int, config: object = None, seed: int = 0) -> Encoding:
    """In float64, parameters far from their start."""
    torch.manual_seed(seed)
    encoding = kind(heads * 4, LAYERS, heads, 4, config).double().eval()
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.mul_(1 + 0.5 * torch.rand_like(parameter)).add_(0.1 * torch.randn_like(parameter).abs())
    return encoding


def chunk(encoding: Encoding, seen: int, time: int) -> Stream:
    stream = encoding.start(seen + time)
    stream.seen, stream.time = seen, time
    return stream


def random_scores(heads: int, seen: int, time: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(batch, heads, time, seen + time, dtype=torch.float64, generator=generator)


def weights(encoding: Encoding, scores: Tensor, layer: int, seen: int) -> Tensor:
    """A layer's attention weights, as the Transformer makes them of inner products."""
    time, keys = scores.shape[2:]
    stream = chunk(encoding, seen, time)
    return encoding.weigh(encoding.score(scores, layer, stream), visible(time, keys, scores.device), layer, stream)


def slow_weights(scores: Tensor, seen: int, change) -> Tensor:
    """Softmax over visible keys, row by row; `change(scores of all heads, i, j)` lists the changed scores."""
    batch, heads, time, keys = scores.shape
    rows = []
    for b in range(batch):
        for q in range(time):
            pairs = [change([scores[b, h, q, j] for h in range(heads)], seen + q, j) for j in range(seen + q + 1)]
            for h in range(heads):
                powers = [torch.exp(torch.as_tensor(pair[h], dtype=scores.dtype)) for pair in pairs]
                nothing = [torch.zeros((), dtype=scores.dtype)] * (keys - len(powers))
                rows.append(torch.stack([power / sum(powers) for power in powers] + nothing))
    return torch.stack(rows).view(batch, time, heads, keys).transpose(1, 2)


def slow_bias(bias):
    """The change that adds `bias(h, i, j)`."""
    return lambda scores, i, j: [score + bias(h, i, j) for h, score in enumerate(scores)]


def gradients(output: Tensor, module: nn.Module) -> dict[str, Tensor]:
    upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(3))
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad((output * upstream).sum(), parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, found, strict=True))


def assert_same_weights_and_gradients(encoding: Encoding, change, layer: int, seen: int, time: int) -> None:
    scores = random_scores(encoding.heads, seen, time)
    fast, slow = weights(encoding, scores, layer, seen), slow_weights(scores, seen, change)
    assert_close(fast, slow)
    ours, theirs = gradients(fast, encoding), gradients(slow, encoding)
    assert sum(int(each.any()) for each in theirs.values()) > 0
    for name, expected in theirs.items():
        assert_close(ours[name], expected, tolerance=1e-10, what=name)  # sums of many terms that cancel


# --- ALiBi ---


def slow_slopes(heads: int) -> list[float]:
    """The recursion of the authors' code: a ratio multiplied up, and a longer list's every other entry."""
    if heads & (heads - 1) == 0:
        ratio = 2.0 ** (-8 / heads)
        return [ratio * ratio**k for k in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slow_slopes(below) + slow_slopes(2 * below)[::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12])
@pytest.mark.parametrize(("seen", "time"), [(0, 7), (4, 3)])
def test_alibi_is_the_paper(heads, seen, time):
    slopes = slow_slopes(heads)
    scores = random_scores(heads, seen, time)
    expected = slow_weights(scores, seen, slow_bias(lambda h, i, j: -slopes[h] * (i - j)))
    assert_close(weights(made(Alibi, heads), scores, 1, seen), expected)


@pytest.mark.parametrize("heads", [*range(1, 18), 24, 32])
def test_alibi_is_x_transformers(heads):
    theirs = x_transformers().AlibiPositionalBias(heads)(5, 13)
    ours = Alibi(heads * 4, LAYERS, heads)
    bias = ours.bias(2, chunk(ours, 8, 5))[0]
    past = visible(5, 13, bias.device)
    assert_close(bias * past, theirs * past)


# --- T5 ---


def slow_bucket(distance: int, buckets: int, farthest: int) -> int:
    """As T5 has it: logarithms, rounded down; a nudge undoes what rounding takes from whole numbers."""
    alone = buckets // 2
    if distance < alone:
        return distance
    place = math.log(distance / alone) / math.log(farthest / alone) * (buckets - alone)
    return min(buckets - 1, alone + math.floor(place + 1e-9))


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (2, 5), (7, 50), (16, 4_096), (20, 12), (6, 81)])
def test_t5_buckets(buckets, farthest):
    starts = bucket_starts(buckets, farthest)
    assert len(starts) == buckets - 1
    for distance in range(farthest + 70):
        assert sum(start <= distance for start in starts) == slow_bucket(distance, buckets, farthest), distance


@pytest.mark.parametrize(("seen", "time", "config"), [(0, 9, None), (150, 2, None), (5, 8, T5Config(6, 10))])
def test_t5_is_the_paper(seen, time, config):
    encoding = made(T5, 3, config)
    options = encoding.config

    def bias(h: int, i: int, j: int) -> Tensor:
        return encoding.table[slow_bucket(i - j, options.buckets, options.max_distance), h]

    assert_same_weights_and_gradients(encoding, slow_bias(bias), 0, seen, time)
    stream = chunk(encoding, seen, time)
    assert torch.equal(encoding.bias(0, stream), encoding.bias(LAYERS - 1, stream)), "layers share one table"


@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (3, 300), (40, 200)])
def test_t5_is_x_transformers(queries, keys):
    ours = made(T5, 5)
    theirs = x_transformers().RelativePositionBias(scale=1, causal=True, heads=5).double()
    theirs.relative_attention_bias.weight.data = ours.table.data
    past = visible(queries, keys, ours.table.device)
    bias = ours.bias(0, chunk(ours, keys - queries, queries))[0]
    assert_close(bias * past, theirs(queries, keys) * past)


def test_t5_refuses_a_last_bucket_among_the_first():
    with pytest.raises(UserError, match="greater than 16"):
        T5Config(max_distance=16)


# --- KERPLE ---


def slow_kerple(penalty: nn.Module):
    return lambda h, i, j: -penalty.strength[h] * torch.log(1 + penalty.rate[h] * (i - j))


@pytest.mark.parametrize(("seen", "time"), [(0, 8), (30, 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_kerple_is_the_paper(seen, time, shared):
    encoding = made(Kerple, 3, KerpleConfig(shared=shared))
    assert len(encoding.penalties) == (1 if shared else LAYERS)
    bias = slow_kerple(encoding.penalties[0 if shared else 2])
    assert_same_weights_and_gradients(encoding, slow_bias(bias), 2, seen, time)


@pytest.mark.parametrize("encoding", [made(Kerple, 2), made(Dape, 2)], ids=["kerple", "dape"])
def test_kerple_stays_positive_and_can_rise_again(encoding):
    penalty = (encoding.penalties if isinstance(encoding, Kerple) else encoding.bases)[0]
    with torch.no_grad():
        penalty.strength.copy_(torch.tensor([-1.0, 2.0]))
        penalty.rate.copy_(torch.tensor([0.5, -3.0]))
    encoding.eval()
    assert encoding.bias(0, chunk(encoding, 0, 6)).max() == 0, "no distance may be rewarded"
    assert penalty.strength[0] == -1, "reading must not change weights"
    encoding.train()
    bias = encoding.bias(0, chunk(encoding, 0, 6))
    assert penalty.strength.tolist() == [0.01, 2.0]
    assert penalty.rate.tolist() == [0.5, 0.01]
    for gradient in torch.autograd.grad(bias.sum(), [penalty.strength, penalty.rate]):
        assert gradient.abs().min() > 1e-6


# --- FIRE ---


def slow_network(layers: list[nn.Module], inputs: list[Tensor], slope: float) -> list[Tensor]:
    """A perceptron of two layers, the second without constants."""
    first, second = layers
    hidden = []
    for row, constant in zip(first.weight, first.bias, strict=True):
        total = sum((w * x for w, x in zip(row, inputs, strict=True)), constant)
        hidden.append(total if total > 0 else slope * total)
    return [sum(w * x for w, x in zip(row, hidden, strict=True)) for row in second.weight]


def slow_fire(function: nn.Module, threshold: float, slope: float = 0.0):
    def bias(i: int, j: int) -> list[Tensor]:
        c = function.scale.abs()
        bound = (function.multiplier * threshold).abs()
        farthest = bound if bound > i else torch.tensor(float(i), dtype=bound.dtype)
        share = torch.log(c * (i - j) + 1) / (torch.log(c * farthest + 1) + 1e-6)
        return slow_network([function.network[0], function.network[2]], [share], slope)

    return bias


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("seen", "time"), [(0, 8), (9, 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_fire_is_the_paper(seen, time, shared, sign):
    encoding = made(Fire, 3, FireConfig(hidden=5, threshold=4.7, shared=shared))
    assert len(encoding.functions) == (1 if shared else LAYERS)
    function = encoding.functions[0 if shared else 2]
    with torch.no_grad():  # some hidden units on either side of 0, whatever the start
        function.network[0].bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1, -0.4]))
        function.scale.mul_(sign)
        function.multiplier.mul_(sign)
    slow = slow_fire(function, 4.7)
    assert 4.7 < abs(function.multiplier * 4.7) < 10, "queries on both sides of the threshold"

    def change(scores, i, j):
        return [score + bias for score, bias in zip(scores, slow(i, j), strict=True)]

    assert_same_weights_and_gradients(encoding, change, 2, seen, time)


def test_fire_reads_a_longer_sequence_at_shares_it_knows():
    encoding = made(Fire, 2, FireConfig(threshold=1e-3))
    short, long = (encoding.bias(0, chunk(encoding, 0, time))[0, :, -1] for time in (10, 1_000))
    assert_close(long[:, [0, -1]], short[:, [0, -1]], tolerance=1e-5)  # the whole past, and none of it


def run(encoding: str, name: str, task: str = "copy", **options: int) -> RunConfig:
    return preset(name, find_task(task)(), encoding, **options)


@pytest.mark.parametrize("name", ["quick", "paper", "best"])
def test_fire_starts_to_interpolate_within_the_training_length(name):
    assert FireConfig().threshold == 512
    assert run("fire", name, max_length=17).positions == FireConfig(threshold=17.0)


# --- Learned positions ---


def test_learned_positions_are_added_by_place():
    encoding = made(Learned, 3, LearnedConfig(longest=20))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    stream = chunk(encoding, 8, 5)
    out = encoding.embed(x, stream)
    for b in range(2):
        for t in range(5):
            assert torch.equal(out[b, t], x[b, t] + encoding.table[8 + t])
    gradient, = torch.autograd.grad(out.sum(), [encoding.table])
    assert gradient.sum(1).nonzero().flatten().tolist() == [8, 9, 10, 11, 12]


def test_learned_positions_refuse_what_has_no_place():
    size = ModelConfig(width=8, layers=1, heads=2, head_width=4, vocabulary=5, start_token=True)
    model = Transformer(size, Learned(8, 1, 2, 4, LearnedConfig(longest=6)))
    assert model(torch.zeros(1, 5, dtype=torch.long)).isfinite().all()
    with pytest.raises(TooLong, match="learned has places for 6 tokens, and a sequence here has 7"):
        model(torch.zeros(1, 6, dtype=torch.long))


# --- Sandwich ---


@pytest.mark.parametrize("heads", [1, 2, 3, 7])
@pytest.mark.parametrize(("seen", "time"), [(0, 8), (90, 3)])
@pytest.mark.parametrize("sinusoids", [128, 6])
def test_sandwich_is_the_paper(heads, seen, time, sinusoids):
    places = np.arange(seen + time)[:, None]
    n = np.arange(sinusoids // 2)[None]
    angles = places / 10_000 ** (2 * n / sinusoids)
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    products = table @ table.T

    scores = random_scores(heads, seen, time, batch=1)
    expected = slow_weights(scores, seen, slow_bias(lambda h, i, j: products[i, j] / ((h + 1) * 8 / heads)))
    assert_close(weights(made(Sandwich, heads, SandwichConfig(sinusoids)), scores, 1, seen), expected)


def test_sandwich_refuses_half_a_pair():
    with pytest.raises(UserError, match="even"):
        SandwichConfig(7)


# --- Hard-ALiBi ---


@pytest.mark.parametrize(("heads", "masked"), [(1, None), (2, None), (7, None), (5, 5), (4, 3), (3, 0)])
@pytest.mark.parametrize(("seen", "time"), [(0, 9), (6, 3)])
def test_hard_alibi_is_the_paper(heads, masked, seen, time):
    windowed = heads // 2 if masked is None else masked
    scores = random_scores(heads, seen, time)
    actual = weights(made(HardAlibi, heads, HardAlibiConfig(masked)), scores, 1, seen)
    for b in range(2):
        for h in range(heads):
            for q in range(time):
                i = seen + q
                first = max(0, i - h) if h < windowed else 0  # head 0 sees itself, head 1 one more, ...
                powers = {j: math.exp(scores[b, h, q, j]) for j in range(first, i + 1)}
                expected = [powers.get(j, 0.0) / sum(powers.values()) for j in range(seen + time)]
                assert_close(actual[b, h, q], expected)
                assert int((actual[b, h, q] > 0).sum()) == len(powers)


def test_hard_alibi_trains():
    """Minus infinity where nothing is seen must not become NaN in a gradient, nor in the fused path's reference."""
    encoding = made(HardAlibi, 4)
    query, key, value = (torch.randn(2, 4, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    out = attend(query, key, value, encoding.bias(0, chunk(encoding, 0, 9)))
    assert_close(out[:, 0], value[:, 0])  # sees itself alone
    for gradient in torch.autograd.grad(out.square().sum(), [query, key, value]):
        assert gradient.isfinite().all()


def test_hard_alibi_takes_no_more_windows_than_heads():
    with pytest.raises(UserError, match="at most 3"):
        made(HardAlibi, 3, HardAlibiConfig(4))


def test_hard_alibi_has_windows_and_a_free_head_at_a_laptops_size():
    quick, plain = run("hard_alibi", "quick"), run("nope", "quick")
    assert quick.model.heads * quick.model.head_width == plain.model.heads * plain.model.head_width
    assert (quick.positions.masked, quick.model.heads) == (6, 8)  # fewer windows, and copying 20 digits is a guess
    assert run("hard_alibi", "paper").model == run("nope", "paper").model


# --- DAPE ---


@pytest.mark.parametrize("base", ["kerple", "alibi", "fire"])
@pytest.mark.parametrize(("heads", "seen", "time"), [(2, 0, 6), (3, 7, 2)])
def test_dape_is_the_paper(base, heads, seen, time):
    encoding = made(Dape, heads, DapeConfig(base=base, hidden=5, threshold=3.5))
    layer = LAYERS - 1
    own, f = encoding.bases[layer], encoding.adjustments[layer]
    slopes = slow_slopes(heads)

    def bias(i: int, j: int) -> list[Tensor]:
        if base == "fire":
            return slow_fire(own, 3.5, slope=0.01)(i, j)
        if base == "kerple":
            return [slow_kerple(own)(h, i, j) for h in range(heads)]
        return [torch.tensor(-slopes[h] * (i - j), dtype=torch.float64) for h in range(heads)]

    def change(scores, i, j):
        biases = bias(i, j)
        added = slow_network([f.read, f.write], [*scores, *biases], slope=0.01)
        return [s + b + a for s, b, a in zip(scores, biases, added, strict=True)]

    assert_same_weights_and_gradients(encoding, change, layer, seen, time)


def test_dape_without_its_network_is_its_base():
    kerple, dape = made(Kerple, 3), made(Dape, 3)
    with torch.no_grad():
        dape.adjustments[1].write.weight.zero_()
    dape.bases[1].load_state_dict(kerple.penalties[0].state_dict())
    scores = random_scores(3, 2, 5)
    assert_close(weights(dape, scores, 1, 2), weights(kerple, scores, 1, 2))


def test_dape_passes_gradients_to_the_scores():
    encoding = made(Dape, 2, DapeConfig(hidden=4))
    scores = random_scores(2, 1, 3, batch=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: weights(encoding, s, 0, 1), [scores])


# --- All of them ---


def test_published_defaults():
    assert T5Config() == T5Config(buckets=32, max_distance=128)
    assert FireConfig() == FireConfig(hidden=32, scale=0.1, threshold=512.0, shared=False)
    assert DapeConfig() == DapeConfig(base="kerple", hidden=32, threshold=128.0)
    assert KerpleConfig() == KerpleConfig(least=0.01, shared=True)
    assert SandwichConfig() == SandwichConfig(sinusoids=128)
    torch.manual_seed(0)
    start = Kerple(8, 2, 1_000).penalties[0]
    for parameter, highest in ((start.strength, 2), (start.rate, 1)):  # uniform from 0
        assert 0 <= parameter.min() < 0.02 * highest
        assert 0.98 * highest < parameter.max() <= highest


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Alibi, 0), (T5, 32 * 4), (Kerple, 2 * 4), (Fire, LAYERS * (32 + 32 + 32 * 4 + 2)), (Learned, 2_048 * 16),
     (Sandwich, 0), (HardAlibi, 0), (Dape, LAYERS * (2 * 4 + (8 * 32 + 32) + 32 * 4))],
)
def test_numbers_of_parameters(kind, expected):
    assert sum(parameter.numel() for parameter in made(kind, 4).parameters()) == expected


@pytest.mark.parametrize("kind", [Alibi, T5, Kerple, Fire, Sandwich, HardAlibi])
def test_biases_fuse_and_keep_the_models_precision(kind):
    for dtype in (torch.float32, torch.float64):
        encoding = made(kind, 3).to(dtype)
        bias = encoding.bias(1, chunk(encoding, 2, 5))
        assert bias.dtype == dtype
        assert bias.shape == (1, 3, 5, 7)
    assert kind.score is Encoding.score
    assert kind.weigh is Encoding.weigh


@pytest.mark.parametrize(
    ("kind", "config"),
    [(T5, T5Config(4, 5)), (Kerple, KerpleConfig(shared=False)), (Fire, FireConfig(threshold=4.0)),
     (Fire, FireConfig(shared=True)), (HardAlibi, HardAlibiConfig(2)), (Dape, DapeConfig(base="alibi")),
     (Dape, DapeConfig(base="fire", threshold=4.0))],
    ids=str,
)
def test_options_keep_the_promises_of_the_defaults(kind, config):
    torch.manual_seed(0)
    size = ModelConfig(width=8, layers=2, heads=2, head_width=4, vocabulary=7, start_token=True)
    model = Transformer(size, kind(8, 2, 2, 4, config)).double().eval()
    tokens = torch.randint(7, (3, 11))
    whole, cache = model(tokens), model.new_cache(11)
    assert_close(torch.cat([model(part, cache) for part in tokens.split(4, dim=1)], dim=1), whole)
    (whole * torch.randn_like(whole)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 1e-12, name


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "fire", "learned", "sandwich", "hard_alibi", "dape"])
def test_presets_make_models_that_reach_ten_times_their_training_length(name):
    config = run(name, "quick")
    size = dataclasses.replace(config.model, vocabulary=12)
    encoding = find_encoding(name)(size.width, size.layers, size.heads, size.head_width, config.positions)
    with torch.no_grad():
        assert Transformer(size, encoding).eval()(torch.zeros(1, 800, dtype=torch.long)).isfinite().all()
