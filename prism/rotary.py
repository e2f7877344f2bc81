"""Turning features in pairs: what every rotary encoding does to queries and keys (Su et al., RoFormer, 2021).

A pair is two neighbouring features (2i, 2i + 1), as in the paper, and as a complex number it is multiplied by
exp(i angle). Others pair feature i with i + d/2: the same up to an order of the features, and that order is learned.

Dimensions: batch; heads; query = tokens of this chunk; features = a head's width; pairs = half of it.
"""

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from prism.errors import UserError


def check_pairs(name: str, features: int) -> None:
    """Raises `UserError` unless a head's features go in pairs."""
    if features % 2:
        raise UserError(f"{name} turns features in pairs, so head_width must be even; got {features}")


def frequencies(features: int, base: float, device: torch.device) -> Float64[Tensor, " pairs"]:
    """theta_i = base^(-2i / d) (RoFormer, section 3.2.2). In float64: an angle is a frequency times a large number."""
    exponents = torch.arange(0, features, 2, dtype=torch.float64, device=device) / features
    return torch.pow(base, -exponents)


def turn(
    x: Float[Tensor, "batch heads query features"], angles: Float[Tensor, "#batch #heads query pairs"]
) -> Float[Tensor, "batch heads query features"]:
    """Each pair of features, turned by its angle (RoFormer, eq. 34)."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
