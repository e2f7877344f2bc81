"""Small PRISM encodings in float64 whose parameters are all far from their start, and streams for them to read."""

import torch
from torch import Tensor

from prism.cursors import PrismConfig
from prism.encodings.prism import Prism

WIDTH, HEADS, TIME, BATCH = 10, 2, 6, 2


def stream_of(time: int = TIME, seed: int = 0) -> Tensor:
    return torch.randn(BATCH, time, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def scrambled(module, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def small(**options) -> PrismConfig:
    return PrismConfig(**{"gate_features": 6, "cursors": 2, "pe_width": 8, "copy_width": 4, "copy_null_start": 0.5,
                          **options})


def prism(layers: int = 2, **options) -> Prism:
    torch.manual_seed(0)
    return scrambled(Prism(WIDTH, layers, HEADS, 4, small(**options)).double())
