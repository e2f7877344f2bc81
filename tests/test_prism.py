"""PRISM put together: cursors, copy branch, positions and scores, against plain formulas."""

import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from prism.cursors import CursorState
from prism.encodings.prism import Prism
from prism.errors import UserError
from tests.histogram_oracles import Case, dense_scan
from tests.prism_models import BATCH, HEADS, TIME, WIDTH, prism, small, stream_of
from tests.tolerances import assert_close, relative_error

# --- Cursors ---


@pytest.mark.filterwarnings("ignore:up to")
@pytest.mark.parametrize("options", [
    {"copy_every": 0}, {"copy_every": 3}, {"copy_every": 1}, {"copy_every": 3, "copy_key": "trained"},
    {"copy_every": 2, "support": 2}, {"copy_every": 2, "copy_key": "trained", "support": 2}, {"start_spread": 2},
    {"start_spread": 2, "support": 1, "copy_every": 2}, {"copy_every": 2, "support": 11},
], ids=str)
def test_a_layer_of_cursors_is_what_its_gates_say(options):
    """Every cursor of a PRISM layer from the outputs of its gates, by dense matrices; and each in its place."""
    encoding = prism(2, **options)
    layer, config, count = encoding.prism_layers["0"], encoding.config, 2 * HEADS * 2
    x, capacity = stream_of(), config.support or TIME
    features, _ = layer.gates(x, None)
    reset, action = layer.cursor_gates(features)
    copying = [i for i in range(count) if config.copy_every and i % config.copy_every == config.copy_every - 1]
    fixed = copying if config.copy_key == "increment" else []
    gates_of = {("q", i): n for n, i in enumerate(i for i in range(count) if i not in copying)}
    gates_of |= {("k", i): len(gates_of) + n for n, i in enumerate(i for i in range(count) if i not in fixed)}
    gates_of |= {("q", i): len(gates_of) + n for n, i in enumerate(copying)}

    def scanned(number: int, no_copy=None, copied=None) -> Tensor:
        start = torch.zeros(BATCH, 1, 2 * capacity + 1, dtype=torch.float64)
        reach = min(config.start_spread, capacity)
        chosen = slice(config.start_spread - reach, config.start_spread + reach + 1)
        logits = layer.start_logits[number].detach()[chosen] if config.start_spread else torch.zeros(1)
        start[..., capacity - reach : capacity + reach + 1] = logits.exp() / logits.exp().sum()
        gamma = 1 + np.log1p(np.exp(layer.raw_gamma.detach().numpy()[number : number + 1]))
        return torch.from_numpy(dense_scan(Case(start, reset[:, number, None], action[:, number, None],
                                                torch.from_numpy(gamma), no_copy, copied), config.epsilon))[:, 0]

    stream = encoding.read(x)
    queries, keys = encoding.histograms(0, stream)
    expected_keys = {}
    for i in range(count):
        if i in fixed:
            expected_keys[i] = torch.zeros(BATCH, TIME, 2 * capacity + 1, dtype=torch.float64)
            for t in range(TIME):
                expected_keys[i][:, t, capacity + min(t + 1, capacity)] = 1
        else:
            expected_keys[i] = scanned(gates_of["k", i])
        assert_close(keys[:, i], expected_keys[i], what=f"key {i}")
    for i in range(count):
        if i in copying:
            weights, null, _ = layer.copy(features, None)
            n = copying.index(i)
            jumps = torch.einsum("bts,bsl->btl", weights[:, n].detach(), expected_keys[i])
            expected = scanned(gates_of["q", i], null[:, n, None], jumps[:, None])
        else:
            expected = scanned(gates_of["q", i])
        assert_close(queries[:, i], expected, what=f"query {i}")


# --- Positions and scores ---


def waves(capacity: int, width: int) -> np.ndarray:
    angles = np.outer(np.arange(-capacity, capacity + 1), 10000.0 ** (-np.arange(0, width, 2) / width))
    return np.stack((np.sin(angles), np.cos(angles)), -1).reshape(2 * capacity + 1, width)


@pytest.mark.parametrize("options", [
    {}, {"absolute": True}, {"content": False}, {"norm": "joint"}, {"copy_every": 2, "absolute": True},
    {"superposition": "full"}, {"superposition": "expected"},
], ids=str)
def test_extended_attention_is_the_papers_hybrid_attention(options):
    """Prism.extend and SDPA with its default scale, against Algorithms 2, 3 and 4 written out from the histograms."""
    encoding, x = prism(2, **options), stream_of()
    stream = encoding.read(x)
    histograms = [part.detach().numpy() for part in encoding.histograms(0, stream)]
    q, k, v = (stream_of(HEADS * TIME, seed)[..., :4].reshape(BATCH, HEADS, TIME, 4) for seed in (1, 2, 3))
    for layer in range(2):
        actual = F.scaled_dot_product_attention(*encoding.extend(q, k, layer, stream), v, is_causal=True)
        expected = np.zeros((BATCH, HEADS, TIME, 4))
        for b, h in np.ndindex(BATCH, HEADS):
            vectors = []
            for histogram in histograms:
                mine = histogram[b, (layer * HEADS + h) * 2 :][:2].transpose(1, 0, 2)  # time cursors bins
                if options.get("superposition") == "expected":
                    angle = (mine @ np.arange(-TIME, TIME + 1))[..., None] * 10000.0 ** (-np.arange(0, 8, 2) / 8)
                    e = np.stack((np.sin(angle), np.cos(angle)), -1).reshape(TIME, 2, 8)
                else:
                    e = mine @ waves(TIME, 8)
                if options.get("absolute"):
                    e = np.concatenate((e, waves(TIME, 8)[TIME + 1 :, None]), 1)
                scale = math.sqrt(8) / (np.sqrt((e**2).sum((1, 2), keepdims=True)) if "norm" in options
                                        else math.sqrt(e.shape[1] * 8 / 2))
                vectors.append(e * scale)
            alpha = np.abs(encoding.alpha[layer, h].detach().numpy())
            scores = np.einsum("qcw,kcw,c->qk", *vectors, alpha) / math.sqrt(len(alpha) * 8)
            if options.get("content", True):
                mu = 1 / (1 + math.exp(-float(encoding.mu_logit[layer, h].detach())))
                scores = mu * (q[b, h] @ k[b, h].T).numpy() / 2 + (1 - mu) * scores
            weights = np.tril(np.exp(scores))
            expected[b, h] = weights / weights.sum(1, keepdims=True) @ v[b, h].numpy()
        assert_close(actual, expected, tolerance=1e-6)


