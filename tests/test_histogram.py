"""The histogram filter's values, against oracles that share no code with it."""

import math

import numpy as np
import pytest
import torch

from prism.ops.histogram import displacement, edge_mass, histogram_step, one_hot_start, sharpen
from tests.histogram_oracles import Case, as_histogram, dense_scan, path_sum, random_case, transition
from tests.tolerances import assert_close

methods = pytest.mark.parametrize("method", ["reference", "adjoint", "auto"])
SHAPES = [(1, 1, 1, 1), (2, 1, 3, 3), (1, 2, 4, 3), (2, 3, 5, 7), (3, 2, 12, 5), (1, 2, 9, 33)]


# --- The stochastic matrix ---


def test_the_oracle_is_a_stochastic_matrix():
    reset, action = 0.3, np.array([0.2, 0.5, 0.3])
    expected = np.array([  # offsets -1, 0, 1, by hand
        [0.7 * (0.3 + 0.5) + 0.3 * 0.3, 0.7 * 0.2 + 0.3 * 0.5, 0.3 * 0.2],
        [0.7 * 0.3 + 0.3 * 0.3, 0.7 * 0.5 + 0.3 * 0.5, 0.7 * 0.2 + 0.3 * 0.2],
        [0.3 * 0.3, 0.7 * 0.3 + 0.3 * 0.5, 0.7 * (0.5 + 0.2) + 0.3 * 0.2],
    ])
    assert_close(torch.from_numpy(transition(reset, action, 1.0, 3)), expected)
    assert_close(torch.from_numpy(transition(reset, action, 1.0, 9).sum(1)), np.ones(9))


