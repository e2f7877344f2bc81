"""The hand-derived backward of the scan: against finite differences, and against autograd through the reference."""

import pytest
import torch
from torch.autograd import gradcheck

from prism.ops import histogram_adjoint
from prism.ops.histogram import Branch, branch_weights, displacement, histogram_scan, one_hot_start
from tests.histogram_oracles import Case, random_case
from tests.tolerances import RELATIVE_ERROR, SCAN_HISTOGRAM, assert_close, relative_error

SHAPES = [(1, 1, 1, 1), (2, 1, 2, 1), (1, 2, 1, 3), (2, 1, 2, 3), (1, 1, 4, 3), (1, 2, 3, 5), (2, 1, 2, 7)]
copies = pytest.mark.parametrize("copy", [False, True], ids=["", "copy"])
NAMES = ("start", "weights", "gamma", "copied")


def _leaves(case: Case) -> tuple[torch.Tensor, ...]:
    """The scan's own inputs. Free weights: the backward may not rely on their adding up to anything."""
    parts = (case.start, branch_weights(case.reset, case.action, case.no_copy), case.gamma, case.copied)
    return tuple(part.detach().clone().requires_grad_() for part in parts if part is not None)


def _gradients(leaves: tuple[torch.Tensor, ...], upstream: torch.Tensor, epsilon: float, method: str):
    start, weights, gamma, *copied = leaves
    out = histogram_scan(start, weights, gamma, copied[0] if copied else None, epsilon, method)
    return torch.autograd.grad(out, leaves, upstream.to(out.dtype), materialize_grads=True)


def _upstream(case: Case, seed: int = 7) -> torch.Tensor:
    shape = (*case.reset.shape, case.start.shape[-1])
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# --- Finite differences ---


@copies
@pytest.mark.parametrize("epsilon", [0.0, 1e-8, 1e-2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gradient_by_finite_differences(shape, epsilon, copy):
    # A mass of 1.7: the gradient through the start's total is part of the answer.
    leaves = _leaves(random_case(*shape, copy=copy, mass=1.7))
    gradcheck(lambda s, w, g, c=None: histogram_scan(s, w, g, c, epsilon, "adjoint"), leaves)


@copies
def test_gradients_from_a_one_hot_start(copy):
    # Most bins hold epsilon alone here, as in training; it is large, so that finite differences can resolve it.
    case = random_case(1, 2, 2, 7, copy=copy)
    start = one_hot_start(1, 2, 3, dtype=torch.float64, device=torch.device("cpu"))
    gradcheck(lambda s, w, g, c=None: histogram_scan(s, w, g, c, 1e-2, "adjoint"), _leaves(case._replace(start=start)))


def test_gradients_of_displacement():
    parts = [random_case(2, 1, 1, 5, seed=seed).start.requires_grad_() for seed in (0, 1)]
    gradcheck(displacement, parts)


# --- Autograd through the reference ---


@copies
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 5, 12, 41), (1, 1, 0, 3), (0, 2, 3, 3)], ids=str)
def test_every_gradient_is_that_of_the_reference(shape, dtype, copy):
    case = random_case(*shape, copy=copy, mass=0.6)
    expected = _gradients(_leaves(case), _upstream(case), 1e-8, "reference")
    single = _leaves(case.to(dtype))
    actual = _gradients(single, _upstream(case), 1e-8, "adjoint")
    eager = _gradients(single, _upstream(case), 1e-8, "reference")
    for name, a, b, e in zip(NAMES, actual, eager, expected, strict=False):
        assert a.dtype == dtype
        if e.norm() < 1e-12:  # zero but for rounding, as everything is with a single bin
            assert a.norm() < RELATIVE_ERROR[dtype], name
        else:  # where cancellation costs the reference more than rounding, it may not cost the adjoint twice that
            assert_close(a, e, tolerance=max(RELATIVE_ERROR[dtype], 2 * relative_error(b, e)), what=name)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "strided"])
def test_an_upstream_gradient_of_any_layout(kind):
    case = random_case(2, 3, 4, 7, copy=True)
    upstream = _upstream(case)
    if kind == "expanded":
        upstream = upstream[:, :, :1, :].expand_as(upstream)
    elif kind == "transposed":
        upstream = upstream.transpose(0, 3).contiguous().transpose(0, 3)
    else:
        upstream = torch.stack((upstream, torch.full_like(upstream, torch.nan)), -1)[..., 0]
    assert not upstream.is_contiguous()
    actual = _gradients(_leaves(case), upstream, 1e-8, "adjoint")
    expected = _gradients(_leaves(case), upstream.contiguous(), 1e-8, "reference")
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_close(a, e, what=name)


