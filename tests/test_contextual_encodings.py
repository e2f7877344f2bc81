"""Encodings that read what the tokens say: each against its paper's formula, pair by pair, and against x-transformers.

The oracles here are loops over queries, keys and the tokens between them; nothing is summed, solved or masked at once.
"""

import math
import warnings
from collections.abc import Callable
from decimal import Decimal, localcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from prism.encodings import Encoding
from prism.encodings.cable import Cable, CableConfig
from prism.encodings.cope import Cope, CopeConfig, contextual_scores
from prism.encodings.forgetting import Forgetting
from prism.encodings.path import NORM_EPSILON, Path, PathConfig, path_bias
from prism.encodings.stick_breaking import StickBreaking, StickBreakingConfig, stick_breaking_weights
from tests.tolerances import assert_close

BATCH, TIME, WIDTH, LAYERS, HEADS, FEATURES = 2, 11, 10, 2, 3, 5
WHOLE, CHUNKS = [TIME], [4, 1, TIME - 5]


def spread(encoding: Encoding) -> Any:
    """Its parameters, far from where they start."""
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.add_(0.7 * torch.randn_like(parameter))
    return encoding.double()


def build(kind: type[Encoding], config: object = None) -> Any:
    return spread(kind(WIDTH, LAYERS, HEADS, FEATURES, config))  # type: ignore[arg-type]


def inputs(seed: int = 0, time: int = TIME) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's input, and queries (already scaled) and keys for it."""
    generator = torch.Generator().manual_seed(seed)
    x, query, key = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((BATCH, time, WIDTH), (BATCH, HEADS, time, FEATURES), (BATCH, HEADS, time, FEATURES))
    )
    return x, 1.3 * query, key


