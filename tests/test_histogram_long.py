"""The scan over supports that registers cannot hold, against Algorithm 1 in float64: tile by tile, chunk by chunk."""

import pytest
import torch

pytest.importorskip("triton")

from prism.errors import UserError
from prism.ops import histogram, histogram_long
from prism.ops.histogram import branch_weights, histogram_scan, one_hot_start
from prism.ops.histogram_long import scan_long
from tests.histogram_oracles import Case, random_case
from tests.tolerances import SCAN_HISTOGRAM, assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# batch, cursors, time, bins: one bin, two, a whole tile, one more, one less, several tiles.
SHAPES = [(1, 1, 1, 1), (2, 1, 2, 2), (2, 3, 5, 8), (1, 2, 3, 9), (3, 3, 3, 15), (1, 5, 4, 101)]
copies = pytest.mark.parametrize("copy", [False, True], ids=["", "copy"])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    monkeypatch.setattr(histogram_long, "TILE", 8 if DEVICE.type == "cpu" else 128)
    monkeypatch.setattr(histogram, "MOST_BINS", 0)  # so that every support counts as long


def inputs(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
    parts = (case.start, branch_weights(case.reset, case.action, case.no_copy), case.gamma, case.copied)
    return tuple(None if part is None else part.to(DEVICE, dtype) for part in parts)


@copies
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_histograms(shape, copy):
    case = random_case(*shape, copy=copy, mass=1.7)
    found = histogram_scan(*inputs(case, torch.float32), 1e-8, "triton")
    assert found.shape == (*case.reset.shape, shape[3])
    assert_close(found, histogram_scan(*inputs(case, torch.float64), 1e-8, "reference"), tolerance=SCAN_HISTOGRAM)


def test_from_a_one_hot_start_to_the_clamps():
    case = random_case(2, 2, 16, 21)
    start = one_hot_start(2, 2, 10, dtype=torch.float64, device=torch.device("cpu"))
    case = case._replace(start=start, action=torch.tensor([0.9, 0.05, 0.05]).double().expand_as(case.action))
    found = histogram_scan(*inputs(case, torch.float32), 1e-8, "triton")
    assert_close(found, histogram_scan(*inputs(case, torch.float64), 1e-8, "reference"), tolerance=SCAN_HISTOGRAM)


def test_chunks_give_what_the_whole_gives():
    start, weights, gamma, _ = inputs(random_case(2, 3, 7, 19), torch.float32)
    whole = histogram_scan(start, weights, gamma, method="triton")
    first = histogram_scan(start, weights[:, :, :3], gamma, method="triton")
    second = histogram_scan(first[:, :, -1], weights[:, :, 3:], gamma, method="triton")
    assert_close(torch.cat((first, second), 2), whole, tolerance=SCAN_HISTOGRAM)


def test_a_large_exponent_does_not_underflow():
    case = random_case(1, 2, 3, 21)._replace(gamma=torch.tensor([60.0, 90.0], dtype=torch.float64))
    found = histogram_scan(*inputs(case, torch.float32), 1e-8, "triton")
    assert_close(found, histogram_scan(*inputs(case, torch.float64), 1e-8, "reference"), tolerance=1e-4)


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")  # the interpreter's numpy
def test_epsilon_zero_leaves_empty_bins_empty():
    case = random_case(1, 2, 2, 21)
    start = one_hot_start(1, 2, 10, dtype=torch.float64, device=torch.device("cpu"))
    start, weights, gamma, _ = inputs(case._replace(start=start), torch.float32)
    found = histogram_scan(start, weights, gamma, None, 0.0, "triton")
    assert not found[..., :8].any()
    assert_close(found.sum(-1), torch.ones_like(found[..., 0]))


def test_nothing_to_scan():
    for shape in ((0, 2, 3, 5), (2, 2, 0, 5)):
        assert histogram_scan(*inputs(random_case(*shape), torch.float32), 1e-8, "triton").shape == shape


def test_the_operator_is_whole():
    start, weights, gamma, copied = inputs(random_case(1, 2, 3, 9, copy=True), torch.float32)
    torch.library.opcheck(scan_long, (start, weights, gamma, copied, 1e-8))
    torch.library.opcheck(scan_long, (start, weights, gamma, None, 1e-8))


def test_a_gradient_is_refused_and_the_message_says_what_has_one(monkeypatch):
    monkeypatch.setattr(histogram, "MOST_BINS", 7)
    start, weights, gamma, _ = inputs(random_case(1, 2, 3, 9), torch.float32)
    with pytest.raises(UserError, match="gradient for supports of at most 7 bins, sequences of 2 tokens, got 9"):
        histogram_scan(start, weights.requires_grad_(), gamma, method="triton")
    with pytest.raises(UserError, match="the scan over long supports has no gradient"):
        scan_long(start, weights, gamma, None, 1e-8)
    with torch.no_grad():
        assert histogram_scan(start, weights, gamma, method="triton").shape == (1, 2, 3, 9)
