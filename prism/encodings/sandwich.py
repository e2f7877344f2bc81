"""Sandwich: the inner products of sinusoidal positions with one another, without tokens (Chi et al., 2023).

    score(i, j) = <q_i, k_j> / sqrt(d) + (1 / h) sum_n cos((i - j) / 10000^(2n / d_s)),   nothing is learned

n = 0 ... d_s/2 - 1, the frequencies of sinusoidal positions of width d_s: the sum is <p_i, p_j>. Of H heads, the first
has h = 8/H, the second 16/H, the last 8. Some implementations subtract d_s/2 from the sum or count n from 1. The first
changes nothing, as a softmax does not see what all keys share; the second drops the fastest cosine for a slower one.

Dimensions: heads; query = tokens of this chunk; key = all tokens so far.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from prism.encodings.encoding import Encoding, Stream
from prism.errors import UserError
from prism.settings import Settings, setting


@dataclass(frozen=True)
class SandwichConfig(Settings):
    """The paper's width, whatever the model's."""

    sinusoids: int = setting(128, low=2, high=65_536)  # d_s: a sine and a cosine a frequency

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinusoids % 2:
            raise UserError(f"sinusoids must be even, a sine and a cosine a frequency, got {self.sinusoids}")


class Sandwich(Encoding):
    """Adds one fixed function of distance, flatter from head to head, the same in every layer."""

    name = "sandwich"
    summary = "Sandwich: a fixed bias, the inner products of sinusoidal positions"
    citation = "Chi et al., Dissecting Transformer Length Extrapolation via the Lens of Receptive Field Analysis, 2023"
    extrapolates = True
    Config = SandwichConfig
    config: SandwichConfig
    order: Tensor

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: SandwichConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        # Whole numbers are exact in any precision a model is turned to, so all else is made of them where it is used.
        self.register_buffer("order", torch.arange(1.0, heads + 1), persistent=False)

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "1 heads query key"]:
        distances = stream.distances(self.order.device).clamp(min=0)
        compression = self.order * (8 / self.heads)
        # By distance, and only then by pair: cosines for each pair would be many times as many.
        by_distance = self._inner_products(distances.shape[1])
        return (by_distance / compression[:, None])[None][:, :, distances]

    def _inner_products(self, count: int) -> Float[Tensor, " distance"]:
        """<p_i, p_j> for the distances i - j = 0 ... count - 1."""
        width, dtype, device = self.config.sinusoids, self.order.dtype, self.order.device
        wavelengths = 10_000.0 ** (torch.arange(0, width, 2, dtype=dtype, device=device) / width)
        return torch.cos(torch.arange(count, dtype=dtype, device=device)[:, None] / wavelengths).sum(1)
