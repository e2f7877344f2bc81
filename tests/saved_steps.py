"""Checkpoints to put to the test: tensors that follow from their step, so that any mixture shows."""

import hashlib
import json
import multiprocessing
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from prism import checkpoints

FILES = ("state.safetensors", "state.json", "manifest.json")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes the Unix way")


def tensors_of(step: int, width: int = 6) -> dict[str, torch.Tensor]:
    values = torch.arange(width, dtype=torch.float32) + step
    return {"weight": values, "exp_avg": values.double() / 3, "count": torch.tensor(step)}


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_is(checkpoint: checkpoints.Checkpoint, step: int, width: int = 6) -> None:
    wanted = tensors_of(step, width)
    assert checkpoint.step == checkpoint.state["step"] == step
    assert checkpoint.tensors.keys() == wanted.keys()
    assert all(bits(checkpoint.tensors[name]) == bits(wanted[name]) for name in wanted)


def save(folder: Path, *steps: int, keep: int = 9, **options) -> Path:
    for step in steps:
        checkpoints.save(folder, step, tensors_of(step), {"step": step}, keep=keep, **options)
    return folder / checkpoints.step_name(steps[-1])


def forge(folder: Path, step: int, header: dict | bytes, data: bytes = b"", manifest=None, state=None) -> Path:
    """A checkpoint whose hashes are right: what somebody with bad intentions, not a bad disk, would make."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True, exist_ok=True)
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    raw = head if isinstance(header, bytes) else len(head).to_bytes(8, "little") + head + data
    contents = {"state.json": json.dumps(state or {"step": step}).encode(), "state.safetensors": raw}
    marks = {}
    for name, content in contents.items():
        (path / name).write_bytes(content)
        marks[name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (path / "manifest.json").write_text(json.dumps(manifest or {"format": 1, "step": step, "files": marks}, indent=1))
    return path


@contextmanager
def unprivileged():
    """Root may write anywhere; step down so that permissions mean something."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def warm_processes(monkeypatch):
    """Processes forked from one that has torch in memory already: milliseconds each."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    return context
