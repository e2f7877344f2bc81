"""The scan's Triton kernels against Algorithm 1 in float64: compiled on a GPU, by Triton's interpreter without one."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from prism.bench.scan import Inputs, Size, _by, _kernels
from prism.errors import UserError
from prism.ops import histogram_triton
from prism.ops.histogram import MOST_BINS, branch_weights, histogram_scan, one_hot_start
from prism.ops.histogram_triton import Layout, layout, row_order, run_backward, run_forward, scan
from tests.histogram_oracles import Case, dense_scan, random_case
from tests.tolerances import RELATIVE_ERROR, SCAN_GRADIENT, SCAN_HISTOGRAM, assert_close, relative_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# batch, cursors, time, bins: one bin, two, odd and even, a partial block of chains, a partial lane, four layouts.
SHAPES = [(1, 1, 1, 1), (2, 1, 2, 2), (2, 3, 5, 9), (3, 3, 3, 43), (1, 5, 4, 101), (1, 2, 3, 200), (1, 1, 2, 401)]
copies = pytest.mark.parametrize("copy", [False, True], ids=["", "copy"])
NAMES = ("start", "weights", "gamma", "copied")


def leaves(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The scan's inputs. Free weights: the backward may not rely on their adding up to anything."""
    parts = (case.start, branch_weights(case.reset, case.action, case.no_copy), case.gamma, case.copied)
    return tuple(part.detach().to(DEVICE, dtype).requires_grad_() for part in parts if part is not None)


def run(case: Case, dtype: torch.dtype, method: str, epsilon: float = 1e-8):
    """Histograms and every gradient, for a random upstream gradient."""
    inputs = leaves(case, dtype)
    start, weights, gamma, *copied = inputs
    out = histogram_scan(start, weights, gamma, copied[0] if copied else None, epsilon, method)
    generator = torch.Generator().manual_seed(7)
    upstream = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(DEVICE, dtype)
    return out, torch.autograd.grad(out, inputs, upstream, materialize_grads=True)


def assert_no_worse(actual, expected, eager, what, than=2):
    """As close as promised, or, where cancellation costs eager float32 more, at most `than` times as far as that."""
    if expected.norm() < 1e-12:  # zero but for rounding, as everything is with a single bin
        assert actual.norm() < 1e-4, what
    else:
        tolerance = max(SCAN_GRADIENT[torch.float32], than * relative_error(eager, expected))
        assert_close(actual, expected, tolerance=tolerance, what=what)


@copies
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_histograms_and_every_gradient(shape, copy):
    case = random_case(*shape, copy=copy, mass=1.7)
    out, gradients = run(case, torch.float32, "triton")
    expected, of_reference = run(case, torch.float64, "reference")
    eager = run(case, torch.float32, "reference")[1]
    assert_close(out, expected, tolerance=SCAN_HISTOGRAM)
    for name, a, r, e in zip(NAMES, gradients, of_reference, eager, strict=False):
        assert_no_worse(a, r, e, name)


@copies
def test_against_dense_matrices(copy):
    case = random_case(2, 3, 4, 19, copy=copy)
    assert_close(run(case, torch.float32, "triton")[0], dense_scan(case), tolerance=SCAN_HISTOGRAM)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-2])
