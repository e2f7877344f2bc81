"""Sums by doubling are what the library's cumulative sum gives, and so are their gradients."""

import pytest
import torch

from prism.ops.running_sum import running_sum, sum_from_here
from tests.tolerances import assert_close

SUMS = {
    "so far": (running_sum, lambda x: x.cumsum(-1)),
    "from here": (sum_from_here, lambda x: x.flip(-1).cumsum(-1).flip(-1)),
}


@pytest.mark.parametrize(("ours", "plain"), SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("shape", [(1,), (2, 2), (3, 2, 7), (64,), (2, 65), (2, 0)], ids=str)
def test_doubling_sums_as_cumsum_does(shape, ours, plain):
    x, upstream = (torch.randn(shape, dtype=torch.float64) for _ in range(2))
    x.requires_grad_()
    assert_close(ours(x), plain(x))
    assert_close(*(torch.autograd.grad(sums(x), x, upstream)[0] for sums in (ours, plain)))
