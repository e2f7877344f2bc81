"""What a histogram scan must give, from the paper's text and plain numpy, and random gates to ask for it."""

import itertools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prism.ops.histogram import Method, branch_weights, histogram_scan

STEPS = (+1, 0, -1)  # what increment, keep and decrement do, in the order of the action probabilities


class Case(NamedTuple):
    """The inputs of one scan, as the gates give them."""

    start: Tensor  # batch cursors bins
    reset: Tensor  # batch cursors time
    action: Tensor  # batch cursors time 3
    gamma: Tensor  # cursors
    no_copy: Tensor | None = None  # batch cursors time
    copied: Tensor | None = None  # batch cursors time bins

    def scan(self, epsilon: float = 1e-8, method: Method = "auto") -> Tensor:
        weights = branch_weights(self.reset, self.action, self.no_copy)
        return histogram_scan(self.start, weights, self.gamma, self.copied, epsilon, method)

    def to(self, dtype: torch.dtype) -> "Case":
        return Case(*(None if part is None else part.to(dtype) for part in self))

    def leaves(self) -> list[Tensor]:
        """Every input that has a gradient."""
        return [part for part in self if part is not None]

    def tracked(self) -> "Case":
        return Case(*(None if part is None else part.detach().clone().requires_grad_() for part in self))


def random_case(
    batch: int, cursors: int, time: int, bins: int, *, copy: bool = False, seed: int = 0, mass: float = 1.0
) -> Case:
    """Gates neither sharp nor uniform, exponents between 1 and 4, a start of total `mass`; float64."""
    rng = np.random.default_rng([batch, cursors, time, bins, seed])
    start = rng.dirichlet(np.ones(bins), (batch, cursors)) * mass
    action = rng.dirichlet(np.ones(3), (batch, cursors, time))
    no_copy = copied = None
    if copy:
        shares = rng.dirichlet(np.ones(bins + 1), (batch, cursors, time))
        no_copy, copied = shares[..., -1], shares[..., :-1]
    parts = (start, rng.uniform(0, 1, (batch, cursors, time)), action, rng.uniform(1, 4, cursors), no_copy, copied)
    return Case(*(None if part is None else torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def transition(reset: float, action: np.ndarray, no_copy: float, bins: int) -> np.ndarray:
    """M_t of "Stochastic Matrix Formulation" on the symmetric support: row i says where the mass of bin i goes."""
    matrix = np.zeros((bins, bins))
    for i in range(bins):
        for probability, step in zip(action, STEPS, strict=True):
            after_reset = min(max((bins - 1) // 2 + step, 0), bins - 1)
            no_reset = min(max(i + step, 0), bins - 1)
            matrix[i, after_reset] += no_copy * reset * probability
            matrix[i, no_reset] += no_copy * (1 - reset) * probability
    return matrix


def dense_scan(case: Case, epsilon: float = 1e-8) -> np.ndarray:
    """The whole scan by matrix products, in float64; the power of Algorithm 1 (5) is taken as it is written."""
    start, reset, action, gamma, no_copy, copied = (
        None if part is None else part.detach().double().numpy() for part in case
    )
    batch, cursors, time = reset.shape
    bins = start.shape[-1]
    out = np.empty((batch, cursors, time, bins))
    for b, c in itertools.product(range(batch), range(cursors)):
        histogram = start[b, c]
        for t in range(time):
            kept = 1.0 if no_copy is None else no_copy[b, c, t]
            mass = histogram @ transition(reset[b, c, t], action[b, c, t], kept, bins)
            if copied is not None:
                mass = mass + copied[b, c, t]
            powers = (mass + epsilon) ** gamma[c]
            histogram = out[b, c, t] = powers / powers.sum()
    return out


def path_sum(reset: np.ndarray, action: np.ndarray, first_excised_by: int) -> dict[int, float]:
    """eq:pmf_with_reset with k = 0 and l = len(reset): P(D* = d), every path of resets and shifts visited.

    The shift of step t counts unless a reset fires at some u >= t + `first_excised_by`: 1 is eq:path_indicator as the
    paper prints it, 0 would let a reset undo the shift of its own step.
    """
    length = len(reset)
    mass: dict[int, float] = {}
    for fired in itertools.product((0, 1), repeat=length):
        for chosen in itertools.product(range(3), repeat=length):
            probability, displacement = 1.0, 0
            for t in range(length):
                probability *= (reset[t] if fired[t] else 1 - reset[t]) * action[t, chosen[t]]
                displacement += STEPS[chosen[t]] * (not any(fired[t + first_excised_by :]))
            mass[displacement] = mass.get(displacement, 0.0) + probability
    return mass


def as_histogram(mass: dict[int, float], bins: int) -> np.ndarray:
    """Offsets to bins, offset 0 in the middle."""
    out = np.zeros(bins)
    for offset, probability in mass.items():
        out[bins // 2 + offset] = probability
    return out