def test_from_a_one_hot_start_to_the_clamps(epsilon):
    case = random_case(2, 2, 6, 7)  # six steps, three offsets to either side: the clamps act
    start = one_hot_start(2, 2, 3, dtype=torch.float64, device=torch.device("cpu"))
    case = case._replace(start=start, action=torch.tensor([0.9, 0.05, 0.05]).double().expand_as(case.action))
    out, gradients = run(case, torch.float32, "triton", epsilon)
    expected, of_reference = run(case, torch.float64, "reference", epsilon)
    eager = run(case, torch.float32, "reference", epsilon)[1]
    assert_close(out, expected, tolerance=SCAN_HISTOGRAM)
    for name, a, r, e in zip(NAMES, gradients, of_reference, eager, strict=False):
        assert_no_worse(a, r, e, name, than=4)  # piled up at the edge, the start hardly matters: all is cancellation


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")  # the interpreter's numpy
def test_gradients_are_finite_at_epsilon_zero():
    case = random_case(1, 2, 2, 9)
    start = one_hot_start(1, 2, 4, dtype=torch.float64, device=torch.device("cpu"))
    case = case._replace(start=start, gamma=torch.tensor([2.0, 3.0], dtype=torch.float64))
    inputs = leaves(case, torch.float32)
    upstream = torch.randn(1, 2, 2, 9, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    found, expected = (
        torch.autograd.grad(histogram_scan(*inputs, None, 0.0, method), inputs, upstream)
        for method in ("triton", "adjoint")
    )
    for name, actual, adjoint in zip(NAMES, found, expected, strict=False):
        assert_close(actual, adjoint, tolerance=1e-4, what=name)


def test_a_large_exponent_does_not_underflow():
    # 0.2^60 and less in every bin is nothing in float32; the largest bin must still win.
    case = random_case(1, 2, 3, 21)._replace(gamma=torch.tensor([60.0, 90.0], dtype=torch.float64))
    out, gradients = run(case, torch.float32, "triton")
    assert_close(out, run(case, torch.float64, "reference")[0], tolerance=1e-4)
    assert all(g.isfinite().all() for g in gradients)


def test_inputs_of_any_layout():
    case = random_case(2, 3, 4, 9, copy=True)
    inputs = leaves(case, torch.float32)
    views = [torch.stack((one, torch.full_like(one, torch.nan)), -1)[..., 0] for one in inputs]
    assert not any(view.is_contiguous() for view in views)
    assert_close(histogram_scan(*views, 1e-8, "triton"), histogram_scan(*inputs, 1e-8, "triton"), tolerance=0)


def test_nothing_to_scan():
    for shape in ((0, 2, 3, 5), (2, 2, 0, 5)):
        out, gradients = run(random_case(*shape), torch.float32, "triton")
        assert out.shape == shape
        assert all(not g.any() for g in gradients)


@pytest.fixture(scope="module")
def addition():
    """A few chains of the paper's addition step, T = 85 and L = 171, and what float64 makes of them."""
    inputs = Inputs(Size("", 1, 4, 85) if DEVICE.type == "cpu" else Size("", 4, 280, 85), DEVICE)
    return inputs, inputs.exact().by(partial(histogram_scan, method="reference"))


@pytest.mark.parametrize("rows", [torch.float32, torch.float16], ids=str)
def test_the_accuracy_promised_at_the_papers_size(addition, rows):
    """Histograms, and the gradients of the gates' weights and of gamma, by the precision of the rows kept."""
    inputs, exact = addition
    whole = rows == torch.float32
    form = (_by("triton") if whole else _kernels)(inputs)
    found = form.found(form.call())
    allowed = (SCAN_HISTOGRAM if whole else SCAN_GRADIENT[rows], SCAN_GRADIENT[rows], SCAN_GRADIENT[rows])
    for name, actual, expected, bound in zip(("histograms", "weights", "gamma"), found, exact, allowed, strict=True):
        assert_close(actual, expected, tolerance=bound, what=name)


# --- 16-bit rows, as training keeps them ---


def half_gradients(case: Case, form: Layout, slots: int, places: list[int]):
    """Gradients through rows of 16 bits, with a 16-bit upstream gradient that spans twelve orders of magnitude."""
    start, weights, gamma, *copied = (one.detach() for one in leaves(case, torch.float32))
    weights, placed = weights.transpose(1, 2), torch.tensor(places, dtype=torch.int32, device=DEVICE)
    batch, time = weights.shape[:2]
    rows = torch.full((batch, time, slots, form.columns), torch.nan, dtype=torch.float16, device=DEVICE)
    mass = copied[0] if copied else None
    normalisers = run_forward(start, weights, gamma, mass, 0, 1e-8, form, rows, placed)
    columns = row_order(form).argsort(stable=True)[: form.bins]
    generator = torch.Generator().manual_seed(3)
    upstream = torch.randn(batch, time, len(places), form.bins, generator=generator, dtype=torch.float64)
    upstream = upstream * 10 ** torch.linspace(-6, 6, len(places))[:, None]
    scales = torch.full((batch, time, slots), torch.nan, device=DEVICE)
    scales[:, :, places] = upstream.abs().amax(-1).float().to(DEVICE)
    given = torch.zeros_like(rows)
    for at, place in enumerate(places):
        scaled = upstream[:, :, at].to(DEVICE) / scales[:, :, place, None]
        given[:, :, place] = given[:, :, place].index_copy(2, columns.to(DEVICE), scaled.half())
    found = run_backward(start, weights, gamma, mass, 0, 1e-8, form, rows, placed, normalisers, given, scales)
    return rows[:, :, places][..., columns.to(DEVICE)], found, upstream


@copies
@pytest.mark.parametrize("bins", [9, 43, 101])
def test_rows_of_16_bits(bins, copy):
    case = random_case(2, 3, 4, bins, copy=copy)
    form = layout(bins, half=True)
    rows, (of_start, of_weights, _, of_copied), upstream = half_gradients(case, form, 7, [5, 0, 3])
    inputs = leaves(case, torch.float64)
    expected = histogram_scan(*inputs[:3], inputs[3] if copy else None, 1e-8, "reference")
    assert_close(rows.transpose(1, 2), expected, tolerance=SCAN_GRADIENT[torch.float16])
    references = torch.autograd.grad(expected, inputs, upstream.transpose(1, 2).to(DEVICE))
    # Chain by chain: the scales differ by so much that one norm would see only the largest.
    for cursor in range(3):
        for name, a, r in (("start", of_start, references[0]), ("weights", of_weights.transpose(1, 2), references[1])):
            assert_close(a[:, cursor], r[:, cursor], tolerance=SCAN_GRADIENT[torch.float16], what=name)
        if copy:
            assert_close(of_copied[:, cursor], references[3][:, cursor], tolerance=SCAN_GRADIENT[torch.float16])


def test_only_the_slots_named_are_filled():
    case = random_case(1, 2, 2, 9)
    start, weights, gamma = (one.detach() for one in leaves(case, torch.float32))
    form = layout(9, half=True)
    rows = torch.full((1, 2, 4, form.columns), -7.0, dtype=torch.float16, device=DEVICE)
    places = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
    run_forward(start, weights.transpose(1, 2), gamma, None, 0, 1e-8, form, rows, places)
    assert (rows[:, :, [0, 2]] == -7).all()
    whole = rows[:, :, [3, 1]].float().sum(-1)
    assert_close(whole, torch.ones_like(whole), tolerance=2e-3)  # written whole, padding as zeros


# --- Layouts, and how the world sees the operator ---


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bins", [1, 2, 3, 95, 96, 97, 171, 192, 193, 569, 768, 1361, MOST_BINS])
def test_a_row_holds_every_bin_once(bins, half):
    form = layout(bins, half)
    order = row_order(form)
    assert form.columns >= bins
    assert form.per_lane % 2 == 0 or not half
    assert sorted(order[order < bins].tolist()) == list(range(bins))


def test_the_operator_is_whole():
    case = random_case(1, 2, 3, 9, copy=True)
    start, weights, gamma, copied = leaves(case, torch.float32)
    placed = weights.detach().transpose(1, 2).contiguous().requires_grad_()
    torch.library.opcheck(scan, (start, placed, gamma, copied, 0, 1e-8, False))
    torch.library.opcheck(scan, (start, placed, gamma, None, 0, 1e-8, False))


def test_autograd_is_refused_for_rows_of_16_bits():
    start, weights, gamma = leaves(random_case(1, 2, 3, 9), torch.float32)
    with pytest.raises(UserError, match="16-bit rows have no gradient"):
        scan(start, weights.transpose(1, 2), gamma, None, 0, 1e-8, True)


@pytest.mark.parametrize(("bins", "dtype", "said"), [
    (MOST_BINS + 2, torch.float32, f"at most {MOST_BINS} bins, sequences of 703 tokens, got {MOST_BINS + 2}"),
    (9, torch.float64, "needs float32, got float64"),
])
def test_what_it_does_not_take_is_refused(bins, dtype, said):
    start, weights, gamma = leaves(random_case(1, 1, 1, bins), dtype)
    with pytest.raises(UserError, match=said):
        histogram_scan(start, weights, gamma, method="triton")


def test_without_a_gpu_or_the_interpreter_it_is_refused(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    start, weights, gamma = (one.cpu() for one in leaves(random_case(1, 1, 1, 3), torch.float32))
    with pytest.raises(UserError, match="needs CUDA tensors, got one on cpu"):
        histogram_scan(start, weights, gamma, method="triton")


def test_the_tolerances_of_the_scan_are_those_promised():
    assert SCAN_HISTOGRAM <= 1e-6
    assert SCAN_GRADIENT[torch.float32] <= 1e-5
    assert SCAN_GRADIENT[torch.float16] <= 5e-4
    assert RELATIVE_ERROR[torch.float32] >= SCAN_HISTOGRAM
    assert histogram_triton.INTERPRETED is not torch.cuda.is_available()
