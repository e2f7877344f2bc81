"""From histograms to position vectors: Algorithms 2 and 3, and the low-rank factor that stands in for the table."""

import math

import numpy as np
import pytest
import torch

from prism.ops.superposition import (
    at_expected_position,
    low_rank_table,
    normalise,
    sinusoid,
    sinusoid_table,
    superpose,
)
from tests.tolerances import assert_close


def waves(position: float, width: int) -> np.ndarray:
    """f(z) one component at a time: f_2i = sin(z exp(-ln 10000 2i / d)), f_2i+1 = cos of the same."""
    out = np.empty(width)
    for column in range(width):
        angle = position * math.exp(-math.log(10000.0) * 2 * (column // 2) / width)
        out[column] = math.sin(angle) if column % 2 == 0 else math.cos(angle)
    return out


def dirichlet(*shape: int, seed: int = 0, concentration: float = 0.3) -> torch.Tensor:
    *rows, bins = shape
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(bins, concentration), tuple(rows)))


# --- The table ---


@pytest.mark.parametrize(("capacity", "width"), [(0, 2), (1, 6), (5, 64), (40, 340), (3, 7)])
def test_the_table_is_a_sinusoid_at_each_offset(capacity, width):
    table = sinusoid_table(capacity, width)
    assert table.dtype == torch.float64
    assert_close(table, np.stack([waves(offset, width) for offset in range(-capacity, capacity + 1)]))


def test_sinusoids_of_any_shape_and_of_fractions():
    positions = torch.tensor([[0.0, 1.5], [-2.25, 100.0]], dtype=torch.float64)
    expected = np.array([[waves(float(p), 6) for p in row] for row in positions])
    assert_close(sinusoid(positions, 6), expected)


@pytest.mark.parametrize("distance", [0, 1, 2, 17, -5])
@pytest.mark.parametrize("width", [6, 64])
def test_inner_product_of_two_positions_is_a_sum_of_cosines(width, distance):
    """kappa_cos of section "From distance to similarity", times d/2: a function of the distance alone."""
    table = sinusoid_table(20, width)
    expected = sum(math.cos(distance / 10000 ** (2 * m / width)) for m in range(width // 2))
    for at in (-3, 0, 2):
        product = table[20 + at] @ table[20 + at + distance]
        assert float(product) == pytest.approx(expected, rel=1e-12)


# --- Superposition ---


@pytest.mark.parametrize("shape", [(2, 3, 4, 7), (1, 1, 1, 1), (3, 2, 1, 5)], ids=str)
def test_superposition_is_the_weighted_sum_of_positions(shape):
    histogram, capacity = dirichlet(*shape), shape[-1] // 2
    expected = np.zeros((*shape[:3], 10))
    for b, c, t, i in np.ndindex(*shape):
        expected[b, c, t] += float(histogram[b, c, t, i]) * waves(i - capacity, 10)
    assert_close(superpose(histogram, sinusoid_table(capacity, 10)), expected)
    # As the scan stores them: [time, bins, batch, cursors] seen through a permutation.
    stored = histogram.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    assert_close(superpose(stored, sinusoid_table(capacity, 10)), expected)


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 2, 0, 5)], ids=str)
def test_superposition_of_nothing(shape):
    assert superpose(torch.zeros(shape, dtype=torch.float64), sinusoid_table(2, 4)).shape == (*shape[:3], 4)


def test_superposition_has_the_gradient_of_a_matrix_product():
    histogram, table = dirichlet(1, 2, 3, 5).requires_grad_(), sinusoid_table(2, 4).requires_grad_()
    torch.autograd.gradcheck(superpose, (histogram, table))


