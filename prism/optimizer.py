"""AdamW with the groups an encoding asks for, its schedule, and its state under the parameters' own names."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from prism.architectures import Architecture
from prism.config import OptimizerConfig

STATE = "optimizer."  # prefix of the optimiser's tensors in a checkpoint


def make_optimizer(model: Architecture, config: OptimizerConfig, fused: bool = False) -> torch.optim.AdamW:
    """One group for everything, but for what the encoding wants treated apart.

    A `fused` one is for a GPU: a kernel or two for all parameters, rates in tensors that a CUDA graph can read, and
    no update where its `found_inf` is 1.
    """
    own = [dict(group) for group in model.optimizer_groups()]
    apart = {id(parameter) for group in own for parameter in group["params"]}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    optimizer = torch.optim.AdamW(
        [{"params": rest}, *own], lr=config.rate, betas=config.betas, weight_decay=config.weight_decay,
        fused=fused or None,
    )
    device = next(model.parameters()).device
    for group in optimizer.param_groups:
        group["peak"] = group["lr"]
        if fused:
            group["lr"] = torch.tensor(group["peak"], dtype=torch.float32, device=device)
    return optimizer


@contextmanager
def recordable(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """For the recording of a CUDA graph. A fused step is the same either way, but PyTorch wants to be told, and warns
    of steps outside a recording by an optimiser that is always said to be recordable."""
    for group in optimizer.param_groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group in optimizer.param_groups:
            group["capturable"] = False


def set_rates(optimizer: torch.optim.Optimizer, config: OptimizerConfig, step: int, steps: int) -> float:
    """Sets every group's learning rate for this step (0-based); returns the first group's."""
    fraction = schedule(config, step, steps)
    for group in optimizer.param_groups:
        rate = group["peak"] * fraction
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # in place: this is the tensor a CUDA graph reads
        else:
            group["lr"] = rate
    return float(optimizer.param_groups[0]["peak"] * fraction)


def schedule(config: OptimizerConfig, step: int, steps: int) -> float:
    """The fraction of the peak rate at a step.

    >>> linear = OptimizerConfig(warmup=10, decay="linear", final_rate=0.1)
    >>> [round(schedule(linear, step, 110), 3) for step in (0, 9, 10, 60, 109)]
    [0.1, 1.0, 1.0, 0.55, 0.109]
    """
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.decay == "constant":
        return 1.0
    done = (step - config.warmup) / max(1, steps - config.warmup)
    left = 1 - done if config.decay == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.final_rate + (1 - config.final_rate) * left


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as named tensors."""
    return {
        f"{STATE}{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Puts back what `optimizer_tensors` gave, be it of a fused optimiser or not."""
    fused = bool(optimizer.defaults.get("fused"))
    for name, parameter in model.named_parameters():
        prefix = f"{STATE}{name}."
        state: dict[str, Any] = {}
        for full, value in tensors.items():
            if full.startswith(prefix):
                key = full.removeprefix(prefix)
                # Only a fused optimiser counts its steps on the parameter's device.
                device = "cpu" if key == "step" and not fused else parameter.device
                state[key] = value.to(device, copy=True)
        if state:
            optimizer.state[parameter] = state
