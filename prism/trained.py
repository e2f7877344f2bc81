"""A model from its configuration, and from a run folder."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prism.architectures import Architecture, find_architecture
from prism.config import RunConfig
from prism.data import Vocabulary, vocabulary
from prism.errors import UserError
from prism.runs import RunFolder

WEIGHTS = "model."  # prefix of the weights in a checkpoint; the optimiser's state stands beside them


@dataclass(frozen=True)
class Trained:
    """A run, opened for use."""

    folder: RunFolder
    config: RunConfig
    model: Architecture
    words: Vocabulary
    step: int
    skipped: tuple[str, ...] = ()  # a sentence for each newer checkpoint that could not be trusted

    def refuse_other_encoding(self, named: str | None) -> None:
        """A file is named on the command line to make its encoding known; which it is to be, the run says."""
        if named is not None and named != self.config.encoding:
            raise UserError(f"--encoding is {named}, and {self.folder.path} is a run of {self.config.encoding}")


def build(config: RunConfig) -> Architecture:
    """The untrained model of a configuration; the same seed gives the same weights."""
    torch.manual_seed(config.seed)
    return find_architecture(config.architecture).build(config)  # a Transformer's encoding gets its hints there


def open_run(path: str | Path, step: int | None = None, device: str | torch.device = "cpu") -> Trained:
    """The model of a run folder, at its newest sound checkpoint or at `step`, ready to evaluate."""
    folder = RunFolder.open(path)
    config = RunConfig.from_json(folder.config)
    steps = folder.checkpoint_steps()
    if not steps:
        raise UserError(f"{path} has no checkpoint yet: train it first, or wait for its first save")
    if step is not None and step not in steps:
        raise UserError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, steps))}")
    model = build(config)
    checkpoint = folder.load_checkpoint(step)
    load_weights(model, checkpoint.tensors)
    return Trained(
        folder, config, model.to(device).eval(), vocabulary(config.task), checkpoint.step, checkpoint.skipped
    )


def weights(model: Architecture) -> dict[str, Tensor]:
    """The tensors of a model under the names they have in a checkpoint."""
    return {WEIGHTS + name: tensor.detach() for name, tensor in model.state_dict().items()}


def load_weights(model: Architecture, tensors: dict[str, Tensor]) -> None:
    """Puts a checkpoint's weights into a model of the same configuration."""
    own = {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}
    try:
        model.load_state_dict(own)
    except RuntimeError as error:
        raise UserError(f"the checkpoint's weights do not fit the configuration: {error}".splitlines()[0]) from error
