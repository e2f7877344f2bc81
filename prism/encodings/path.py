"""PaTH: between key and query lies a path of reflections, one a token, each made from that token.

    H_t = I - beta_t w_t w_t^T,    score_ij = k_j^T H_{j+1} H_{j+2} ... H_i q_i / sqrt(d)

A token's own reflection stands between it and what came before, not between it and itself. In each layer
w = normalise(silu(conv3(U V x))), V to 32 numbers and U to all heads, conv3 causal and a channel at a time, and
beta = 2 sigmoid(B x + b), a number a head, so that a direction can also be turned round. The rank, the silu and the
1e-6 under the normalisation's root are the authors' code's (the paper names low rank, convolution and normalisation).
Without their forget gate (PaTH-FoX).

All pairs at once. Let x_tj be what reflection t takes off key j along w_t once those before it have acted:

    x_tj = beta_t w_t^T (k_j - sum_{j<s<t} x_sj w_s),    score_ij = q_i^T k_j - sum_{j<t<=i} (q_i^T w_t) x_tj

The first is a triangular system, (I + strictly lower part of beta_t w_t^T w_s) x = beta_t w_t^T k_j for t > j; both
together are a bias added to q_i^T k_j. From chunk to chunk, how far earlier keys have been moved is remembered.

Dimensions: batch; heads; query = tokens of this chunk; key = all tokens so far; features = a head's width;
width = of the residual stream; channels = heads times features.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from prism.encodings.encoding import Encoding, Stream
from prism.settings import Settings, setting

NORM_EPSILON = 1e-6  # under the root of the norm, as in the authors' code


class Reflections(nn.Module):
    """Makes w_t and beta_t of one layer from what its queries and keys are made of."""

    def __init__(self, width: int, heads: int, features: int, rank: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, heads * features, bias=False)
        bound = window**-0.5  # as nn.Conv1d with a group a channel
        self.taps = nn.Parameter(torch.empty(window, heads * features).uniform_(-bound, bound))
        self.strength = nn.Linear(width, heads)

    def forward(
        self, x: Float[Tensor, "batch query width"], before: Float[Tensor, "batch earlier channels"] | None
    ) -> tuple[
        Float[Tensor, "batch heads query features"],
        Float[Tensor, "batch heads query"],
        Float[Tensor, "batch earlier channels"],
    ]:
        """Directions, strengths, and what the next chunk's convolution looks back on."""
        made = self.up(self.down(x))
        if before is None:
            before = made.new_zeros(made.shape[0], self.window - 1, made.shape[2])
        seen = torch.cat((before, made), dim=1)
        time = x.shape[1]
        mixed = sum((seen[:, lag : lag + time] * self.taps[lag] for lag in range(1, self.window)),
                    start=seen[:, :time] * self.taps[0])
        w = F.silu(mixed).unflatten(2, (self.heads, -1)).transpose(1, 2)
        w = w * torch.rsqrt(w.square().sum(-1, keepdim=True) + NORM_EPSILON)
        beta = 2 * torch.sigmoid(self.strength(x)).transpose(1, 2)
        return w, beta, seen[:, time:]


def path_bias(
    query: Float[Tensor, "batch heads query features"],
    keys: Float[Tensor, "batch heads key features"],
    moved: Float[Tensor, "batch heads earlier features"] | None,
    w: Float[Tensor, "batch heads query features"],
    beta: Float[Tensor, "batch heads query"],
) -> tuple[Float[Tensor, "batch heads query key"], Float[Tensor, "batch heads query key"]]:
    """What to add to q_i^T k_j, and x_tj. `moved` is what earlier chunks have added to their keys, by now."""
    earlier = keys.shape[2] - query.shape[2]
    now = keys if moved is None else keys + F.pad(moved, (0, 0, 0, query.shape[2]))
    scaled = beta[..., None] * w
    # Only what is strictly below the diagonal is read of the matrix.
    taken = torch.linalg.solve_triangular(
        scaled @ w.mT, (scaled @ now.mT).tril(earlier - 1), upper=False, unitriangular=True
    )
    bias = -(query @ w.mT).tril() @ taken
    if moved is not None:
        bias = bias + F.pad(query @ moved.mT, (0, query.shape[2]))
    return bias, taken


@dataclass(frozen=True)
class PathConfig(Settings):
    """The authors' sizes."""

    rank: int = setting(32, low=1, high=100_000)  # numbers a token's directions are made from
    window: int = setting(3, low=1, high=1000)  # tokens the short convolution sees


class Path(Encoding):
    """Turns what lies between a key and a query into a product of reflections."""

    name = "path"
    summary = "data-dependent reflections accumulated between key and query (PaTH)"
    citation = "Yang et al., PaTH Attention: Position Encoding via Accumulating Householder Transformations, 2025"
    extrapolates = True
    Config = PathConfig
    config: PathConfig

    def __init__(
        self, width: int, layers: int, heads: int, head_width: int | None = None, config: PathConfig | None = None
    ) -> None:
        super().__init__(width, layers, heads, head_width, config)
        self.reflections = nn.ModuleList(
            Reflections(width, heads, self.head_width, self.config.rank, self.config.window) for _ in range(layers)
        )

    def attention_input(self, x: Float[Tensor, "batch query width"], layer: int, stream: Stream) -> None:
        w, beta, seen = self.reflections[layer](x, stream.memory.get(("seen", layer)))
        stream.memory["seen", layer] = seen
        stream.memory["reflections"] = w, beta

    def transform(
        self,
        query: Float[Tensor, "batch heads query features"],
        key: Float[Tensor, "batch heads query features"],
        layer: int,
        stream: Stream,
    ) -> tuple[Float[Tensor, "batch heads query features"], Float[Tensor, "batch heads query features"]]:
        w, beta = stream.memory.pop("reflections")
        before, moved = stream.memory.get(("keys", layer), (None, None))
        keys = key if before is None else torch.cat((before, key), dim=2)
        stream.memory["bias", layer], taken = path_bias(query, keys, moved, w, beta)
        if keys.shape[2] < stream.capacity:  # there is more to come
            further = -(taken.mT @ w)
            if moved is not None:
                further = further + F.pad(moved, (0, 0, 0, key.shape[2]))
            stream.memory["keys", layer] = keys, further
        return query, key

    def bias(self, layer: int, stream: Stream) -> Float[Tensor, "batch heads query key"]:
        return stream.memory.pop(("bias", layer))

    def footprint(self, capacity: int) -> int:
        return self.heads * (4 * capacity + 2 * self.layers * self.head_width)
