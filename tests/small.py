"""Runs of a second, and processes that train them: what the end-to-end tests share."""

import contextlib
import dataclasses
import hashlib
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from prism.config import CurriculumConfig, EvaluationConfig, ModelConfig, OptimizerConfig, RunConfig
from prism.data import collate, vocabulary
from prism.encodings import find_encoding
from prism.runs import RunFolder
from prism.tasks import Example, Task, find_task
from prism.trained import build, open_run
from prism.transformer import Transformer

ENCODINGS = ("prism", "sinusoidal", "nope")
PRISM_OPTIONS: dict[str, Any] = {"gate_features": 8, "cursors": 1, "pe_width": 16, "copy_width": 4}
MODEL = ModelConfig(width=16, layers=2, heads=2, head_width=8, feedforward=2)
EVALUATION = EvaluationConfig(
    every=10, below_loss=1e6, lengths=(2, 4), examples=5, final_examples=6, checkpoint_every=7
)


def small_positions(encoding: str, **options: Any) -> Any:
    """An encoding's options at a size that costs nothing."""
    defaults = {"prism": PRISM_OPTIONS, "sinusoidal": {"shift": 7}}.get(encoding, {})
    return find_encoding(encoding).Config(**{**defaults, **options})


def small_config(
    task: str = "copy", encoding: str = "prism", options: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None, **changes: Any,
) -> RunConfig:
    """A run of about a second: 24 steps, an evaluation every 10, a checkpoint every 7."""
    settings: dict[str, Any] = {
        "steps": 24, "batch_size": 8, "max_length": 3, "model": MODEL,
        "curriculum": CurriculumConfig(stages=((2, 5), (3, 10))),
        "optimizer": OptimizerConfig(rate=5e-3, clip=1.0, warmup=3, decay="cosine", final_rate=0.1),
        "evaluation": dataclasses.replace(EVALUATION, **(evaluation or {})),
    }
    positions = small_positions(encoding, **(options or {}))
    return RunConfig(task=find_task(task)(), encoding=encoding, positions=positions, **{**settings, **changes})


def short_examples(task: Task, count: int, seed: int = 0) -> list[Example]:
    """Examples of a task that are as short as it has them."""
    rng = random.Random(seed)
    if task.has_curriculum:
        longest = 2 if task.name in ("addition", "multiplication") else 3
        return [task.example(rng, 1 + place % longest) for place in range(count)]
    return [task.training_example(rng, 16, "train") for _ in range(count)]


def memorise(model: Transformer, task: Task, examples: Sequence[Example], steps: int = 60) -> Transformer:
    """Teaches these examples by heart, and so leaves others wrong."""
    made = collate(vocabulary(task), examples)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    model.train()
    for _ in range(steps):
        loss = cross_entropy(model(made.tokens)[made.mask], made.targets[made.mask])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def stirred(config: RunConfig, scale: float = 0.3) -> Transformer:
    """An untrained model pushed away from its start, so that no branch of it is still neutral."""
    model = build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
        model.norm.bias.zero_()
        model.norm.weight.normal_()  # tied as they are, embeddings would make every token follow itself
    return model.eval()


# --- Runs in processes of their own ---


class Ended(NamedTuple):
    code: int | None
    said: str


def prepared(path: Path, config: RunConfig) -> Path:
    """A folder with a configuration and no step yet: `prism train TASK --out PATH --resume` starts it."""
    with RunFolder.create(path, config.to_json()):
        pass
    return path


def command_line(arguments: list[str], said: str) -> None:
    """`prism ARGUMENTS` with everything it says in a file. For a process of its own."""
    torch.set_num_threads(1)
    from prism.cli import main

    with open(said, "w", buffering=1) as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            main(arguments)
        except SystemExit as end:
            file.flush()
            sys.exit(end.code)


def start_training(context: Any, folder: Path, task: str = "copy") -> Any:
    """A process that takes a prepared run to its end."""
    arguments = ["train", task, "--out", str(folder), "--resume"]
    process = context.Process(target=command_line, args=(arguments, str(folder) + ".txt"))
    process.start()
    return process


def ended(process: Any, folder: Path) -> Ended:
    process.join(120)
    assert not process.is_alive()
    return Ended(process.exitcode, Path(str(folder) + ".txt").read_text())


def trained_to_end(context: Any, folder: Path, task: str = "copy") -> Ended:
    return ended(start_training(context, folder, task), folder)


def fingerprint(folder: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on how often it was stopped."""
    checkpoint = RunFolder.open(folder).load_checkpoint()
    result = RunFolder.open(folder).result()
    assert result is not None, f"{folder} is not finished"
    hashes = {
        name: hashlib.sha256(str(tensor.dtype).encode() + tensor.contiguous().view(-1).numpy().tobytes()).hexdigest()
        for name, tensor in checkpoint.tensors.items()
    }
    assert any(name.startswith("model.") for name in hashes)
    assert any(name.endswith(".exp_avg_sq") for name in hashes)
    return {
        "step": checkpoint.step, "state": checkpoint.state, "tensors": hashes,
        "metrics": (folder / "metrics.jsonl").read_bytes(), "evaluations": (folder / "evaluations.jsonl").read_bytes(),
        "result": {key: value for key, value in result.items() if key not in ("seconds", "cost", "environment")},
        "kept": RunFolder.open(folder).checkpoint_steps(),
    }


def weights_of(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    return open_run(folder, step).model.state_dict()


# --- Commands in this process ---


def prism_says(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command run in this process."""
    capsys.readouterr()
    from prism.cli import main

    try:
        main(arguments)
        code = 0
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def refused(capsys: Any, *arguments: str, code: int = 2) -> str:
    """The one sentence a command ends with."""
    ended, out, err = prism_says(capsys, *arguments)
    assert ended == code, err
    assert out == ""
    assert err.startswith("prism: ")
    (sentence,) = err.splitlines()
    return sentence
