"""What moves the cursors: the gates' networks, how a recurrence is kept in bounds, and the copy branch's attention."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prism.cursors import PrismLayer
from prism.gates import CopyAttention, CursorGates, LandmarkGates, LocalGates, RecurrentGates
from tests.prism_models import BATCH, TIME, WIDTH, prism, scrambled, small, stream_of
from tests.tolerances import assert_close, relative_error


def trained_gates(recurrence) -> RecurrentGates:
    torch.manual_seed(0)
    gates = RecurrentGates(WIDTH, 5, recurrence)
    optimizer = torch.optim.AdamW(gates.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        gates(stream_of().float(), None)[0].square().sum().backward()
        optimizer.step()
    return gates


def test_orthogonal_recurrence_stays_orthogonal_gate_by_gate():
    gates = trained_gates("orthogonal")
    squares = gates.gru.weight_hh_l0.detach().view(3, 5, 5)
    for square, base in zip(squares, gates.gru.parametrizations.weight_hh_l0[0].base, strict=True):
        assert_close(square @ square.T, torch.eye(5))
        assert relative_error(square, base) > 0.05  # it learned


def test_normalised_recurrence_has_the_norm_it_says():
    gates = trained_gates("normalised")
    constants = gates.gru.parametrizations.weight_hh_l0[0].constant.detach().flatten()
    norms = gates.gru.weight_hh_l0.detach().view(3, 25).norm(dim=1)
    assert_close(norms, constants.abs() * math.sqrt(5))
    assert (constants != 0.1).all()
    fresh = RecurrentGates(WIDTH, 5, "normalised").gru.weight_hh_l0.detach().view(3, 25).norm(dim=1)
    assert_close(fresh, [0.1 * math.sqrt(5)] * 3)


def test_the_penalty_is_its_formula():
    encoding = prism(4, recurrence="penalty", depths=(0, 3))
    expected = 0.0
    for layer in encoding.prism_layers.values():
        weight = layer.gates.gru.weight_hh_l0.detach().numpy()
        for gate in range(3):
            square = weight[6 * gate : 6 * gate + 6]
            expected += 1e-3 * ((square.T @ square - np.eye(6)) ** 2).sum()
    assert_close(encoding.penalty(), expected)
    assert prism(recurrence="orthogonal").penalty() is None
    assert prism(gates="local").penalty() is None


class CountingOps(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.count += 1
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("recurrence", ["orthogonal", "normalised"])
def test_a_constrained_recurrence_costs_few_operations(recurrence):
    # PyTorch's own orthogonal parametrisation takes thousands of kernels for this.
    gates = RecurrentGates(WIDTH, 100, recurrence)
    with CountingOps() as weight_alone:
        gates.gru.weight_hh_l0.square().sum().backward()
    assert 0 < weight_alone.count < 100
    with CountingOps() as constrained:
        gates(stream_of(3).float(), None)[0].sum().backward()
    free = RecurrentGates(WIDTH, 100, "free")
    with CountingOps() as plain:
        free(stream_of(3).float(), None)[0].sum().backward()
    assert constrained.count - plain.count <= weight_alone.count  # the weight is made once a pass


def test_local_gates_see_their_window_and_nothing_else():
    gates = LocalGates(WIDTH, 4, 3).double()
    x = stream_of()
    changed = x.clone()
    changed[:, 1] += 1
    moved = (gates(changed, None)[0] - gates(x, None)[0]).abs().amax((0, 2)) > 0
    assert moved.tolist() == [False, True, True, True, False, False]
    weight, bias = gates.convolution.weight.detach(), gates.convolution.bias.detach()
    window = torch.cat((torch.zeros(BATCH, 2, WIDTH), x), 1)
    expected = torch.stack([torch.einsum("bkw,fwk->bf", window[:, t : t + 3], weight) + bias for t in range(TIME)], 1)
    assert_close(gates(x, None)[0], F.gelu(expected))


def test_landmark_gates_remember_the_surest_sight_of_each_landmark():
    gates = LandmarkGates(WIDTH, 4, 2, 3).double()
    x = stream_of()
    weight, bias, recall = (one.detach().numpy() for one in (gates.local.weight, gates.local.bias, gates.recall.weight))
    window = np.concatenate((np.zeros((BATCH, 1, WIDTH)), x.numpy()), 1)
    met, expected = np.zeros((BATCH, 3)), np.empty((BATCH, TIME, 4))
    for t in range(TIME):
        here = np.einsum("bkw,fwk->bf", window[:, t : t + 2], weight) + bias
        met = np.maximum(met, 1 / (1 + np.exp(-here[:, 4:])))
        expected[:, t] = here[:, :4] + met @ recall.T
    assert_close(gates(x, None)[0], F.gelu(torch.from_numpy(expected)))


def test_what_landmark_gates_remember_does_not_drift():
    """Long after a landmark, the same tokens give the same gates: nothing depends on how long ago it was."""
    gates = LandmarkGates(WIDTH, 4, 2, 3).double()
    pattern = torch.randn(1, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    features, _ = gates(torch.cat((stream_of()[:1], *[pattern] * 40), 1), None)
    assert_close(features[:, -5:], features[:, TIME + 5 : TIME + 10])
    fresh, _ = gates(torch.cat([pattern] * 3, 1), None)
    assert relative_error(features[:, -5:], fresh[:, -5:]) > 1e-3  # and yet what came before still tells


@pytest.mark.parametrize("reset_start", [0.5, 0.047, 0.9])
def test_gates_start_as_configured(reset_start):
    reset, action = CursorGates(6, 5, reset_start).double()(torch.zeros(1, 3, 6, dtype=torch.float64))
    assert_close(reset, np.full((1, 5, 3), reset_start), tolerance=1e-6)
    assert_close(action, np.full((1, 5, 3, 3), 1 / 3))
    layer = PrismLayer(WIDTH, 0, 4, small(reset_start=reset_start, gamma_start=3.5))
    assert_close(layer.gamma(), [3.5] * 8)
    assert_close(PrismLayer(WIDTH, 0, 4, small(gamma_start=1.001)).gamma(), [1.001] * 8)
    assert_close(PrismLayer(WIDTH, 0, 4, small(gamma_start=2000.0)).gamma(), [2000.0] * 8)


# --- Copy branch ---


def test_copy_attention_is_a_causal_softmax_with_a_null_slot():
    copy = scrambled(CopyAttention(WIDTH, 3, 4, 0.5).double())
    x = stream_of()
    weights, null, _ = (part.detach() for part in copy(x, None))
    query, key = (part(x).detach().view(BATCH, TIME, 3, 4).numpy() for part in (copy.query, copy.key))
    for b, c, t in np.ndindex(BATCH, 3, TIME):
        scores = [query[b, t, c] @ key[b, s, c] / 2.0 for s in range(t)]  # token t is not its own target
        exponentials = np.exp([*scores, float(copy.null.detach()[c])])
        expected = exponentials / exponentials.sum()
        assert_close(weights[b, c, t, :t], expected[:-1])
        assert not weights[b, c, t, t:].any()
        assert float(null[b, c, t]) == pytest.approx(expected[-1])
    assert (null[:, :, 0] == 1).all()


@pytest.mark.parametrize("recurrence", ["orthogonal", "normalised", "penalty", "free"])
def test_recurrent_gates_are_those_of_a_gru_and_can_be_copied_after_use(recurrence):
    gates = RecurrentGates(WIDTH, 5, recurrence)
    x = torch.randn(2, 7, WIDTH)
    features, last = gates(x, None)
    plain = torch.nn.GRU(WIDTH, 5, batch_first=True)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    plain.load_state_dict({name: getattr(gates.gru, name).detach() for name in names})
    expected, state = plain(x)
    assert_close(features, expected)
    assert_close(last, state)
    assert_close(copy.deepcopy(gates)(x, None)[0], features)
