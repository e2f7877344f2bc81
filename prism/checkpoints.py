"""Checkpoints that are there whole or not at all: written aside, synced, renamed; read only when their hashes agree.

    checkpoints/step-00001000/state.safetensors   model and optimiser tensors
                              state.json          everything else a resume needs
                              manifest.json       size and SHA-256 of both, written after them

Nothing here executes what it reads, and no path written inside a file is ever followed.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prism.disk import BrokenFile, check_step, explained, from_json, open_plain, sync_folder, to_json, write_synced
from prism.errors import RunError, UserError

if TYPE_CHECKING:  # torch is imported where tensors are touched, so that listing runs stays instant
    import torch

    from prism.tensorfile import Expected

TENSORS, STATE, MANIFEST = "state.safetensors", "state.json", "manifest.json"
MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What `save` was given, and a sentence for each newer checkpoint that could not be trusted."""

    step: int
    tensors: dict[str, "torch.Tensor"]
    state: dict[str, Any]
    skipped: tuple[str, ...] = ()


def save(folder: Path, step: int, tensors: Mapping[str, "torch.Tensor"], state: Mapping[str, Any], *,
         keep: int = 2, pins: Collection[int] = ()) -> None:  # fmt: skip
    """Writes `folder/step-N`, then removes all but this one, the `keep - 1` before it, and the pinned steps.

    Killed or failing at any moment, every earlier checkpoint is still there. A step saved twice is replaced.
    """
    from prism import tensorfile

    check_step(step, "the checkpoint")
    check_keep(keep)
    content = tensorfile.Content(tensors)
    state_bytes = to_json(dict(state), f"the state of step {step}", indent=1)
    if len(state_bytes) > MAX_JSON_BYTES:
        raise RunError(f"the state of step {step} is {len(state_bytes)} bytes of JSON, at most {MAX_JSON_BYTES} fit")
    needed = content.size + len(state_bytes)
    temporary = folder / f".tmp-{os.getpid()}-{step}"
    with explained(f"save the checkpoint of step {step} in", folder, needed):
        try:
            if not folder.is_dir():
                folder.mkdir()
                sync_folder(folder.parent)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            marks = {
                STATE: write_synced(temporary / STATE, [state_bytes]),
                TENSORS: write_synced(temporary / TENSORS, content.chunks()),
            }
            write_synced(temporary / MANIFEST, [_manifest(step, marks)])
            sync_folder(temporary)
            _put_in_place(temporary, folder / step_name(step), step)
            sync_folder(folder)  # before anything older goes: the new name must survive a power cut first
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    older = [other for other in steps(folder) if other < step]
    discard(folder, set(older[: -(keep - 1)]) - set(pins))


def load(folder: Path, step: int | None = None, expected: "Expected | None" = None) -> Checkpoint:
    """The newest checkpoint whose manifest verifies, or exactly `step` with no fallback.

    A sound checkpoint that differs from `expected` is an error, not a reason to look further: older ones differ too.
    """
    available = steps(folder)
    if step is not None and step not in available:
        there = ", ".join(map(str, available)) or "none"
        raise UserError(f"{folder} has no checkpoint of step {step} (steps there: {there})")
    skipped: list[str] = []
    for candidate in [step] if step is not None else available[::-1]:
        path = folder / step_name(candidate)
        try:
            tensors, state = _read_step(path, candidate, expected)
        except BrokenFile as error:
            skipped.append(f"skipped the checkpoint {path}: {error}")
            continue
        return Checkpoint(candidate, tensors, state, tuple(skipped))
    if step is not None:
        raise RunError(skipped[0].replace("skipped", "refused", 1))
    reasons = "; ".join(skipped) or "none has been written"
    raise RunError(f"no usable checkpoint in {folder}: {reasons}")


def steps(folder: Path) -> list[int]:
    """The steps saved in `folder`, ascending, whether or not they verify."""
    if not folder.is_dir():
        return []
    with explained("list", folder):
        found = (re.fullmatch(r"step-([0-9]{8,18})", entry.name) for entry in folder.iterdir() if entry.is_dir())
        return sorted(int(m[1]) for m in found if m and m[0] == step_name(int(m[1])))


