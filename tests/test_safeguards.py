"""The tests' own safeguards: each must be able to fail."""

import jaxtyping
import pytest
import torch

from prism.ops.histogram import edge_mass, sharpen
from prism.settings import setting
from tests.tolerances import assert_close


def test_shapes_are_checked_at_run_time():
    with pytest.raises(jaxtyping.TypeCheckError):
        sharpen(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(jaxtyping.TypeCheckError):
        edge_mass(torch.ones(2, 3, dtype=torch.int64))


def test_plain_annotations_are_checked_and_whole_numbers_are_numbers():
    with pytest.raises(jaxtyping.TypeCheckError):
        setting(1, low="1")
    setting(1, low=1)


def test_memory_that_nobody_wrote_holds_nan():
    one = torch.ones(3)
    made = (torch.empty(3), torch.empty_like(one), one.new_empty(3), torch.empty_strided((3,), (2,)))
    assert all(memory.isnan().all() for memory in made)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1.001])
def test_nothing_but_the_same_is_close(bad):
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, bad]), [1.0, 1.0])
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, bad]), [1.0, float("nan")], tolerance=1.0)
    with pytest.raises(AssertionError, match="shapes differ"):
        assert_close(torch.ones(2), torch.ones(2, 1))
    assert_close(torch.tensor([1.0, 1.0 + 1e-6]), [1.0, 1.0])
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([1.0, 1.0 + 1e-6], dtype=torch.float64), [1.0, 1.0])
