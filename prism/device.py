"""What a command computes on: which device, in which precision, and how many threads of a CPU."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from prism.architectures import find_architecture
from prism.config import Matmul, RunConfig
from prism.errors import UserError

SMALL_WIDTH = 128  # up to here a layer's operations are too short to be worth dividing


def pick_device(asked: str | None) -> str:
    """The device asked for, or the GPU if there is one."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked is None:
        return "cuda" if gpus else "cpu"
    if asked not in ("cpu", *(["cuda", *(f"cuda:{number}" for number in range(gpus))] if gpus else [])):
        allowed = f"cpu, cuda, or cuda:0 to cuda:{gpus - 1}" if gpus else "cpu, as this machine has no GPU"
        raise UserError(f"--device must be {allowed}; got {asked!r}")
    return asked


def wants_graph(asked: bool | None, device: str) -> bool:
    """Whether the training step is to be a CUDA graph: as asked, or wherever there can be one."""
    on_gpu = device.startswith("cuda")
    if asked and not on_gpu:
        raise UserError(f"--graph needs a GPU, and this run is on {device}: leave it out")
    return on_gpu if asked is None else asked


@contextmanager
def matmul_precision(chosen: Matmul) -> Iterator[None]:
    """How a GPU multiplies float32 matrices inside the `with` block: the run's choice, not the process's."""
    # PyTorch refuses to mix these with the older allow_tf32, which warns in some versions.
    cudnn: Any = torch.backends.cudnn  # its annotations lag behind
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [switch.fp32_precision for switch in switches]
    for switch in switches:
        switch.fp32_precision = "tf32" if chosen == "tf32" else "ieee"
    try:
        yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision


def most_memory(device: torch.device) -> int:
    """The most bytes taken at once so far: of a GPU's memory by this process's tensors; on a CPU by the whole process,
    libraries included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kibibytes = sys.platform != "darwin"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if kibibytes else 1)


def use_threads(asked: int | None, config: RunConfig) -> None:
    """Sets the threads of this process: as asked, or one for a small model, or as PyTorch thinks best.

    A second thread makes a small model 15 % faster on an idle machine, and ten times slower on a busy one, where each
    short operation waits for the thread that has lost its core. Results are the same bits only for the same number.
    """
    if asked is not None and asked < 1:
        raise UserError(f"--threads must be at least 1, got {asked}")
    small = config.model.width <= SMALL_WIDTH or find_architecture(config.architecture).token_by_token
    if asked is not None or small:
        torch.set_num_threads(asked or 1)
