"""Encodings of drawn positions: the draw itself, and what is done with it, against slow loops and x-transformers.

With room for as many places as there are tokens, a draw can only be 0, 1, 2 ...: then each is its plain counterpart.
"""

import dataclasses
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from prism.config import ModelConfig, preset
from prism.encodings import Encoding, Stream, find_encoding
from prism.encodings.encoding import NO_TOKEN
from prism.encodings.randomized_relative import Relative, shifted
from prism.encodings.sinusoidal import SinusoidalConfig
from prism.errors import TooLong, UserError
from prism.inside.recording import record
from prism.random_positions import RandomPositions, RandomPositionsConfig
from prism.settings import Settings
from prism.tasks import find_task
from prism.transformer import Transformer
from tests.tolerances import assert_close, relative_error

BATCH, LAYERS, WIDTH, FEATURES = 2, 2, 10, 4
RANDOMIZED = ["randomized_sinusoidal", "randomized_learned", "randomized_rope", "randomized_alibi",
              "randomized_relative"]
FIRST = torch.tensor([[3], [1]])  # first tokens of the two sequences of `scored` and `read`: each has its own draw


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
    ids = torch.cat((FIRST, tokens(time - 1)), 1)
    keys, rows = key[:, :, :0], []
    for size in chunks or (time,):
        here = slice(stream.seen, stream.seen + size)
        stream.time, stream.tokens = size, ids[:, : here.stop]
        encoding.embed(x[:, here], stream)
        q, k = encoding.transform(query[:, :, here] / math.sqrt(FEATURES), key[:, :, here], layer, stream)
        keys = torch.cat((keys, k), 2)
        part = encoding.score(q @ keys.mT, layer, stream)
        rows.append(torch.nn.functional.pad(part, (0, time - part.shape[3])))
        stream.seen += size
    return torch.cat(rows, 2).tril(), stream


def read(encoding: Encoding, x: Tensor) -> tuple[Tensor, list[list[int]]]:
    """What `embed` makes of it, and each sequence's places."""
    stream = encoding.start(x.shape[1])
    stream.tokens = FIRST.expand(-1, x.shape[1])
    return encoding.embed(x, stream), stream.memory["places"].tolist()


# --- The draw ---


class Drawn(RandomPositions):
    """The draw alone."""


def drawn(places: int, training: bool, draws: str = "batch") -> Drawn:
    return Drawn(WIDTH, LAYERS, 1, FEATURES, RandomPositionsConfig(places=places, draws=draws)).train(training)


def asked(
    encoding: Drawn, time: int, method: str = "positions", batch: int = 1, first: Sequence[int] | None = None
) -> list[list[int]]:
    """The draw for sequences that begin with these tokens, whose other tokens nobody has seen."""
    stream = encoding.start(time)
    if first is not None:
        stream.tokens = torch.tensor(first)[:, None]
        batch = len(stream.tokens)
    return getattr(encoding, method)(torch.zeros(batch, time, WIDTH), stream).tolist()