def discard(folder: Path, unwanted: Iterable[int]) -> None:
    """Removes checkpoints; renamed first, so that a kill never leaves a half-deleted one under its name."""
    for step in sorted(unwanted, reverse=True):
        aside = folder / f".tmp-del-{os.getpid()}-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        with explained(f"remove the checkpoint of step {step} from", folder):
            os.rename(folder / step_name(step), aside)
        shutil.rmtree(aside, ignore_errors=True)  # what cannot be removed now goes at the next `clean`


def clean(folder: Path) -> None:
    """Removes what dead processes left half-done. Only for who holds the run's lock."""
    if not folder.is_dir():
        return
    with explained("clean up", folder):
        for entry in sorted(folder.iterdir()):
            match = re.fullmatch(r"\.tmp-(?:(del|old)-)?([0-9]+)-(.+)", entry.name)
            if match is None or _is_alive_elsewhere(int(match[2])):
                continue
            replaced = folder / step_name(int(match[3])) if match[1] == "old" and match[3].isdecimal() else None
            if replaced is not None and not replaced.exists():
                os.rename(entry, replaced)  # killed between the two renames of a replacement
            elif entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def check_keep(keep: int) -> None:
    if keep < 2:
        raise UserError(f"at least 2 checkpoints must be kept, got {keep}: with one, a broken newest loses the run")


def _is_alive_elsewhere(pid: int) -> bool:
    """A recycled pid may be our own (containers hand out the same ones): then it is a leftover all the same."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _put_in_place(temporary: Path, target: Path, step: int) -> None:
    if not target.exists():
        os.rename(temporary, target)
        return
    aside = target.with_name(f".tmp-old-{os.getpid()}-{step}")  # `clean` puts it back if we die before the next line
    os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except BaseException:
        os.rename(aside, target)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _manifest(step: int, marks: Mapping[str, Any]) -> bytes:
    return to_json({"format": 1, "step": step, "files": dict(marks)}, MANIFEST, indent=1)


# --- Reading: hashes first, then the header, and only then memory for tensors ---


def _read_step(path: Path, step: int, expected: "Expected | None") -> tuple[dict[str, "torch.Tensor"], dict[str, Any]]:
    from prism import tensorfile

    _verify(path, step)
    try:
        with open_plain(path / STATE) as file:
            state = from_json(file.read(MAX_JSON_BYTES + 1))
    except (OSError, ValueError) as error:
        raise BrokenFile(f"{STATE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise BrokenFile(f"{STATE} is not a JSON object")
    return tensorfile.read(path / TENSORS, expected), state


def _verify(path: Path, step: int) -> None:
    """The manifest must be, byte for byte, the one these files deserve: nothing in it is ever acted upon."""
    marks: dict[str, Any] = {}
    try:
        with open_plain(path / MANIFEST) as file:
            written = file.read(1 << 16)
        for name in (STATE, TENSORS):
            with open_plain(path / name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                marks[name] = {"sha256": digest, "size": os.fstat(file.fileno()).st_size}
    except PermissionError as error:  # a sound checkpoint may well stand here: going on without it would lose it
        raise RunError(f"the checkpoint {path} may not be read: {error.strerror}") from error
    except OSError as error:
        raise BrokenFile(f"{Path(error.filename or path).name}: {error.strerror or error}") from error
    if written == _manifest(step, marks):
        return
    try:
        promised = from_json(written)["files"]
        keys = ("size", "sha256")
        wrong = [name for name in marks if promised[name] != marks[name]]
        differ = [(name, key) for name in wrong for key in keys if promised[name][key] != marks[name][key]]
    except (ValueError, KeyError, TypeError, IndexError):
        differ = []
    if not differ:
        raise BrokenFile(f"{MANIFEST} is damaged or belongs to another step")
    name, key = differ[0]
    detail = f"{marks[name]['size']} bytes" if key == "size" else "a SHA-256"
    raise BrokenFile(f"{name} has {detail} other than {MANIFEST} says")
