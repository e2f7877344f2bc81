"""What decides how a cursor moves: the networks behind theta_t, and the attention behind the copy branch.

Dimensions: width = of the residual stream; features = what a gate network makes of a token and those before it.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

Recurrence = Literal["orthogonal", "penalty", "normalised", "free"]


class OrthogonalGates(nn.Module):
    """Keeps each gate's square of a GRU's W_hh orthogonal, as Q_0 Cayley(A) with A skew.

    One batched solve over the three squares. PyTorch's own `orthogonal` on the stacked [3H, H] matrix would make
    only its columns orthonormal, and by default does so with thousands of Householder kernels.
    """

    base: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        squares = torch.linalg.qr(torch.randn(3, hidden, hidden)).Q
        self.register_buffer("base", squares)

    def forward(self, free: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        square = free.view(3, -1, free.shape[1]).to(torch.promote_types(free.dtype, torch.float32))
        skew = square - square.mT
        eye = torch.eye(free.shape[1], dtype=square.dtype, device=free.device)
        # Q_0 (1 - A) / (1 + A): a GPU that multiplies in tf32 then rounds what is learned alone, not Q_0. 1 + A is
        # never singular: nothing to check, and no waiting for a GPU to say so.
        base = self.base.to(square.dtype)
        rotated = torch.linalg.solve_ex(eye + skew, base - base @ skew, left=False).result
        return rotated.reshape_as(free).to(free.dtype)

    def right_inverse(self, weight: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        return torch.zeros_like(weight)  # A = 0: the start is Q_0


class NormalisedGates(nn.Module):
    """W_hh = m s V / |V|_F per gate: a Frobenius norm that is a fixed multiple m of a small learned constant s.

    (The paper's footnote.) m = sqrt(hidden), the norm of an orthogonal square; s starts at 0.1.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.multiple = math.sqrt(hidden)
        self.constant = nn.Parameter(torch.full((3, 1, 1), 0.1))

    def forward(self, free: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        square = free.view(3, -1, free.shape[1])
        norm = torch.linalg.matrix_norm(square, keepdim=True)
        return (square * (self.multiple * self.constant / norm)).reshape_as(free)


class RecurrentGates(nn.Module):
    """The paper's gates: a GRU over the token embeddings."""

    penalty_weight = 1e-3

    def __init__(self, width: int, features: int, recurrence: Recurrence) -> None:
        super().__init__()
        self.features, self.recurrence = features, recurrence
        self.gru = nn.GRU(width, features, batch_first=True)
        constraints: dict[str, type[OrthogonalGates | NormalisedGates]] = {
            "orthogonal": OrthogonalGates, "normalised": NormalisedGates,
        }
        if recurrence in constraints:
            parametrize.register_parametrization(self.gru, "weight_hh_l0", constraints[recurrence](features))

    def forward(
        self, x: Float[Tensor, "batch time width"], memory: Tensor | None
    ) -> tuple[Float[Tensor, "batch time features"], Tensor]:
        """Features of each token, and the hidden state a later chunk starts from."""
        if x.shape[1] == 0:  # nn.GRU refuses
            return x.new_zeros(x.shape[0], 0, self.features), (
                x.new_zeros(1, x.shape[0], self.features) if memory is None else memory
            )
        start = x.new_zeros(1, x.shape[0], self.features) if memory is None else memory
        gru = self.gru
        # Not gru(x): that would make the constrained weight four times a pass, and keep it in a list of its own, with
        # its graph, so that the model could no longer be deep-copied.
        weights: list[Any] = [gru.weight_ih_l0, gru.weight_hh_l0, gru.bias_ih_l0, gru.bias_hh_l0]
        if x.is_cuda:
            weights = _side_by_side(weights)
        return torch.gru(x, start, weights, True, 1, 0.0, self.training, False, True)

    def penalty(self) -> Float[Tensor, ""] | None:
        """1e-3 sum over gates of |W^T W - 1|_F^2, where that is the chosen way to keep W_hh near orthogonal."""
        if self.recurrence != "penalty":
            return None
        square = self.gru.weight_hh_l0.view(3, self.features, self.features)  # type: ignore[operator]
        eye = torch.eye(self.features, dtype=square.dtype, device=square.device)
        return self.penalty_weight * (square.mT @ square - eye).square().sum()


def _side_by_side(weights: list[Tensor]) -> list[Tensor]:
    """The same weights in one block of memory, as cuDNN wants them: it would copy them there itself, and warn."""
    block = torch.cat([weight.flatten() for weight in weights])
    parts = block.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


class LocalGates(nn.Module):
    """Stationary gates: a causal convolution over the last few tokens, so nothing can drift with length."""

    def __init__(self, width: int, features: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.convolution = nn.Conv1d(width, features, window)

    def forward(
        self, x: Float[Tensor, "batch time width"], memory: Tensor | None
    ) -> tuple[Float[Tensor, "batch time features"], Tensor]:
        """Features of each token, and the inputs a later chunk still looks back on (zeros before the first token)."""
        batch, _, width = x.shape
        before = memory if memory is not None else x.new_zeros(batch, self.window - 1, width)
        seen = torch.cat((before, x), dim=1)
        if x.shape[1] == 0:
            return x.new_zeros(batch, 0, self.convolution.out_channels), seen
        features = nn.functional.gelu(self.convolution(seen.mT).mT)
        return features, seen[:, seen.shape[1] - (self.window - 1) :]

    def penalty(self) -> None:
        return None


class LandmarkGates(nn.Module):
    """Stationary gates that remember: beside the last few tokens they see which landmarks have gone by.

    A landmark is anything the convolution can tell, an "=" for instance; how surely it has been met is the largest
    such certainty so far. A running maximum of numbers between 0 and 1 can neither drift with length nor forget.
    """

    def __init__(self, width: int, features: int, window: int, landmarks: int) -> None:
        super().__init__()
        self.features = features
        self.local = nn.Conv1d(width, features + landmarks, window)
        self.recall = nn.Linear(landmarks, features, bias=False)
        with torch.no_grad():
            self.local.bias[features:] -= 3  # type: ignore[index]  # nothing has been met at first

    def forward(
        self, x: Float[Tensor, "batch time width"], memory: tuple[Tensor, Tensor] | None
    ) -> tuple[Float[Tensor, "batch time features"], tuple[Tensor, Tensor]]:
        """Features of each token; and the inputs still looked back on, with what has been met so far."""
        batch, time, width = x.shape
        window, landmarks = self.local.kernel_size[0], self.recall.in_features
        before, met = memory or (x.new_zeros(batch, window - 1, width), x.new_zeros(batch, 1, landmarks))
        seen = torch.cat((before, x), dim=1)
        kept = seen[:, seen.shape[1] - (window - 1) :]
        if time == 0:
            return x.new_zeros(batch, 0, self.features), (kept, met)
        here, certain = self.local(seen.mT).mT.split((self.features, landmarks), dim=-1)
        met = torch.cummax(torch.cat((met, torch.sigmoid(certain)), dim=1), dim=1).values[:, 1:]
        return nn.functional.gelu(here + self.recall(met)), (kept, met[:, -1:])

    def penalty(self) -> None:
        return None


class CursorGates(nn.Module):
    """Features -> reset and action probabilities of every cursor (theta_t of eq:pmf_with_reset)."""

    def __init__(self, features: int, cursors: int, reset_start: float) -> None:
        super().__init__()
        self.cursors = cursors
        self.project = nn.Linear(features, 4 * cursors)
        with torch.no_grad():
            self.project.bias.zero_()
            self.project.bias.view(cursors, 4)[:, 3] = math.log(reset_start / (1 - reset_start))

    def forward(
        self, features: Float[Tensor, "batch time features"]
    ) -> tuple[Float[Tensor, "batch cursors time"], Float[Tensor, "batch cursors time 3"]]:
        """Reset, and the action's (increment, keep, decrement)."""
        logits = self.logits(features).transpose(1, 2)
        return torch.sigmoid(logits[..., 3]), torch.softmax(logits[..., :3], dim=-1)

    def logits(self, features: Float[Tensor, "batch time features"]) -> Float[Tensor, "batch time cursors 4"]:
        """Of increment, keep, decrement and reset."""
        return self.project(features).unflatten(-1, (self.cursors, 4))


class CopyAttention(nn.Module):
    """p_copy: a causal softmax over earlier tokens and a null slot (section "Position Update with Copy Branch")."""

    def __init__(self, features: int, cursors: int, width: int, null_start: float) -> None:
        super().__init__()
        self.cursors, self.width = cursors, width
        self.query = nn.Linear(features, cursors * width)
        self.key = nn.Linear(features, cursors * width)
        self.null = nn.Parameter(torch.full((cursors,), float(null_start)))

    def forward(
        self, features: Float[Tensor, "batch time features"], earlier: Tensor | None
    ) -> tuple[Float[Tensor, "batch cursors time seen"], Float[Tensor, "batch cursors time"], Tensor]:
        """Mass on each token seen (never on the asking one or later), mass on the null slot, and all keys so far."""
        batch, time, _ = features.shape
        query = self.query(features).view(batch, time, self.cursors, self.width).transpose(1, 2)
        key = self.key(features).view(batch, time, self.cursors, self.width).transpose(1, 2)
        keys = key if earlier is None else torch.cat((earlier, key), dim=2)
        seen = keys.shape[2]
        scores = query @ keys.mT / math.sqrt(self.width)
        asking = torch.arange(seen - time, seen, device=features.device)
        hidden = torch.arange(seen, device=features.device)[None, :] >= asking[:, None]
        null = self.null[:, None, None].expand(batch, -1, time, 1)
        weights = torch.softmax(torch.cat((scores.masked_fill(hidden, float("-inf")), null), dim=-1), dim=-1)
        return weights[..., :-1], weights[..., -1], keys
