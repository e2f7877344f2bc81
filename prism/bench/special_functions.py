"""A Triton kernel of nothing but special functions: how many a card does a second."""

# mypy: allow-untyped-defs, allow-untyped-decorators, allow-untyped-calls
from typing import no_type_check

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from prism.ops.histogram_kernels import _exp2, _log2

BLOCK = 128


@triton.jit
@no_type_check
def _rounds(seeds, out, rounds, FAST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(seeds + at)
    for _ in range(rounds):
        x = _log2(_exp2(x, FAST), FAST)
    tl.store(out + at, x)


def special_functions(seeds: torch.Tensor, rounds: int) -> torch.Tensor:
    """A power of two and a logarithm of each seed, so many times over."""
    out = torch.empty_like(seeds)
    _rounds[(seeds.numel() // BLOCK,)](seeds, out, rounds, FAST=seeds.is_cuda, BLOCK=BLOCK)
    return out
