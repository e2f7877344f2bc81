"""What a command computes on: which device, and how many threads of a CPU."""

import torch

from prism.config import ModelConfig
from prism.errors import UserError

SMALL_WIDTH = 128  # up to here a layer's operations are too short to be worth dividing


def pick_device(asked: str | None) -> str:
    """The device asked for, or the GPU if there is one."""
    if asked is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked != "cpu" and not (asked.startswith("cuda") and torch.cuda.is_available()):
        allowed = "cpu or cuda" if torch.cuda.is_available() else "cpu, as this machine has no GPU"
        raise UserError(f"--device must be {allowed}; got {asked!r}")
    return asked


def use_threads(asked: int | None, model: ModelConfig) -> None:
    """Sets the threads of this process: as asked, or one for a small model, or as PyTorch thinks best.

    A second thread makes a small model 15 % faster on an idle machine, and ten times slower on a busy one, where each
    short operation waits for the thread that has lost its core. Results are the same bits only for the same number.
    """
    if asked is not None and asked < 1:
        raise UserError(f"--threads must be at least 1, got {asked}")
    if asked is not None or model.width <= SMALL_WIDTH:
        torch.set_num_threads(asked or 1)