@methods
@pytest.mark.parametrize("copy", [False, True], ids=["", "copy"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_is_a_product_of_stochastic_matrices(shape, epsilon, copy, method):
    case = random_case(*shape, copy=copy)
    assert_close(case.scan(epsilon, method), dense_scan(case, epsilon))


@methods
@pytest.mark.parametrize("mass", [0.25, 3.0])
def test_a_start_of_any_mass(mass, method):
    # Only at the start can the total of Algorithm 1 (1) differ from 1.
    case = random_case(2, 3, 4, 7, copy=True, mass=mass)
    assert_close(case.scan(1e-3, method), dense_scan(case, 1e-3))


@methods
def test_single_precision_is_as_good_as_its_dtype(method):
    case = random_case(2, 3, 20, 41, copy=True).to(torch.float32)
    assert case.scan(method=method).dtype == torch.float32
    assert_close(case.scan(method=method), dense_scan(case), dtype=torch.float32)


@methods
def test_views_are_as_good_as_copies(method):
    case = random_case(2, 3, 5, 7, copy=True)
    views = Case(*(torch.stack((part, torch.full_like(part, torch.nan)), -1)[..., 0] for part in case))
    assert not any(part.is_contiguous() for part in views)
    assert_close(views.scan(method=method), dense_scan(case))


def test_one_step_is_a_scan_of_one_token():
    case = random_case(2, 3, 1, 7, copy=True)
    weights = torch.cat((case.reset[..., None] * case.action, (1 - case.reset)[..., None] * case.action), -1)
    weights = (weights * case.no_copy[..., None])[:, :, 0]
    stepped = histogram_step(case.start, weights, case.gamma.expand(2, 3), case.copied[:, :, 0])
    assert_close(stepped, dense_scan(case)[:, :, 0])


# --- The sum over paths ---


@methods
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_unsharpened_scan_is_the_sum_over_all_paths(length, method):
    """eq:pmf_with_reset with eq:path_indicator from the one-hot origin, at gamma = 1 and epsilon = 0.

    The convention: Algorithm 1 resets first and then takes its step, so a reset at u removes the shifts of t < u and
    not its own. That is the paper's product over u = t+1 .. l-1. Over u = t .. l-1 it would be another distribution.
    """
    case = random_case(1, 1, length, 2 * length + 1, seed=length)
    case = case._replace(start=torch.eye(2 * length + 1, dtype=torch.float64)[length].view(1, 1, -1),
                         gamma=torch.ones(1, dtype=torch.float64))
    reset, action = case.reset[0, 0].numpy(), case.action[0, 0].numpy()
    scanned = case.scan(0.0, method)[0, 0]
    for t in range(length):
        assert_close(scanned[t], as_histogram(path_sum(reset[: t + 1], action[: t + 1], 1), 2 * length + 1))
    other = as_histogram(path_sum(reset, action, 0), 2 * length + 1)
    assert np.abs(scanned[-1].numpy() - other).max() > 1e-3


# --- Displacement between two tokens ---


def test_displacement_is_the_product_of_independent_marginals():
    rng = np.random.default_rng(0)
    earlier, later = rng.dirichlet(np.ones(5), (2, 3)), rng.dirichlet(np.ones(5), (2, 3))
    expected = np.zeros((2, 3, 9))
    for b in range(2):
        for c in range(3):
            for i in range(5):
                for j in range(5):
                    expected[b, c, j - i + 4] += earlier[b, c, i] * later[b, c, j]
    actual = displacement(torch.from_numpy(earlier), torch.from_numpy(later))
    assert_close(actual, expected)
    assert_close(actual.sum(-1), np.ones((2, 3)))


def _unsharpened(action: list[list[float]], reset: list[float], bins: int = 9) -> torch.Tensor:
    start = one_hot_start(1, 1, bins // 2, dtype=torch.float64, device=torch.device("cpu"))
    case = Case(start, torch.tensor([[reset]], dtype=torch.float64), torch.tensor([[action]], dtype=torch.float64),
                torch.ones(1, dtype=torch.float64))
    return case.scan(0.0, "reference")[0, 0]


def test_displacement_differs_from_the_path_sum_when_the_earlier_position_is_uncertain():
    # Increment or keep, a coin each, twice. Between the tokens the cursor moves by 0 or 1, whatever came before;
    # correlating the marginals makes -1 and 2 possible.
    first, second = _unsharpened([[0.5, 0.5, 0.0]] * 2, [0.0, 0.0])
    correlated = displacement(first, second)
    assert_close(correlated[7:11], [0.125, 0.375, 0.375, 0.125])
    assert path_sum(np.zeros(1), np.array([[0.5, 0.5, 0.0]]), 1) == {1: 0.5, 0: 0.5, -1: 0.0}


def test_displacement_is_the_path_sum_after_a_certain_position_without_reset():
    action = [[1.0, 0.0, 0.0], [0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]
    histograms = _unsharpened(action, [0.0, 0.0, 0.0])
    exact = as_histogram(path_sum(np.zeros(2), np.array(action[1:]), 1), 17)
    assert_close(displacement(histograms[0], histograms[2]), exact)


def test_displacement_differs_from_the_path_sum_across_a_reset():
    action, reset = [[1.0, 0.0, 0.0], [0.2, 0.5, 0.3]], [0.0, 0.5]
    histograms = _unsharpened(action, reset)
    exact = as_histogram(path_sum(np.array(reset[1:]), np.array(action[1:]), 1), 17)
    correlated = displacement(histograms[0], histograms[1]).numpy()
    assert exact[8 - 2] == 0
    assert correlated[8 - 2] == pytest.approx(0.5 * 0.3)


# --- Sharpening ---


@methods
@pytest.mark.parametrize("gamma", [1.0, 1.3, 2.0])
def test_repeated_sharpening_multiplies_the_exponents(gamma, method):
    """Appendix "Sum and Sharpen": with gates that always keep and epsilon 0, p_n = p_0^(gamma^n), normalised."""
    initial = np.random.default_rng(1).dirichlet(np.ones(7))
    steps = 6
    action = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64).expand(1, 1, steps, 3)
    case = Case(torch.from_numpy(initial).view(1, 1, 7), torch.zeros(1, 1, steps, dtype=torch.float64), action,
                torch.tensor([gamma], dtype=torch.float64))
    scanned = case.scan(0.0, method)[0, 0]
    for n in range(1, steps + 1):
        powers = np.exp(gamma**n * (np.log(initial) - np.log(initial.max())))
        assert_close(scanned[n - 1], powers / powers.sum(), what=f"p_{n}")


def test_sharpen_is_the_power_of_the_mass_plus_epsilon():
    mass = torch.tensor([[0.5, 0.25, 0.25, 0.0]], dtype=torch.float64)
    expected = [(m + 0.01) ** 3 for m in (0.5, 0.25, 0.25, 0.0)]
    actual = sharpen(mass, torch.tensor([3.0], dtype=torch.float64), 0.01)
    assert_close(actual, [[e / math.fsum(expected) for e in expected]])


@pytest.mark.parametrize("gamma", [1.0, 2.0, 17.0, 50.0])
@pytest.mark.parametrize("shape", ["one-hot", "uniform", "two far apart", "empty"])
def test_sharpening_is_never_nan_in_single_precision(shape, gamma):
    bins = 4097
    mass = torch.zeros(1, 1, bins)
    if shape == "uniform":
        mass += 1 / bins
    elif shape != "empty":
        mass[..., 5] = 1
    if shape == "two far apart":
        mass[..., [5, 4000]] = torch.tensor([1e-30, 1.0])
    exponent = torch.full((1, 1), gamma)
    sharp = sharpen(mass, exponent)
    assert sharp.isfinite().all()
    assert sharp.sum() == pytest.approx(1, abs=1e-5)
    keep = torch.tensor([0.0, 1.0, 0.0]).expand(1, 1, 2, 3)
    for method in ("reference", "adjoint"):
        case = Case(mass, torch.full((1, 1, 2), 0.1), keep, exponent[0]).tracked()
        out = case.scan(1e-8, method)
        out[..., ::7].square().sum().backward()
        assert out.isfinite().all()
        assert all(part.grad is not None and part.grad.isfinite().all() for part in case.leaves())


# --- Small things ---


def test_one_hot_start():
    start = one_hot_start(2, 3, 4, dtype=torch.float64, device=torch.device("cpu"))
    assert start.shape == (2, 3, 9)
    assert start.sum() == 6
    assert (start[..., 4] == 1).all()


def test_edge_mass_counts_both_ends():
    assert edge_mass(torch.tensor([[0.25, 0.5, 0.125, 0.125], [0.0, 1.0, 0.0, 0.0]])).tolist() == [0.375, 0.0]
