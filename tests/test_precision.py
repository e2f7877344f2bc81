"""Half precision around PRISM: gates and content may be rounded, histograms and their vectors may not."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from prism import Prism, PrismConfig
from tests.tolerances import assert_close

CONFIGS = {
    "gru": PrismConfig(),
    "local": PrismConfig(gates="local"),
    "copying": PrismConfig(copy_every=2),
    "copying with trained keys": PrismConfig(copy_every=2, copy_key="trained", start_spread=1),
}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 9, 32).to(dtype), torch.randn(2, 4, 9, 8).to(dtype)


def attend(positions: Prism, x: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    stream = positions.read(x)
    q, k = positions.extend(heads, heads, 0, stream)
    for histogram in positions.histograms(0, stream):
        assert histogram.dtype == torch.float32
        assert_close(histogram.sum(-1), torch.ones(histogram.shape[:-1]))
    assert q.dtype == k.dtype == heads.dtype
    return scaled_dot_product_attention(q, k, heads, is_causal=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_bfloat16_model_keeps_exact_histograms(config):
    torch.manual_seed(0)
    exact = Prism(width=32, layers=2, heads=4, config=config)
    rounded = Prism(width=32, layers=2, heads=4, config=config)
    rounded.load_state_dict(exact.state_dict())
    out = attend(rounded.to(torch.bfloat16), *inputs(torch.bfloat16))
    out.float().square().sum().backward()
    assert_close(out.float(), attend(exact, *inputs(torch.float32)), dtype=torch.bfloat16)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in rounded.prism_layers.parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_autocast_does_not_reach_the_histograms(config):
    torch.manual_seed(0)
    positions = Prism(width=32, layers=2, heads=4, config=config)
    x, heads = inputs(torch.float32)
    plain = positions.histograms(0, positions.read(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = positions.histograms(0, positions.read(x))
        out = attend(positions, x, heads)
    for a, b in zip(mixed, plain, strict=True):
        assert_close(a, b)
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in positions.prism_layers.parameters())
