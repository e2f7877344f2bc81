"""Encodings of drawn positions: the draw itself, and what is done with it, against slow loops and x-transformers.

With room for as many places as there are tokens, a draw can only be 0, 1, 2 ...: then each is its plain counterpart.
"""

import itertools
import math
import warnings

import pytest
import torch
from torch import Tensor

from prism.config import ModelConfig
from prism.encodings import Encoding, Stream, find_encoding
from prism.encodings.randomized_relative import Relative, shifted
from prism.encodings.sinusoidal import SinusoidalConfig
from prism.errors import TooLong, UserError
from prism.random_positions import RandomPositions, RandomPositionsConfig
from prism.settings import Settings
from prism.transformer import Transformer
from tests.tolerances import assert_close, relative_error

BATCH, LAYERS, WIDTH, FEATURES = 2, 2, 10, 4
RANDOMIZED = ["randomized_sinusoidal", "randomized_learned", "randomized_rope", "randomized_alibi",
              "randomized_relative"]
HOST = torch.device("cpu")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name: str, heads: int = 3, **options: object) -> Encoding:
    """An encoding whose parameters are far from their start."""
    torch.manual_seed(6)
    kind = find_encoding(name)
    encoding = kind(WIDTH, LAYERS, heads, FEATURES, kind.Config(**options)).double().eval()
    for parameter in encoding.parameters():
        parameter.data.normal_(std=0.7)
    return encoding


def model(name: str, config: Settings | None = None) -> Transformer:
    torch.manual_seed(7)
    size = ModelConfig(width=WIDTH, layers=LAYERS, heads=3, head_width=FEATURES, vocabulary=5)
    return Transformer(size, find_encoding(name)(WIDTH, LAYERS, 3, FEATURES, config)).double().eval()


def tokens(time: int, batch: int = BATCH) -> Tensor:
    return torch.randint(5, (batch, time), generator=torch.Generator().manual_seed(8))


def scored(encoding: Encoding, time: int, layer: int = 1, chunks: tuple[int, ...] = ()) -> tuple[Tensor, Stream]:
    """One layer's scores where a key is visible, 0 elsewhere; read whole or in chunks."""
    query, key = (normal(BATCH, encoding.heads, time, FEATURES, seed=seed) for seed in (1, 2))
    x, stream = normal(BATCH, time, WIDTH, seed=3), encoding.start(time)
    keys, rows = key[:, :, :0], []
    for size in chunks or (time,):
        here = slice(stream.seen, stream.seen + size)
        stream.time = size
        encoding.embed(x[:, here], stream)
        q, k = encoding.transform(query[:, :, here] / math.sqrt(FEATURES), key[:, :, here], layer, stream)
        keys = torch.cat((keys, k), 2)
        part = encoding.score(q @ keys.mT, layer, stream)
        rows.append(torch.nn.functional.pad(part, (0, time - part.shape[3])))
        stream.seen += size
    return torch.cat(rows, 2).tril(), stream


# --- The draw ---


class Drawn(RandomPositions):
    """The draw alone."""


def drawn(places: int, training: bool) -> Drawn:
    return Drawn(WIDTH, LAYERS, 1, FEATURES, RandomPositionsConfig(places=places)).train(training)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("tokens_read", "places"), [(1, 1), (1, 9), (5, 9), (9, 9), (60, 2_048)])
def test_a_draw_is_a_subset_in_order(tokens_read, places, training):
    encoding = drawn(places, training)
    positions = encoding.positions(encoding.start(tokens_read), HOST).tolist()
    distances = encoding.distances(encoding.start(tokens_read), HOST).tolist()
    for found in (positions, distances):
        assert len(found) == tokens_read
        assert found == sorted(set(found))
        assert set(found) <= set(range(places))
    assert distances[0] == 0


@pytest.mark.parametrize("method", ["positions", "distances"])
def test_in_training_every_subset_is_as_likely_as_another(method):
    torch.manual_seed(0)
    encoding, draws = drawn(6, training=True), 4_000
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        found = tuple(getattr(encoding, method)(encoding.start(3), HOST).tolist())
        counts[found] = counts.get(found, 0) + 1
    possible = list(itertools.combinations(range(6), 3))
    if method == "distances":
        possible = [subset for subset in possible if subset[0] == 0]
    assert set(counts) == set(possible)
    expected = draws / len(possible)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 2.6 * len(possible)  # as at least 99.8 % of right draws are