def test_inputs_of_any_layout():
    case = random_case(2, 3, 4, 7, copy=True)
    leaves = _leaves(case)
    views = tuple(torch.stack((leaf, torch.full_like(leaf, torch.nan)), -1)[..., 0] for leaf in leaves)
    assert not any(view.is_contiguous() for view in views)
    out = histogram_scan(*views, 1e-8, "adjoint")
    actual = torch.autograd.grad(out, leaves, _upstream(case))
    for name, a, e in zip(NAMES, actual, _gradients(leaves, _upstream(case), 1e-8, "reference"), strict=True):
        assert_close(a, e, what=name)


def test_only_the_last_histogram_is_used():
    # What a chunk hands to the next: the gradient must come all the way back.
    case = random_case(1, 2, 5, 7)
    upstream = torch.zeros_like(_upstream(case))
    upstream[:, :, -1] = _upstream(case)[:, :, -1]
    expected = _gradients(_leaves(case), upstream, 1e-8, "reference")
    for name, a, e in zip(NAMES, _gradients(_leaves(case), upstream, 1e-8, "adjoint"), expected, strict=False):
        assert_close(a, e, what=name)


def test_gradients_flow_through_the_gates():
    case = random_case(2, 2, 4, 5, copy=True)
    found = []
    for method in ("adjoint", "reference"):
        tracked = case.tracked()
        (tracked.scan(method=method) * _upstream(case)).sum().backward()
        found.append([part.grad for part in tracked.leaves()])
    for a, e in zip(*found, strict=True):
        assert_close(a, e)


# --- A support that grows ---