def test_the_expected_position_is_another_vector():
    # "Why not average scalars first?": the mean of -2 and 2 is 0, and f(0) is not the mean of f(-2) and f(2).
    histogram = torch.tensor([0.5, 0.0, 0.0, 0.0, 0.5], dtype=torch.float64).view(1, 1, 1, 5)
    assert_close(at_expected_position(histogram, 8)[0, 0, 0], waves(0.0, 8))
    mixed = superpose(histogram, sinusoid_table(2, 8))[0, 0, 0]
    assert_close(mixed, (waves(-2, 8) + waves(2, 8)) / 2)
    assert float(mixed[1]) == pytest.approx(math.cos(2.0))

    random = dirichlet(2, 2, 3, 7)
    expected = np.zeros((2, 2, 3, 8))
    for b, c, t in np.ndindex(2, 2, 3):
        expected[b, c, t] = waves(sum((i - 3) * float(random[b, c, t, i]) for i in range(7)), 8)
    assert_close(at_expected_position(random, 8), expected)


# --- The low-rank factor ---


@pytest.mark.parametrize(("capacity", "width"), [(0, 340), (1, 2), (12, 64), (85, 340), (85, 64), (300, 340)])
def test_the_factor_keeps_every_inner_product_and_norm(capacity, width):
    factor = low_rank_table(capacity, width)
    table = np.stack([waves(offset, width) for offset in range(-capacity, capacity + 1)])
    histograms = dirichlet(40, 2 * capacity + 1).numpy()
    full, short = histograms @ table, histograms @ factor.numpy()
    assert np.abs(full @ full.T - short @ short.T).max() <= 1e-6 * width / 2
    # The largest errors are those of one-hot histograms.
    assert np.abs(table @ table.T - factor.numpy() @ factor.numpy().T).max() <= 1e-6 * width / 2
    lengths = np.linalg.norm(full, axis=1), np.linalg.norm(short, axis=1)
    assert np.abs(lengths[0] - lengths[1]).max() <= 1e-6 * math.sqrt(width / 2)


def test_the_factor_is_as_narrow_as_measured():
    assert 50 <= low_rank_table(85, 340).shape[1] <= 60  # 57 at 171 bins
    assert low_rank_table(0, 340).shape == (1, 1)
    assert low_rank_table(12, 64).shape[1] <= 25
    assert low_rank_table(85, 340, 1e-3).shape[1] < low_rank_table(85, 340).shape[1]


def test_the_factor_drops_nothing_it_must_keep():
    # One column fewer would break the promise: the rank is the smallest that keeps it on the diagonal.
    factor = low_rank_table(85, 340)
    missing = 170 - factor.square().sum(1)
    assert missing.max() <= 1e-7 * 170
    assert (missing + factor[:, -1].square()).max() > 1e-7 * 170


def test_a_factor_first_made_without_gradients_serves_training():
    with torch.inference_mode():
        low_rank_table(23, 22)
    assert not low_rank_table(23, 22).is_inference()


# --- The norm ---


@pytest.mark.parametrize("norm", ["constant", "joint"])
@pytest.mark.parametrize("cursors", [1, 4, 5])
def test_sharp_cursors_have_norm_sqrt_width_together(cursors, norm):
    offsets = torch.tensor([[3.0, -2.0, 0.0, 7.0, 1.0][:cursors]], dtype=torch.float64)
    scaled = normalise(sinusoid(offsets, 10), 10, norm)
    assert_close(scaled.flatten(-2).norm(dim=-1), [math.sqrt(10)])
    assert_close(scaled.norm(dim=-1), [[math.sqrt(10 / cursors)] * cursors])


def test_the_constant_norm_is_one_factor_and_the_joint_norm_one_per_row():
    encoding = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 4, 6)))
    assert_close(normalise(encoding, 6, "constant"), encoding * math.sqrt(6) / math.sqrt(4 * 3))
    expected = encoding.numpy().copy()
    for b, t in np.ndindex(2, 3):
        expected[b, t] *= math.sqrt(6) / math.sqrt((expected[b, t] ** 2).sum())
    assert_close(normalise(encoding, 6, "joint"), expected)


def test_the_joint_norm_of_nothing_is_nothing():
    encoding = torch.zeros(2, 3, 4, requires_grad=True)
    normalise(encoding, 4, "joint").sum().backward()
    assert encoding.grad is not None
    assert encoding.grad.isfinite().all()
