"""What must hold for every scan, whatever the gates: found by looking for a counter-example."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.ops.histogram import branch_weights, histogram_scan, one_hot_start
from tests.histogram_oracles import Case, random_case
from tests.tolerances import assert_close

methods = pytest.mark.parametrize("method", ["reference", "adjoint"])
quick = settings(max_examples=15, deadline=None, derandomize=True)
cases = st.builds(
    random_case, batch=st.integers(0, 3), cursors=st.integers(1, 3), time=st.integers(0, 7),
    bins=st.integers(0, 8).map(lambda capacity: 2 * capacity + 1), copy=st.booleans(), seed=st.integers(0, 99),
)
INCREMENT, KEEP, DECREMENT = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def certain(
    action: tuple[float, float, float], reset: float, time: int, capacity: int, at: int = 0, gamma: float = 2.0
) -> Case:
    """One cursor that stands at offset `at` and whose gates are sure."""
    start = torch.zeros(1, 1, 2 * capacity + 1, dtype=torch.float64)
    start[..., capacity + at] = 1
    return Case(start, torch.full((1, 1, time), reset, dtype=torch.float64),
                torch.tensor(action, dtype=torch.float64).expand(1, 1, time, 3),
                torch.tensor([gamma], dtype=torch.float64))


def positions(histograms: torch.Tensor) -> list[int]:
    """The offset of each one-hot histogram of one cursor, after seeing that it is one."""
    peak, where = histograms[0, 0].max(-1)
    assert (peak > 1 - 1e-5).all()  # epsilon leaks a little into every bin
    return (where - histograms.shape[-1] // 2).tolist()


# --- Any gates ---


@methods
@quick
@given(case=cases, epsilon=st.sampled_from([0.0, 1e-8, 1e-3]))
def test_histograms_stay_distributions(case, epsilon, method):
    out = case.scan(epsilon, method)
    assert out.shape == (*case.reset.shape, case.start.shape[-1])
    assert (out >= 0).all()
    assert_close(out.sum(-1), torch.ones(out.shape[:-1]))


@methods
@quick
@given(case=cases, cuts=st.lists(st.integers(0, 7), max_size=3))
def test_chunks_give_what_the_whole_gives(case, cuts, method):
    whole, time = case.scan(method=method), case.reset.shape[2]
    edges = [0, *sorted(min(cut, time) for cut in cuts), time]
    start, parts = case.start, []
    for first, after in itertools.pairwise(edges):
        chunk = Case(start, case.reset[:, :, first:after], case.action[:, :, first:after], case.gamma,
                     *(None if part is None else part[:, :, first:after] for part in (case.no_copy, case.copied)))
        parts.append(chunk.scan(method=method))
        start = parts[-1][:, :, -1] if after > first else start
    assert_close(torch.cat(parts, 2), whole)


@methods
@quick
@given(case=cases, seed=st.integers(0, 99))
def test_sequences_of_a_batch_do_not_touch(case, seed, method):
    order = torch.randperm(case.start.shape[0], generator=torch.Generator().manual_seed(seed))
    shuffled = Case(*(part if part is None or part is case.gamma else part[order] for part in case))
    assert_close(shuffled.scan(method=method), case.scan(method=method)[order])


@methods
@quick
@given(case=cases, seed=st.integers(0, 99))
def test_cursors_do_not_touch(case, seed, method):
    order = torch.randperm(case.gamma.shape[0], generator=torch.Generator().manual_seed(seed))
    shuffled = Case(*(part if part is None else part[order] if part is case.gamma else part[:, order] for part in case))
    assert_close(shuffled.scan(method=method), case.scan(method=method)[:, order])


@quick
@given(case=cases)
def test_mirrored_gates_give_mirrored_histograms(case):
    mirrored = Case(case.start.flip(-1), case.reset, case.action.flip(-1), case.gamma, case.no_copy,
                    None if case.copied is None else case.copied.flip(-1))
    assert_close(mirrored.scan(), case.scan().flip(-1))


@methods
@pytest.mark.parametrize("shape", [(2, 3, 0, 7), (0, 3, 4, 7), (0, 1, 0, 1)], ids=str)
def test_nothing_in_nothing_out(shape, method):
    case = random_case(*shape, copy=True).tracked()
    out = case.scan(method=method)
    assert out.shape == shape
    out.sum().backward()
    assert all(part.grad is None or not part.grad.any() for part in case.leaves())


# --- Sure gates ---


@methods
@quick
@given(time=st.integers(1, 12), gamma=st.floats(1.01, 20))
def test_always_increment_is_the_absolute_position(time, gamma, method):
    up = certain(INCREMENT, 0.0, time, 12, gamma=gamma)
    assert positions(up.scan(method=method)) == list(range(1, time + 1))
    down = certain(DECREMENT, 0.0, time, 12, gamma=gamma)
    assert positions(down.scan(method=method)) == list(range(-1, -time - 1, -1))


@methods
@quick
@given(at=st.integers(-6, 6), gamma=st.floats(1.01, 20))
def test_always_keep_and_always_reset_stay_one_hot(at, gamma, method):
    assert positions(certain(KEEP, 0.0, 5, 6, at, gamma).scan(method=method)) == [at] * 5
    for action, offset in ((INCREMENT, 1), (KEEP, 0), (DECREMENT, -1)):
        assert positions(certain(action, 1.0, 5, 6, at, gamma).scan(method=method)) == [offset] * 5


@methods
@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_clamps_hold_what_would_leave(capacity, method):
    reached = [min(t, capacity) for t in range(1, 8)]
    assert positions(certain(INCREMENT, 0.0, 7, capacity).scan(method=method)) == reached
    assert positions(certain(DECREMENT, 0.0, 7, capacity).scan(method=method)) == [-p for p in reached]


@methods
@quick
@given(targets=st.lists(st.integers(-5, 5), min_size=1, max_size=6))
def test_copying_a_one_hot_key_is_jumping_there(targets, method):
    case = certain(INCREMENT, 0.3, len(targets), 5)
    copied = torch.zeros(1, 1, len(targets), 11, dtype=torch.float64)
    copied[0, 0, range(len(targets)), [5 + target for target in targets]] = 1
    case = case._replace(no_copy=torch.zeros(1, 1, len(targets), dtype=torch.float64), copied=copied)
    assert positions(case.scan(method=method)) == targets


@methods
@pytest.mark.parametrize("fraction", [0.0, 0.3])
def test_not_copying_changes_nothing(fraction, method):
    case = random_case(2, 2, 5, 7)
    histograms = case.scan(method=method)
    # Some of the mass copied from where the plain update puts it anyway: the same update.
    before = torch.cat((case.start[:, :, None], histograms[:, :, :-1]), 2)
    plain = torch.stack([
        histogram_scan(before[:, :, t], branch_weights(case.reset, case.action)[:, :, t : t + 1],
                       torch.ones_like(case.gamma), None, 0.0, method)[:, :, 0] for t in range(5)
    ], 2)
    copying = case._replace(no_copy=torch.full_like(case.reset, 1 - fraction), copied=fraction * plain)
    assert_close(copying.scan(method=method), histograms)


def test_starts_at_the_origin():
    start = one_hot_start(1, 1, 3, dtype=torch.float64, device=torch.device("cpu"))
    assert positions(certain(KEEP, 0.0, 1, 3)._replace(start=start).scan()) == [0]