@torch.no_grad()
def run(encoding: Encoding, layer: int, chunks: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """What a layer's attention sees: scores, zero where a key is still to come, and weights, of all chunks."""
    x, query, key = inputs(seed)
    scores, weights = (query.new_zeros(BATCH, HEADS, TIME, TIME) for _ in range(2))
    stream, keys = encoding.start(TIME), key[:, :, :0]
    for size in chunks:
        here = slice(stream.seen, stream.seen + size)
        stream.time = size
        encoding.attention_input(x[:, here], layer, stream)
        q, k = encoding.transform(query[:, :, here], key[:, :, here], layer, stream)
        keys = torch.cat((keys, k), dim=2)
        visible = torch.ones(TIME, TIME, dtype=torch.bool).tril()[here, : keys.shape[2]]
        chunk = encoding.score(q @ keys.mT, layer, stream)
        scores[:, :, here, : keys.shape[2]] = chunk.masked_fill(~visible, 0.0)
        weights[:, :, here, : keys.shape[2]] = encoding.weigh(chunk, visible, layer, stream)
        stream.seen += size
    return scores, weights


def by_pairs(score: Callable[[int, int, int, int], float]) -> np.ndarray:
    """`score` of batch, head, query and key, for all pairs a query may see."""
    table = np.zeros((BATCH, HEADS, TIME, TIME))
    for b, h, i, j in np.ndindex(*table.shape):
        if j <= i:
            table[b, h, i, j] = score(b, h, i, j)
    return table


def softmax_of_rows(scores: np.ndarray) -> np.ndarray:
    weights = np.zeros_like(scores)
    for b, h, i, _ in np.ndindex(*scores.shape):
        row = [math.exp(s) for s in scores[b, h, i, : i + 1]]
        weights[b, h, i, : i + 1] = [entry / sum(row) for entry in row]
    return weights


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def linear(gate: nn.Module, x: Tensor, b: int, t: int, h: int) -> float:
    weight, bias = gate.weight.detach().numpy(), gate.bias.detach().numpy()  # type: ignore[operator, union-attr]
    return float(sum(weight[h][c] * x[b, t, c].item() for c in range(WIDTH)) + bias[h])


def x_transformers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("x_transformers.x_transformers")


chunked = pytest.mark.parametrize("chunks", [WHOLE, CHUNKS, [1] * TIME], ids=str)


# --- CoPE ---


@chunked
@pytest.mark.parametrize("places", [1, 4, 64], ids=lambda n: f"{n} places")
def test_cope_is_its_formula(places, chunks):
    encoding, layer = build(Cope, CopeConfig(places=places)), 1
    _, query, key = (part.numpy() for part in inputs())
    table = encoding.tables[layer].detach().numpy()

    def score(b: int, h: int, i: int, j: int) -> float:
        position = sum(sigmoid(float(query[b, h, i] @ key[b, h, k])) for k in range(j, i + 1))
        position = min(position, places - 1)
        low, share = int(position), position - int(position)
        embedding = (1 - share) * table[low] + (share * table[low + 1] if share else 0)
        return float(query[b, h, i] @ key[b, h, j] + query[b, h, i] @ embedding)

    expected = by_pairs(score)
    scores, weights = run(encoding, layer, chunks)
    assert_close(scores, expected)
    assert_close(weights, softmax_of_rows(expected))


def test_cope_reaches_and_stays_within_the_last_place():
    """The inputs above are such that the clamp matters for 4 places and not for 64."""
    _, query, key = inputs()
    counts = torch.sigmoid(query @ key.mT).tril().sum(-1)
    assert 3 < counts.max() < 63
    assert (counts > 3).any()
    assert (counts < 3).any()


def test_cope_and_its_gradients_are_those_of_x_transformers():
    _, query, key = inputs()
    scores, table = query @ key.mT, torch.randn(4, FEATURES, dtype=torch.float64)
    oracle = x_transformers().CoPE(FEATURES, HEADS, 4).double()
    with torch.no_grad():
        oracle.pos_emb.copy_(table)
    visible = torch.ones(TIME, TIME, dtype=torch.bool).tril()
    upstream = torch.randn_like(scores).tril()
    ours = [part.clone().requires_grad_() for part in (query, scores, table)]
    theirs = [part.clone().requires_grad_() for part in (query, scores)]

    here = contextual_scores(ours[0], ours[1], visible, ours[2])
    there = oracle(theirs[0], theirs[1].masked_fill(~visible, -torch.finfo(torch.float64).max))
    assert_close(here.tril(), there.tril())
    here.backward(upstream)
    there.backward(upstream)
    for mine, other, what in zip(ours, [*theirs, oracle.pos_emb], ("query", "scores", "table"), strict=True):
        assert_close(mine.grad, other.grad, what=f"gradient of {what}")


def test_cope_starts_as_nope():
    encoding = Cope(WIDTH, LAYERS, HEADS, FEATURES).double()
    _, query, key = inputs()
    assert torch.equal(run(encoding, 0, WHOLE)[0], (query @ key.mT).tril())


# --- Forgetting Transformer ---


@chunked
def test_forgetting_is_its_formula(chunks):
    encoding, layer = build(Forgetting), 1
    x, query, key = inputs()
    gates = {
        (b, t, h): sigmoid(linear(encoding.gates[layer], x, b, t, h))
        for b in range(BATCH) for t in range(TIME) for h in range(HEADS)
    }

    def score(b: int, h: int, i: int, j: int) -> float:
        product = math.prod(gates[b, t, h] for t in range(j + 1, i + 1))
        return float(query[b, h, i] @ key[b, h, j]) + math.log(product)

    expected = by_pairs(score)
    scores, weights = run(encoding, layer, chunks)
    assert_close(scores, expected)
    assert_close(weights, softmax_of_rows(expected))


def test_forgetting_is_that_of_x_transformers():
    encoding = build(Forgetting)
    oracle = x_transformers().DataDependentAlibi(WIDTH, HEADS).double()
    oracle.to_forget_gates[0].load_state_dict(encoding.gates[0].state_dict())
    x = inputs()[0]
    stream = encoding.start(TIME)
    stream.time = TIME
    encoding.attention_input(x, 0, stream)
    assert_close(encoding.bias(0, stream).tril(), oracle(x).tril())


def test_forgetting_starts_with_gates_near_a_half():
    encoding = Forgetting(WIDTH, LAYERS, HEADS, FEATURES)
    for gate in encoding.gates:
        assert torch.equal(gate.bias, torch.zeros(HEADS))
        assert 0 < gate.weight.abs().max() < 0.1


# --- Stick-breaking ---


@chunked
@pytest.mark.parametrize("remainder", [False, True])
def test_stick_breaking_is_its_formula(remainder, chunks):
    encoding = build(StickBreaking, StickBreakingConfig(remainder=remainder))
    _, query, key = inputs()
    expected = np.zeros((BATCH, HEADS, TIME, TIME))
    for b, h, i in np.ndindex(BATCH, HEADS, TIME):
        stick = 1.0
        for j in range(i - 1, -1, -1):
            beta = sigmoid(float(query[b, h, i] @ key[b, h, j]))
            expected[b, h, i, j] = beta * stick
            stick *= 1 - beta
        expected[b, h, i, i] = stick if remainder else 0.0
    weights = run(encoding, 0, chunks)[1]
    assert_close(weights, expected)
    if remainder:
        assert_close(weights.sum(-1), torch.ones(BATCH, HEADS, TIME, dtype=torch.float64))
    else:
        assert (weights[:, :, 0] == 0).all()  # the first token attends to nothing


HUGE = [0.0, 800.0, -800.0, 25.0, -25.0, 1e6, -1e6, 300.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("remainder", [False, True])
def test_stick_breaking_of_huge_scores(remainder, dtype):
    """Against 2,000 digits; each weight by itself, the smallest too, as far as the dtype has numbers that small."""
    scores = torch.tensor([HUGE[i:] + HUGE[:i] for i in range(len(HUGE))], dtype=dtype)
    time = len(HUGE)
    expected = np.zeros((time, time))
    with localcontext() as context:
        context.prec, context.Emin = 2000, -(10**9)
        for i in range(time):
            stick = Decimal(1)
            for j in range(i - 1, -1, -1):
                grown = Decimal(scores[i, j].item()).exp()
                expected[i, j] = float(stick * grown / (1 + grown))
                stick /= 1 + grown
            expected[i, i] = float(stick) if remainder else 0.0
    given = scores[None, None].clone().requires_grad_()
    place = torch.arange(time)
    weights = stick_breaking_weights(given, place[:, None] - place, remainder)
    smallest = torch.finfo(dtype).tiny
    for actual, wanted in zip(weights.flatten().tolist(), expected.flatten().tolist(), strict=True):
        if wanted > smallest:  # rounding of an exponent e is a relative error of e times the dtype's epsilon
            assert abs(actual / wanted - 1) < 4 * torch.finfo(dtype).eps * (2 + abs(math.log(wanted)))
        else:
            assert actual <= 2 * smallest
    weights.square().sum().backward()
    assert given.grad.isfinite().all()


def test_stick_breaking_of_the_largest_scores_is_finite():
    largest = torch.finfo(torch.float32).max
    scores = (largest * torch.tensor([1.0, -1.0]).repeat(8)).expand(1, 1, 16, 16).clone().requires_grad_()
    place = torch.arange(16)
    for remainder in (False, True):
        weights = stick_breaking_weights(scores, place[:, None] - place, remainder)
        weights.square().sum().backward()
        assert weights.isfinite().all()
        assert scores.grad.isfinite().all()


@pytest.mark.parametrize("remainder", [False, True])
def test_stick_breaking_gradients(remainder):
    scores = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    distance = torch.arange(3, 6)[:, None] - torch.arange(6)
    assert torch.autograd.gradcheck(lambda s: stick_breaking_weights(s, distance, remainder), (scores,))


# --- PaTH ---


def literal_directions(encoding: Path, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """w [batch, time, heads, features] and beta [batch, time, heads], a token and a channel at a time."""
    made_by = encoding.reflections[layer]
    window, channels = made_by.taps.shape
    raw = [[made_by.up.weight @ (made_by.down.weight @ x[b, t]) for t in range(x.shape[1])] for b in range(BATCH)]
    directions, strengths = [], []
    for b in range(BATCH):
        for t in range(x.shape[1]):
            token = []
            for c in range(channels):
                seen = [
                    made_by.taps[tap, c] * raw[b][t - (window - 1) + tap][c]
                    for tap in range(window) if t - (window - 1) + tap >= 0
                ]
                mixed = torch.stack(seen).sum()
                token.append(mixed / (1 + torch.exp(-mixed)))
            for head in torch.stack(token).view(HEADS, FEATURES):
                directions.append(head / torch.sqrt(head @ head + NORM_EPSILON))
            made = made_by.strength.weight @ x[b, t] + made_by.strength.bias
            strengths.append(2 / (1 + torch.exp(-made)))
    w = torch.stack(directions).view(BATCH, x.shape[1], HEADS, FEATURES)
    return w, torch.stack(strengths).view(BATCH, x.shape[1], HEADS)


def literal_path_scores(query: Tensor, key: Tensor, w: Tensor, beta: Tensor) -> Tensor:
    """k_j^T H_{j+1} ... H_i q_i with every matrix written out; w and beta as `literal_directions` gives them."""
    rows = []
    for b, h, i in np.ndindex(*query.shape[:3]):
        for j in range(query.shape[2]):
            product = torch.eye(query.shape[3], dtype=query.dtype)
            for s in range(j + 1, i + 1):
                reflection = w[b, s, h]
                product = product @ (torch.eye(query.shape[3], dtype=query.dtype)
                                     - beta[b, s, h] * torch.outer(reflection, reflection))
            rows.append(key[b, h, j] @ product @ query[b, h, i] if j <= i else query.new_zeros(()))
    return torch.stack(rows).view(*query.shape[:3], query.shape[2])


@chunked
@pytest.mark.parametrize("window", [1, 3, 4])
def test_path_is_a_product_of_reflections(window, chunks):
    encoding, layer = build(Path, PathConfig(rank=4, window=window)), 1
    x, query, key = inputs()
    with torch.no_grad():
        w, beta = literal_directions(encoding, layer, x)
        assert beta.max() > 1.2  # some directions are turned round
        expected = literal_path_scores(query, key, w, beta)
        scores, weights = run(encoding, layer, chunks)
    assert_close(scores, expected)
    assert_close(weights, softmax_of_rows(expected.numpy()))


def test_path_gradients_are_those_of_the_product():
    encoding = build(Path, PathConfig(rank=4))
    time = 6
    x, query, key = (part.requires_grad_() for part in inputs(time=time))
    upstream = torch.randn(BATCH, HEADS, time, time, dtype=torch.float64).tril()
    wanted = [x, query, key, *encoding.reflections[0].parameters()]

    stream = encoding.start(time)
    stream.time = time
    encoding.attention_input(x, 0, stream)
    q, k = encoding.transform(query, key, 0, stream)
    ours = torch.autograd.grad(encoding.score(q @ k.mT, 0, stream), wanted, upstream)
    literal = literal_path_scores(query, key, *literal_directions(encoding, 0, x))
    for here, there in zip(ours, torch.autograd.grad(literal, wanted, upstream), strict=True):
        assert_close(here, there, tolerance=1e-11)


def test_path_bias_differentiates_through_chunks():
    shapes = ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 2, 4), (1, 2, 3, 4), (1, 2, 3))
    parts = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(path_bias, parts)


def test_path_stays_exact_over_hundreds_of_tokens():
    """In float32 against float64: the triangular system is long, and its solution must not drift."""
    torch.manual_seed(0)
    query, key, w = torch.randn(3, 1, 2, 700, 32, dtype=torch.float64).unbind(0)
    w, beta = w / w.norm(dim=-1, keepdim=True), 2 * torch.rand(1, 2, 700, dtype=torch.float64)
    exact = path_bias(query, key, None, w, beta)[0].tril()
    single = path_bias(*(part.float() for part in (query, key)), None, w.float(), beta.float())[0].tril()
    assert_close(single, exact, dtype=torch.float32)


# --- CABLE ---


@chunked
@pytest.mark.parametrize("form", ["weighted", "plain"])
def test_cable_is_its_formula(form, chunks):
    encoding, layer = build(Cable, CableConfig(form=form)), 1
    x, query, key = inputs()

    def softplus(z: float) -> float:
        return math.log1p(math.exp(z))

    def step(b: int, t: int, h: int) -> float:
        z = linear(encoding.steps[layer], x, b, t, h)
        return softplus(z) if form == "plain" else max(z, 0.0)

    def score(b: int, h: int, i: int, j: int) -> float:
        rate = 1.0 if form == "plain" else softplus(linear(encoding.rates[layer], x, b, i, h))
        far = sum(step(b, t, h) for t in range(j + 1, i + 1))
        return float(query[b, h, i] @ key[b, h, j]) - rate * far

    expected = by_pairs(score)
    scores, weights = run(encoding, layer, chunks)
    assert_close(scores, expected)
    assert_close(weights, softmax_of_rows(expected))


def test_plain_cable_forgets():
    """The first release of CABLE, its weights negated, is the Forgetting Transformer."""
    forgetting, cable = build(Forgetting), build(Cable, CableConfig(form="plain"))
    for step, gate in zip(cable.steps, forgetting.gates, strict=True):
        step.load_state_dict({name: -value for name, value in gate.state_dict().items()})
    assert_close(run(cable, 0, CHUNKS)[0], run(forgetting, 0, WHOLE)[0])
