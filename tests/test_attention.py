"""Scores from content and position: Algorithm 4, the hybrid score, and queries and keys that carry both."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from prism.ops.attention import extend, hybrid_scores, position_scores
from tests.tolerances import assert_close

BATCH, HEADS, QUERIES, KEYS, CURSORS, COLUMNS, FEATURES, WIDTH = 2, 3, 4, 5, 2, 7, 6, 34


@pytest.fixture(params=[0, 1])
def parts(request):
    rng = np.random.default_rng(request.param)
    shapes = {
        "query": (BATCH, HEADS, QUERIES, FEATURES), "key": (BATCH, HEADS, KEYS, FEATURES),
        "query_position": (BATCH, HEADS, QUERIES, CURSORS, COLUMNS),
        "key_position": (BATCH, HEADS, KEYS, CURSORS, COLUMNS), "alpha": (HEADS, CURSORS),
    }
    made = {name: torch.from_numpy(rng.normal(size=shape)) for name, shape in shapes.items()}
    made["mu"] = torch.from_numpy(rng.uniform(size=HEADS))
    assert (made["alpha"] < 0).any()
    return made


def algorithm_4(query, key, alpha, width) -> np.ndarray:
    """Five loops, as printed: N = C d, |alpha|, sum over cursors, divide by sqrt(N)."""
    q, k, a = query.numpy(), key.numpy(), alpha.numpy()
    (batch, heads, queries, cursors, _), keys = q.shape, k.shape[2]
    out = np.zeros((batch, heads, queries, keys))
    for b in range(batch):
        for h in range(heads):
            for c in range(cursors):
                for i in range(queries):
                    for j in range(keys):
                        out[b, h, i, j] += abs(a[h, c]) * math.fsum(q[b, h, i, c] * k[b, h, j, c])
    return out / math.sqrt(cursors * width)


def hybrid(parts, width) -> np.ndarray:
    """mu <q, k> / sqrt(d_h) + (1 - mu) position; the query comes divided already."""
    position = algorithm_4(parts["query_position"], parts["key_position"], parts["alpha"], width)
    q, k, out = parts["query"].numpy(), parts["key"].numpy(), np.zeros_like(position)
    for b, h, i, j in np.ndindex(*out.shape):
        mu = float(parts["mu"][h])
        out[b, h, i, j] = mu * (q[b, h, i] * k[b, h, j]).sum() + (1 - mu) * position[b, h, i, j]
    return out


def test_position_scores_are_algorithm_4(parts):
    # `width` is d_pe and not the number of columns, which a low-rank factor makes fewer.
    expected = algorithm_4(parts["query_position"], parts["key_position"], parts["alpha"], WIDTH)
    assert_close(position_scores(parts["query_position"], parts["key_position"], parts["alpha"], WIDTH), expected)


def test_the_sign_of_alpha_does_not_count(parts):
    q, k, alpha = parts["query_position"], parts["key_position"], parts["alpha"]
    assert_close(position_scores(q, k, -alpha, WIDTH), position_scores(q, k, alpha.abs(), WIDTH))


def test_hybrid_scores_weigh_content_against_position(parts):
    content = torch.einsum("bhqf,bhkf->bhqk", parts["query"], parts["key"])
    position = torch.from_numpy(algorithm_4(parts["query_position"], parts["key_position"], parts["alpha"], WIDTH))
    assert_close(hybrid_scores(content, position, parts["mu"]), hybrid(parts, WIDTH))
    assert_close(hybrid_scores(content, position, torch.ones(HEADS)), content)
    assert_close(hybrid_scores(content, position, torch.zeros(HEADS)), position)


def test_extended_inner_products_are_the_hybrid_scores(parts):
    query, key = extend(**parts, width=WIDTH)
    assert query.shape == (BATCH, HEADS, QUERIES, FEATURES + CURSORS * COLUMNS)
    assert key.shape == (BATCH, HEADS, KEYS, FEATURES + CURSORS * COLUMNS)
    assert_close(query @ key.mT, hybrid(parts, WIDTH))


def test_the_key_side_is_left_as_it_is(parts):
    # It is cached while alpha and mu stay with the asking side.
    _, key = extend(**parts, width=WIDTH)
    assert torch.equal(key[..., :FEATURES], parts["key"])
    assert torch.equal(key[..., FEATURES:], parts["key_position"].reshape(BATCH, HEADS, KEYS, -1))


def test_without_content_only_positions_score(parts):
    parts["mu"] = None
    query, key = extend(**parts, width=WIDTH)
    expected = algorithm_4(parts["query_position"], parts["key_position"], parts["alpha"], WIDTH)
    assert_close(query @ key.mT, expected)


def test_attention_over_concatenated_features_is_hybrid_attention(parts):
    rng = np.random.default_rng(5)
    parts["query"], parts["query_position"] = (
        torch.from_numpy(rng.normal(size=(BATCH, HEADS, KEYS, *shape))) for shape in ((FEATURES,), (CURSORS, COLUMNS))
    )
    value = torch.from_numpy(rng.normal(size=(BATCH, HEADS, KEYS, 3)))
    query, key = extend(**parts, width=WIDTH)
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0)
    scores, expected = hybrid(parts, WIDTH), np.zeros((BATCH, HEADS, KEYS, 3))
    for b, h, i in np.ndindex(BATCH, HEADS, KEYS):
        weights = np.exp(scores[b, h, i, : i + 1] - scores[b, h, i, : i + 1].max())
        expected[b, h, i] = (weights / weights.sum()) @ value.numpy()[b, h, : i + 1]
    assert_close(attended, expected)


def test_scores_have_the_gradients_of_their_formula(parts):
    leaves = [parts[name].requires_grad_() for name in ("query_position", "key_position", "alpha")]
    small = [leaves[0][:1, :, :2, :, :2], leaves[1][:1, :, :2, :, :2], leaves[2]]
    small = [leaf.detach().clone().requires_grad_() for leaf in small]
    torch.autograd.gradcheck(lambda q, k, a: position_scores(q, k, a, WIDTH), small)
