"""Shares of one as a page reads them: a byte each, in base64, and what a byte is worth."""

import base64
import math
from typing import Any

import torch
from torch import Tensor

STEPS = 255  # a byte's worth is one 255th: off by at most half of that


def block(shares: Tensor) -> dict[str, Any]:
    """Numbers from 0 to 1, of any shape, ready for JSON."""
    steps = (shares.detach().cpu().float() * STEPS).round_().clamp_(0, STEPS).to(torch.uint8)
    data = base64.b64encode(steps.contiguous().numpy().tobytes()).decode()
    return {"shape": list(steps.shape), "scale": 1 / STEPS, "data": data}


def block_bytes(*shape: int) -> int:
    """How long the base64 of such a block is."""
    return 4 * math.ceil(math.prod(shape) / 3)