def test_a_training_pass_draws_once_from_the_global_generator():
    encoding = drawn(2_048, training=True)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        stream = encoding.start(20)
        found.append(encoding.positions(stream, HOST))
        assert torch.equal(encoding.positions(stream, HOST), found[-1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_outside_training_only_the_room_decides():
    first, second = drawn(2_048, training=False), drawn(2_048, training=False)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    here = first.positions(first.start(20), HOST)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(second.positions(second.start(20), HOST), here)
    assert not torch.equal(second.positions(second.start(21), HOST)[:20], here)


@pytest.mark.parametrize("name", RANDOMIZED)
def test_there_are_only_so_many_places(name):
    encoding = make(name, places=12)
    assert encoding.longest() == 12
    encoding.start(12)
    with pytest.raises(TooLong, match="places for 12 tokens, and a sequence here has 13"):
        encoding.start(13)


@pytest.mark.parametrize("name", RANDOMIZED)
def test_a_batch_shares_its_draw_and_the_next_has_another(name):
    made = model(name).train()
    same = made(tokens(9, batch=1).expand(3, -1))
    assert torch.equal(same[0], same[1])
    assert relative_error(made(tokens(9, batch=1))[0], same[0]) > 1e-6
    made.eval()
    assert torch.equal(made(tokens(9)), made(tokens(9)))


@pytest.mark.parametrize("name", RANDOMIZED)
def test_a_training_pass_in_chunks_keeps_its_draw(name):
    made = model(name).train()
    torch.manual_seed(5)
    with torch.no_grad():
        whole = made(tokens(9))
        torch.manual_seed(5)
        cache = made.new_cache(9)
        parts = [made(chunk, cache) for chunk in tokens(9).split([2, 6, 1], dim=1)]
    assert_close(torch.cat(parts, 1), whole)


# --- What is done with it ---


@pytest.mark.parametrize(("name", "plain", "config"), [
    ("randomized_sinusoidal", "sinusoidal", SinusoidalConfig(shift=0)), ("randomized_rope", "rope", None),
])
def test_with_no_room_to_spare_it_is_the_plain_encoding(name, plain, config):
    tight = find_encoding(name).Config(places=9)
    for training in (True, False):
        assert_close(model(name, tight).train(training)(tokens(9)), model(plain, config).train(training)(tokens(9)))
    assert relative_error(model(name)(tokens(9)), model(plain, config)(tokens(9))) > 1e-6


def test_with_no_room_to_spare_relative_is_plain():
    plain, tight = make("relative"), make("randomized_relative", places=7)
    with torch.no_grad():
        tight.project.load_state_dict(plain.project.state_dict())
        tight.to_content[:], tight.to_distance[:] = plain.to_content, plain.to_distance
    assert_close(scored(tight, 7)[0].detach(), scored(plain, 7)[0].detach())


def test_drawn_sinusoids_are_added():
    encoding, x = make("randomized_sinusoidal", places=50), normal(BATCH, 5, WIDTH, seed=3)
    stream = encoding.start(5)
    out, places = encoding.embed(x, stream), stream.memory["places"].tolist()
    assert places != list(range(5))
    for b, t, i in itertools.product(range(BATCH), range(5), range(WIDTH)):
        angle = places[t] / 10_000 ** (i // 2 * 2 / WIDTH)
        assert float(out[b, t, i] - x[b, t, i]) == pytest.approx((math.cos if i % 2 else math.sin)(angle), abs=1e-12)


def test_drawn_rows_of_the_table_are_added_and_learn():
    encoding, x = make("randomized_learned", places=50), normal(BATCH, 5, WIDTH, seed=3)
    stream = encoding.start(5)
    out, places = encoding.embed(x, stream), stream.memory["places"].tolist()
    for b, t in itertools.product(range(BATCH), range(5)):
        assert_close(out[b, t], x[b, t] + encoding.table[places[t]].detach())
    upstream = normal(BATCH, 5, WIDTH, seed=4)
    (out * upstream).sum().backward()
    expected = torch.zeros(50, WIDTH, dtype=torch.float64)
    for b, t in itertools.product(range(BATCH), range(5)):
        expected[places[t]] += upstream[b, t]
    assert_close(encoding.table.grad, expected)


@pytest.mark.parametrize("chunks", [(), (2, 4, 1)], ids=str)
def test_drawn_places_turn_queries_and_keys(chunks):
    encoding, time = make("randomized_rope", places=50, base=30.0), 7
    found, stream = scored(encoding, time, chunks=chunks)
    places = stream.memory["places"].tolist()
    query, key = (normal(BATCH, 3, time, FEATURES, seed=seed) for seed in (1, 2))
    expected = torch.zeros_like(found)
    for b, h, m, i in itertools.product(range(BATCH), range(3), range(time), range(FEATURES // 2)):
        for n in range(m + 1):
            angle = (places[m] - places[n]) * 30.0 ** (-2 * i / FEATURES)
            (a, c), (d, e) = query[b, h, m, 2 * i : 2 * i + 2].tolist(), key[b, h, n, 2 * i : 2 * i + 2].tolist()
            score = (a * d + c * e) * math.cos(angle) + (a * e - c * d) * math.sin(angle)
            expected[b, h, m, n] += score / math.sqrt(FEATURES)
    assert_close(found, expected)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12])
def test_drawn_distances_have_the_slopes_of_alibi(heads):
    pytest.importorskip("x_transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from x_transformers.x_transformers import AlibiPositionalBias
    encoding, time = make("randomized_alibi", heads, places=40), 6
    found, stream = scored(encoding, time)
    distances = stream.memory["places"]
    assert distances.tolist() != list(range(time))
    query, key = (normal(BATCH, heads, time, FEATURES, seed=seed) for seed in (1, 2))
    # Every query finds its n-th predecessor at the n-th distance: row by row, theirs with positions of our making.
    theirs = AlibiPositionalBias(heads=heads)
    for row in range(time):
        bias = theirs.forward_custom_pos(distances[:1], distances[: row + 1].flip(0))
        expected = (query[:, :, row : row + 1] @ key[:, :, : row + 1].mT) / math.sqrt(FEATURES) + bias
        assert_close(found[:, :, row : row + 1, : row + 1], expected, dtype=torch.float32)


def test_the_slopes_of_eight_heads_are_powers_of_two():
    encoding = make("randomized_alibi", 8, places=20)
    stream = encoding.start(20)
    stream.time = 20
    encoding.embed(normal(BATCH, 20, WIDTH, seed=3), stream)
    bias = encoding.bias(0, stream)
    for h, m in itertools.product(range(8), range(20)):
        for n in range(m + 1):
            assert float(bias[0, h, m, n]) == -(2.0 ** -(h + 1)) * (m - n)


# --- Transformer-XL ---


def slow_relative(encoding: Relative, distances: list[int], layer: int, time: int) -> Tensor:
    """Dai et al., section 3.3, one score at a time."""
    query, key = (normal(BATCH, 3, time, FEATURES, seed=seed) for seed in (1, 2))
    own = 0 if encoding.name == "relative" else layer
    u, v, weight = encoding.to_content[own], encoding.to_distance[own], encoding.project[layer].weight
    rows = []
    for b, h, m, n in itertools.product(range(BATCH), range(3), range(time), range(time)):
        if n > m:
            rows.append(torch.zeros((), dtype=torch.float64))
            continue
        angle = [distances[m - n] / 10_000 ** (w // 2 * 2 / WIDTH) for w in range(WIDTH)]
        r = torch.tensor([math.cos(a) if w % 2 else math.sin(a) for w, a in enumerate(angle)], dtype=torch.float64)
        score = torch.zeros((), dtype=torch.float64)
        for f in range(FEATURES):
            score = score + (query[b, h, m, f] + u[h, f]) * key[b, h, n, f]
            score = score + (query[b, h, m, f] + v[h, f]) * (weight[h * FEATURES + f] * r).sum()
        rows.append(score / math.sqrt(FEATURES))
    return torch.stack(rows).view(BATCH, 3, time, time)


@pytest.mark.parametrize("name", ["relative", "randomized_relative"])
@pytest.mark.parametrize("layer", [0, 1])
def test_relative_is_the_four_terms_of_transformer_xl(name, layer):
    time, options = 6, {} if name == "relative" else {"places": 30}
    encoding = make(name, **options)
    assert isinstance(encoding, Relative)
    found, stream = scored(encoding, time, layer)
    distances = list(range(time)) if name == "relative" else stream.memory["places"].tolist()
    assert (distances == list(range(time))) == (name == "relative")
    expected = slow_relative(encoding, distances, layer, time)
    assert_close(found.detach(), expected.detach())
    for chunks in ((1,) * time, (2, 3, 1)):
        assert_close(scored(encoding, time, layer, chunks)[0].detach(), expected.detach())

    upstream = normal(BATCH, 3, time, time, seed=5)
    parameters = [encoding.project[layer].weight, encoding.to_content, encoding.to_distance]
    ours, theirs = (torch.autograd.grad((scores * upstream).sum(), parameters) for scores in (found, expected))
    for mine, slow in zip(ours, theirs, strict=True):
        assert_close(mine, slow)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 5), (4, 4), (3, 8)])
def test_shifting_puts_each_distance_under_its_key(queries, keys):
    logits = normal(2, 3, queries, keys, seed=3)
    out = shifted(logits)
    for row in range(queries):
        for column in range(keys - queries + row + 1):
            distance = keys - queries + row - column
            assert torch.equal(out[:, :, row, column], logits[:, :, row, keys - 1 - distance])


def test_relative_shares_its_biases_and_randomized_relative_does_not():
    assert make("relative").to_content.shape == (1, 3, FEATURES)
    assert make("randomized_relative").to_content.shape == (LAYERS, 3, FEATURES)


def test_places_must_be_some():
    with pytest.raises(UserError, match="places must be at least 1"):
        RandomPositionsConfig(places=0)