def test_the_low_rank_table_changes_nothing_and_the_expected_position_does():
    outputs = {}
    for kind in ("low_rank", "full", "expected"):
        encoding = prism(superposition=kind, pe_width=64, absolute=True)
        stream = encoding.read(stream_of(20))
        q = k = torch.zeros(BATCH, HEADS, 20, 4, dtype=torch.float64)
        query, key = encoding.extend(q, k, 1, stream)
        outputs[kind] = query @ key.mT / math.sqrt(query.shape[-1])
    assert_close(outputs["low_rank"], outputs["full"], tolerance=1e-6)
    assert relative_error(outputs["expected"], outputs["full"]) > 1e-3


def test_mu_alpha_and_their_settings_at_the_start():
    encoding = Prism(WIDTH, 4, HEADS, 4, small(depths=(1, 3), absolute=True, alpha_start=1.5, gate_decay=False))
    assert encoding.alpha.shape == (3, HEADS, 3)
    assert (encoding.alpha == 1.5).all()
    assert not encoding.mu_logit.any()  # a share of one half
    alpha, gates = encoding.optimizer_groups()
    assert alpha["params"] == [encoding.alpha]
    assert (alpha["lr"], alpha["betas"], alpha["weight_decay"]) == (0.03, (0.8, 0.92), 0.0)
    assert gates["weight_decay"] == 0.0
    assert {id(p) for p in gates["params"]} == {id(p) for p in encoding.prism_layers.parameters()}
    assert len(list(prism().optimizer_groups())) == 1


def test_layers_before_the_first_prism_layer_know_no_positions():
    encoding, x = prism(4, depths=(1, 3)), stream_of()
    stream = encoding.start(TIME)
    q = k = torch.ones(BATCH, HEADS, TIME, 4, dtype=torch.float64)
    encoding.observe(x, 0, stream)
    assert encoding.transform(q, k, 0, stream)[0] is q
    for layer in (1, 2, 3):
        encoding.observe(2 * x, layer, stream)
        assert encoding.transform(q, k, layer, stream)[0].shape[-1] > 4
    assert [encoding.prism_layers[name].cursors for name in ("1", "3")] == [8, 4]
    for depths in ((), (3, 1), (1, 1), (4,)):
        with pytest.raises(UserError, match="depths"):
            prism(4, depths=depths)
    with pytest.raises(UserError, match=r"depths=\(1, 3\)"):
        encoding.read(x)


def test_gamma_scale_multiplies_every_exponent():
    encoding = prism(2, copy_every=2)
    before = encoding.prism_layers["0"].gamma()
    encoding.set_gamma_scale(2.5)
    assert_close(encoding.prism_layers["0"].gamma(), 2.5 * before)
    hard = encoding.histograms(0, encoding.read(stream_of()))[0]
    encoding.set_gamma_scale(1.0)
    soft = encoding.histograms(0, encoding.read(stream_of()))[0]
    assert hard.amax(-1).mean() > soft.amax(-1).mean()


def test_a_support_too_small_says_so_and_one_large_enough_does_not():
    with pytest.warns(UserWarning, match="up to .* of its support of 2 offsets"):
        prism(support=2, gamma_start=3.0).read(stream_of())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prism(support=TIME).read(stream_of())
        prism().read(stream_of())
    with pytest.raises(UserError, match="support"):
        small(support=0)


@pytest.mark.parametrize("gates", ["gru", "local"])
def test_an_empty_chunk_changes_nothing(gates):
    layer = prism(gates=gates, copy_every=2).prism_layers["0"]
    state, x = CursorState(), stream_of()
    first = layer.arrange(layer(x[:, :0], TIME, 0, state))[0]
    assert first.shape == (BATCH, 8, 0, 2 * TIME + 1)
    parts = [layer.arrange(layer(x[:, :3], TIME, 0, state))[0], layer.arrange(layer(x[:, 3:3], TIME, 3, state))[0],
             layer.arrange(layer(x[:, 3:], TIME, 3, state))[0]]
    assert_close(torch.cat(parts, 2), layer.arrange(layer(x, TIME, 0, CursorState()))[0])