def _one_hot_case(time: int, bins: int, gamma: tuple[float, ...]) -> Case:
    case = random_case(2, len(gamma), time, bins)
    start = one_hot_start(2, len(gamma), bins // 2, dtype=torch.float64, device=torch.device("cpu"))
    return case._replace(start=start[..., :bins], gamma=torch.tensor(gamma, dtype=torch.float64))


@pytest.mark.parametrize("epsilon", [0.0, 1e-10, 1e-8])
@pytest.mark.parametrize("shape", [(1, 9), (7, 41), (20, 41), (25, 41), (6, 12), (3, 1), (4, 2), (2, 4001)], ids=str)
def test_a_growing_support_changes_nothing(shape, epsilon):
    # 25 tokens on 20 offsets a side: the clamps act in the end.
    case = _one_hot_case(*shape, (1.7, 1.5, 2.0, 4.0) if shape[1] < 1000 else (1.7, 4.0))
    given = [leaf.float().detach().requires_grad_(i > 0) for i, leaf in enumerate(_leaves(case))]
    exact = [leaf.detach().requires_grad_(i > 0) for i, leaf in enumerate(_leaves(case))]
    grown = histogram_scan(*given, None, epsilon, "adjoint")
    # The reference has no gradient where a bin is empty: an epsilon far below float32's rounding stands in for 0.
    whole = histogram_scan(*exact, None, epsilon or 1e-30, "reference")
    assert_close(grown, whole, tolerance=SCAN_HISTOGRAM)
    found = torch.autograd.grad(grown, given[1:], _upstream(case).float())
    for name, a, e in zip(NAMES[1:], found, torch.autograd.grad(whole, exact[1:], _upstream(case)), strict=False):
        if e.norm() < 1e-12:
            assert a.norm() < RELATIVE_ERROR[torch.float32], name
        else:
            assert_close(a, e, dtype=torch.float32, what=name)


def test_the_floor_beyond_the_support_is_the_references():
    case = _one_hot_case(3, 21, (1.3, 2.0)).to(torch.float32)
    grown, whole = case.scan(method="adjoint"), case.scan(method="reference")
    assert (whole[..., 3] < 1e-7).all()
    for beyond in (slice(3, 7), slice(14, 18)):  # nearer to the edge, a clamp's share of the floor is left out
        assert_close(grown[..., beyond], whole[..., beyond])


def test_the_support_that_is_computed():
    def reached(start: torch.Tensor, gamma: float = 2.0, epsilon: float = 1e-8, anywhere: bool = False) -> int:
        return histogram_adjoint._reach(start, torch.tensor([3.0, gamma, 3.0]), epsilon, anywhere)

    start = torch.zeros(9, 3)
    start[4] = 1
    assert reached(start) == 0
    assert reached(start, anywhere=True) == reached(start.double()) == reached(start, epsilon=1e-3) == 9
    assert reached(start, gamma=1.01) == 9
    assert reached(start, gamma=1.01, epsilon=0.0) == 0
    start[2, 1] = 1e-12
    assert reached(start) == 2
    windows = histogram_adjoint._windows(2, 3, 9)
    assert [(one.first, one.end, one.outside) for one in windows] == [(1, 8, 2), (0, 9, 0), (0, 9, 0)]


# --- Epsilon zero, where a bin can be empty ---


def test_empty_bins_at_epsilon_zero_have_zero_gradient():
    # With gamma > 1 the derivative of u^gamma at u = 0 is 0; autograd through the logarithm says NaN instead.
    case = random_case(1, 2, 2, 9)
    start = one_hot_start(1, 2, 4, dtype=torch.float64, device=torch.device("cpu"))
    gamma = torch.tensor([2.0, 3.0], dtype=torch.float64)
    leaves = _leaves(case._replace(start=start, gamma=gamma))
    actual = _gradients(leaves, _upstream(case), 0.0, "adjoint")
    nearly = _gradients(leaves, _upstream(case), 1e-14, "reference")
    for name, a, e in zip(NAMES, actual, nearly, strict=False):
        assert_close(a, e, tolerance=1e-8, what=name)


# --- Blocks ---


@copies
@pytest.mark.parametrize("elements", [1, 20, 40, 77, 78])
def test_blocks_of_chains_are_seamless(monkeypatch, elements, copy):
    case = random_case(11, 1, 4, 7, copy=copy)
    expected = _gradients(_leaves(case), _upstream(case), 1e-8, "reference")
    monkeypatch.setattr(histogram_adjoint, "BLOCK_ELEMENTS", elements)
    sizes = [block.stop - block.start for block in histogram_adjoint._blocks(torch.empty(7, 11))]
    assert sum(sizes) == 11
    if elements == 20:
        assert sizes == [3, 3, 3, 2]  # several, the last one smaller
    assert_close(case.scan(method="adjoint"), case.scan(method="reference"))
    for name, a, e in zip(NAMES, _gradients(_leaves(case), _upstream(case), 1e-8, "adjoint"), expected, strict=False):
        assert_close(a, e, what=name)


# --- Memory that is used again ---


@pytest.fixture
def _reused_memory(monkeypatch):
    monkeypatch.setattr(histogram_adjoint, "LARGE", 0)
    monkeypatch.setattr(histogram_adjoint, "_spares", [])
    torch.use_deterministic_algorithms(False)  # the suite's own poisoning takes new memory each time


@pytest.mark.usefixtures("_reused_memory")
def test_memory_is_used_again_when_nobody_holds_it_and_not_before():
    case = random_case(2, 3, 4, 7)
    first = case.scan(method="adjoint")
    second = case.scan(method="adjoint")
    assert first.data_ptr() != second.data_ptr()
    kept, place = first.clone(), second.data_ptr()
    view = second[0, 0]
    del second  # a view still holds it
    assert case._replace(start=case.start.flip(-1)).scan(method="adjoint").data_ptr() != place
    del view
    assert torch.equal(first, kept)
    again = [case.scan(method="adjoint") for _ in range(4)]
    assert len({one.data_ptr() for one in again} | {first.data_ptr()}) == 5
    assert len(histogram_adjoint._spares) <= histogram_adjoint.SPARES
    for one in again:
        assert torch.equal(one, kept)


@pytest.mark.usefixtures("_reused_memory")
def test_a_training_step_uses_the_memory_of_the_one_before():
    case, places = random_case(2, 3, 4, 7), []
    expected = _gradients(_leaves(case), _upstream(case), 1e-8, "reference")
    for _ in range(3):
        leaves = _leaves(case)
        out = histogram_scan(*leaves, None, 1e-8, "adjoint")
        places.append(out.data_ptr())
        other = histogram_scan(*leaves, None, 1e-8, "adjoint")  # while the first waits for its backward
        found = torch.autograd.grad(out, leaves, _upstream(case))
        assert other.data_ptr() != out.data_ptr()
        for name, a, e in zip(NAMES, found, expected, strict=False):
            assert_close(a, e, what=name)
        del out, other, found
    assert len(set(places)) == histogram_adjoint.SPARES


def test_branches_are_ordered_as_the_weights_are():
    weights = branch_weights(torch.tensor(0.25), torch.tensor([0.5, 0.3, 0.2]), torch.tensor(0.5))
    assert weights[Branch.RESET_INCREMENT] == pytest.approx(0.5 * 0.25 * 0.5)
    assert weights[Branch.RESET_KEEP] == pytest.approx(0.5 * 0.25 * 0.3)
    assert weights[Branch.RESET_DECREMENT] == pytest.approx(0.5 * 0.25 * 0.2)
    assert weights[Branch.INCREMENT] == pytest.approx(0.5 * 0.75 * 0.5)
    assert weights[Branch.KEEP] == pytest.approx(0.5 * 0.75 * 0.3)
    assert weights[Branch.DECREMENT] == pytest.approx(0.5 * 0.75 * 0.2)