@pytest.mark.parametrize("draws", ["batch", "sequence"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("tokens_read", "places"), [(1, 1), (1, 9), (5, 9), (9, 9), (60, 2_048)])
def test_a_draw_is_a_subset_in_order(tokens_read, places, training, draws):
    encoding = drawn(places, training, draws)
    for method in ("positions", "distances"):
        rows = asked(encoding, tokens_read, method, first=[4, 0, 4])
        assert len(rows) == (3 if draws == "sequence" or not training else 1)
        for found in rows:
            assert len(found) == tokens_read
            assert found == sorted(set(found))
            assert set(found) <= set(range(places))
            assert method == "positions" or found[0] == 0


def assert_equally_likely(found: list[tuple[int, ...]], fixed: bool) -> None:
    """That draws of 3 places out of 6, the first of them 0 if it is fixed, favour none."""
    possible = [subset for subset in itertools.combinations(range(6), 3) if subset[0] == 0 or not fixed]
    counts = Counter(found)
    assert set(counts) == set(possible)
    expected = len(found) / len(possible)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 2.6 * len(possible)  # as at least 99.8 % of right draws are


@pytest.mark.parametrize("draws", ["batch", "sequence"])
@pytest.mark.parametrize("method", ["positions", "distances"])
def test_in_training_every_subset_is_as_likely_as_another(method, draws):
    torch.manual_seed(0)
    encoding = drawn(6, True, draws)
    found = [tuple(row) for _ in range(1_000 if draws == "sequence" else 4_000)
             for row in asked(encoding, 3, method, batch=4)]
    assert len(found) == 4_000
    assert_equally_likely(found, fixed=method == "distances")


@pytest.mark.parametrize("method", ["positions", "distances"])
def test_over_first_tokens_every_subset_is_as_likely_as_another(method):
    found = asked(drawn(6, training=False), 3, method, first=range(4_000))
    assert_equally_likely([tuple(row) for row in found], fixed=method == "distances")


def test_two_sequences_of_a_batch_draw_apart():
    """Neither the same places nor places that tell of each other: each pair of subsets comes up as often."""
    torch.manual_seed(0)
    encoding = drawn(3, True, "sequence")
    counts = Counter(tuple(map(tuple, asked(encoding, 1, batch=2))) for _ in range(1_800))
    assert len(counts) == 9
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 24.4  # 99.8 % of right draws, 8 degrees


@pytest.mark.parametrize("draws", ["batch", "sequence"])
def test_a_training_pass_draws_once_from_the_global_generator(draws):
    encoding, x = drawn(2_048, True, draws), torch.zeros(2, 20, WIDTH)
    found = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        stream = encoding.start(20)
        found.append(encoding.positions(x, stream))
        assert torch.equal(encoding.positions(x, stream), found[-1])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_outside_training_the_room_and_the_first_token_decide():
    first, second = drawn(2_048, False), drawn(2_048, False, "sequence")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    here = asked(first, 20, first=[7, 2, 7])
    assert torch.equal(torch.get_rng_state(), state)
    assert here[0] == here[2] != here[1]
    torch.manual_seed(2)
    assert asked(second, 20, first=[2, 7]) == [here[1], here[0]]
    assert asked(second, 20, first=[7]) == [here[0]]
    assert not set(here[0]) <= set(asked(second, 21, first=[7])[0])  # another draw, not one place more


def test_a_draw_is_made_once_for_each_first_token(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "randperm", lambda *args, real=torch.randperm, **kwargs: made.append(1) or real(
        *args, **kwargs))
    asked(drawn(2_048, False), 20, first=[7, 2, 7, 7, 2, 5])
    assert len(made) == 3


def test_where_no_ids_are_known_there_is_one_draw():
    encoding = drawn(2_048, False)
    assert asked(encoding, 20, batch=5) == asked(encoding, 20, first=[0])


def test_behind_a_start_token_there_is_one_draw():
    size = ModelConfig(width=WIDTH, layers=LAYERS, heads=3, head_width=FEATURES, vocabulary=5, start_token=True)
    made = Transformer(size, drawn(50, False)).double().eval()
    seen = []
    made.encoding.embed = lambda x, stream: seen.append(made.encoding.positions(x, stream)) or x
    made(torch.tensor([[0, 1, 2], [4, 1, 2]]))
    assert seen[0].tolist() == 2 * asked(made.encoding, 4, first=[NO_TOKEN])


@pytest.mark.parametrize("name", RANDOMIZED)
def test_first_tokens_decide_what_a_model_draws_and_later_ones_do_not(name):
    """A model to which all tokens look the same: its attention can tell of nothing but the draw."""
    made = model(name, find_encoding(name).Config(places=300))
    with torch.no_grad():
        made.embedding.weight[:] = made.embedding.weight[0].clone()
    ids = torch.tensor([[2, 0, 3, 1, 4, 4, 0], [4, 0, 3, 1, 4, 4, 0], [2, 4, 4, 2, 2, 1, 3]])
    (attention,) = record(made, ids, ["layer.0.attention"]).values()
    assert_close(attention[2], attention[0])
    assert relative_error(attention[1], attention[0]) > 1e-6
    for row in range(3):
        (alone,) = record(made, ids[row : row + 1], ["layer.0.attention"]).values()
        assert_close(alone[0], attention[row])


@pytest.mark.parametrize("name", RANDOMIZED)
def test_there_are_only_so_many_places(name):
    encoding = make(name, places=12)
    assert encoding.longest() == 12
    encoding.start(12)
    with pytest.raises(TooLong, match="places for 12 tokens, and a sequence here has 13"):
        encoding.start(13)


@pytest.mark.parametrize("draws", ["batch", "sequence"])
@pytest.mark.parametrize("name", RANDOMIZED)
def test_a_training_batch_shares_its_draw_unless_told_otherwise_and_the_next_has_another(name, draws):
    made = model(name, find_encoding(name).Config(draws=draws)).train()
    first, second, third = made(tokens(9, batch=1).expand(3, -1))
    if draws == "batch":
        assert_close(second, first)
        assert_close(third, first)
    else:
        assert min(relative_error(second, first), relative_error(third, first), relative_error(third, second)) > 1e-6
    assert relative_error(made(tokens(9, batch=1))[0], first) > 1e-6
    made.eval()
    assert torch.equal(made(tokens(9)), made(tokens(9)))


@pytest.mark.parametrize("draws", ["batch", "sequence"])
@pytest.mark.parametrize("name", RANDOMIZED)
def test_a_training_pass_in_chunks_keeps_its_draw(name, draws):
    made = model(name, find_encoding(name).Config(draws=draws)).train()
    torch.manual_seed(5)
    with torch.no_grad():
        whole = made(tokens(9))
        torch.manual_seed(5)
        cache = made.new_cache(9)
        parts = [made(chunk, cache) for chunk in tokens(9).split([2, 6, 1], dim=1)]
    assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("name", RANDOMIZED)
def test_the_quick_preset_draws_for_each_sequence_and_the_others_as_published(name):
    def config(of):
        return preset(of, find_task("copy")(), name)

    assert config("quick").positions == find_encoding(name).Config(draws="sequence")
    assert config("paper").positions == config("best").positions == find_encoding(name).Config(draws="batch")
    assert config("paper").model == preset("paper", find_task("copy")(), "nope").model
    quick, plain = config("quick").model, preset("quick", find_task("copy")(), "nope").model
    if name == "randomized_alibi":
        assert (quick.heads, quick.head_width) == (8, 8)
        plain = dataclasses.replace(plain, heads=8, head_width=8)
    assert quick == plain
    assert quick.heads * quick.head_width == 64


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
    out, places = read(encoding, x)
    assert places[0] != places[1]
    for b, t, i in itertools.product(range(BATCH), range(5), range(WIDTH)):
        angle = places[b][t] / 10_000 ** (i // 2 * 2 / WIDTH)
        assert float(out[b, t, i] - x[b, t, i]) == pytest.approx((math.cos if i % 2 else math.sin)(angle), abs=1e-12)


def test_drawn_rows_of_the_table_are_added_and_learn():
    encoding, x = make("randomized_learned", places=12), normal(BATCH, 5, WIDTH, seed=3)
    out, places = read(encoding, x)
    assert places[0] != places[1]
    assert set(places[0]) & set(places[1])  # so that one row learns from both
    for b, t in itertools.product(range(BATCH), range(5)):
        assert_close(out[b, t], x[b, t] + encoding.table[places[b][t]].detach())
    upstream = normal(BATCH, 5, WIDTH, seed=4)
    (out * upstream).sum().backward()
    expected = torch.zeros(12, WIDTH, dtype=torch.float64)
    for b, t in itertools.product(range(BATCH), range(5)):
        expected[places[b][t]] += upstream[b, t]
    assert_close(encoding.table.grad, expected)


@pytest.mark.parametrize("chunks", [(), (2, 4, 1)], ids=str)
def test_drawn_places_turn_queries_and_keys(chunks):
    encoding, time = make("randomized_rope", places=50, base=30.0), 7
    found, stream = scored(encoding, time, chunks=chunks)
    places = stream.memory["places"].tolist()
    assert places[0] != places[1]
    query, key = (normal(BATCH, 3, time, FEATURES, seed=seed) for seed in (1, 2))
    expected = torch.zeros_like(found)
    for b, h, m, i in itertools.product(range(BATCH), range(3), range(time), range(FEATURES // 2)):
        for n in range(m + 1):
            angle = (places[b][m] - places[b][n]) * 30.0 ** (-2 * i / FEATURES)
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
    assert distances[0].tolist() != distances[1].tolist()
    query, key = (normal(BATCH, heads, time, FEATURES, seed=seed) for seed in (1, 2))
    # Every query finds its n-th predecessor at the n-th distance: row by row, theirs with positions of our making.
    theirs = AlibiPositionalBias(heads=heads)
    for b, row in itertools.product(range(BATCH), range(time)):
        bias = theirs.forward_custom_pos(distances[b, :1], distances[b, : row + 1].flip(0))
        expected = (query[b, :, row : row + 1] @ key[b, :, : row + 1].mT) / math.sqrt(FEATURES) + bias
        assert_close(found[b, :, row : row + 1, : row + 1], expected, dtype=torch.float32)
    for chunks in ((1,) * time, (2, 3, 1)):
        assert_close(scored(encoding, time, chunks=chunks)[0], found)


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


def slow_relative(encoding: Relative, distances: list[list[int]], layer: int, time: int) -> Tensor:
    """Dai et al., section 3.3, one score at a time."""
    query, key = (normal(BATCH, 3, time, FEATURES, seed=seed) for seed in (1, 2))
    own = 0 if encoding.name == "relative" else layer
    u, v, weight = encoding.to_content[own], encoding.to_distance[own], encoding.project[layer].weight
    rows = []
    for b, h, m, n in itertools.product(range(BATCH), range(3), range(time), range(time)):
        if n > m:
            rows.append(torch.zeros((), dtype=torch.float64))
            continue
        angle = [distances[b][m - n] / 10_000 ** (w // 2 * 2 / WIDTH) for w in range(WIDTH)]
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
    distances = BATCH * [list(range(time))] if name == "relative" else stream.memory["places"].tolist()
    assert (distances[0] == distances[1]) == (name == "relative")
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


@pytest.mark.parametrize("name", ["randomized_alibi", "randomized_relative"])
def test_the_footprint_is_what_sequences_do_not_share(name):
    time, encoding = 13, make(name)
    streams = [scored(encoding, time, layer)[1] for layer in range(LAYERS)]
    if name == "randomized_alibi":
        kept = streams[0].memory["bias"].numel()
    else:
        kept = BATCH * encoding.heads * time * time  # a layer's scores of distances
        kept += streams[0].memory["sinusoids"].numel()
        kept += sum(stream.memory["distances", layer].numel() for layer, stream in enumerate(streams))
    assert kept == BATCH * time * encoding.footprint(time)


def test_places_must_be_some():
    with pytest.raises(UserError, match="places must be at least 1"):
        RandomPositionsConfig(places=0)
