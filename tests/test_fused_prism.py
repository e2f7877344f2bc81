"""PRISM with all position scores made at once, as a GPU trains it, against the plain form: values and gradients."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from prism.config import ModelConfig
from prism.cursors import PrismConfig
from prism.encodings.prism import Prism
from prism.ops.gate_triton import gate_weights
from prism.ops.histogram import branch_weights
from prism.transformer import Transformer
from tests.tolerances import FUSED, FUSED_GRADIENT, RELATIVE_ERROR, assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MODEL = ModelConfig(width=16, layers=3, heads=2, head_width=8, feedforward=2, vocabulary=12)
SMALL = {"gate_features": 8, "cursors": 2, "pe_width": 20, "copy_width": 4, "gamma_start": 2.5}


def losses_and_gradients(fused: bool, monkeypatch, config: PrismConfig, time: int = 7):
    """A loss of random logits' weights, and the gradient of every parameter."""
    monkeypatch.setattr(Prism, "_fuses", lambda self, x, layer, stream: fused)
    torch.manual_seed(0)
    model = Transformer(MODEL, Prism(MODEL.width, MODEL.layers, MODEL.heads, MODEL.head_width, config)).to(DEVICE)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # away from the symmetric start: uneven gates, alphas and shares
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
    tokens = torch.randint(0, 12, (2, time), generator=generator).to(DEVICE)
    logits = model(tokens)
    out = torch.randn(logits.shape, generator=generator).to(DEVICE)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad((logits * out).sum(), list(model.parameters()), allow_unused=True)
    return logits, dict(zip(names, gradients, strict=True))


@pytest.mark.parametrize("options", [
    {}, {"gates": "local"}, {"copy_every": 3}, {"depths": (0, 2)}, {"content": False}, {"start_spread": 2},
    {"copy_every": 2, "depths": (1,), "gates": "local"},
], ids=str)
def test_fused_scores_are_the_plain_ones(monkeypatch, options):
    config = PrismConfig(**{**SMALL, **options})
    fused, of_fused = losses_and_gradients(True, monkeypatch, config)
    plain, of_plain = losses_and_gradients(False, monkeypatch, config)
    assert_close(fused, plain, tolerance=FUSED)
    for name, expected in of_plain.items():
        if expected is None or not expected.any():
            assert of_fused[name] is None or not of_fused[name].any(), name
        else:
            assert_close(of_fused[name], expected, tolerance=FUSED_GRADIENT, what=name)


class OnCuda(torch.Tensor):
    """Says it is on a GPU that is not there."""

    is_cuda = True


def test_scores_are_made_at_once_only_for_whom_adds_them(monkeypatch):
    """A model of one's own, which takes extended queries and keys, would lose its positions without a word."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=2**37))
    positions, x = Prism(16, 3, 2, 8, PrismConfig(**SMALL)), torch.zeros(2, 7, 16).as_subclass(OnCuda)
    transformer = Transformer(MODEL, positions)
    assert positions._fuses(x, 0, transformer._new_stream(7))
    assert not positions._fuses(x, 0, positions.start(7))
    assert not positions._fuses(x, 0, transformer._new_stream(8))  # not the whole sequence
    positions.method = "reference"
    assert not positions._fuses(x, 0, transformer._new_stream(7))


def test_the_drop_in_layer_scores_by_position_wherever_it_runs():
    torch.manual_seed(0)
    positions = Prism(16, 1, 2, 8, PrismConfig(**SMALL, content=False))
    x, q = torch.randn(2, 9, 16), torch.zeros(2, 2, 9, 8)

    def scores(device: torch.device) -> torch.Tensor:
        moved = positions.to(device)
        query, key = moved.extend(q.to(device), q.to(device), 0, moved.read(x.to(device)))
        return query @ key.mT

    there, here = scores(DEVICE), scores(torch.device("cpu"))
    assert here.std() > 0
    assert_close(there, here, dtype=torch.float32)


@pytest.mark.parametrize("copy", [False, True], ids=["", "copy"])
def test_gate_weights_in_one_pass(copy):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2, 5, 9, 4, generator=generator) * 4
    logits = whole[:, :, 2:8].to(DEVICE).requires_grad_()  # a slice of the cursors, read where it is
    no_copy = torch.rand(2, 5, 6, generator=generator).to(DEVICE).requires_grad_() if copy else None
    upstream = torch.randn(2, 5, 6, 6, generator=generator).to(DEVICE)
    inputs = [one for one in (logits, no_copy) if one is not None]
    actual = gate_weights(logits, no_copy)
    expected = branch_weights(
        torch.sigmoid(logits[..., 3]), torch.softmax(logits[..., :3], -1), None if no_copy is None else no_copy
    )
    assert_close(actual, expected, dtype=torch.float32)
    for a, e in zip(*(torch.autograd.grad(one, inputs, upstream) for one in (actual, expected)), strict=True):
        assert_close(a, e, dtype=torch.float32)


def test_a_reset_that_is_almost_certain_keeps_its_digits():
    logits = torch.tensor([[[[0.0, 0.0, 0.0, 40.0]]]], device=DEVICE)
    expected = torch.sigmoid(torch.tensor(-40.0, dtype=torch.float64)) / 3
    assert_close(gate_weights(logits, None)[0, 0, 0, 3:], expected.expand(3), tolerance=RELATIVE_ERROR[torch.float32])


def test_the_gate_operator_is_whole():
    logits = torch.randn(1, 2, 3, 4, device=DEVICE, requires_grad=True)
    no_copy = torch.rand(1, 2, 3, device=DEVICE, requires_grad=True)
    torch.library.opcheck(gate_weights, (logits, no_copy))
    torch.library.opcheck(gate_weights, (logits, None))
