"""The sole reader and writer of a run folder: one training run, resumable and readable while it is being written.

    config.json         what was asked for; a resume must ask for the same
    environment.json    versions, machine, commit and date of the start, and of every resume
    metrics.jsonl       one deterministic record per logged step: bit-identical after any number of resumes
    timing.jsonl        whatever the wall clock had a say in, kept apart for that reason
    evaluations.jsonl   one record per evaluation
    result.json         the summary; there only when the run has finished
    encoding.py         a copy of the encoding, where it came from a file of the user's; never executed from here
    checkpoints/        see prism/checkpoints.py
    .lock               held for the life of the run

The lock is an advisory `flock`: it dies with its process and needs no cleaning up, but some network file systems
(NFS without a lock daemon, Lustre without `-o flock`, many FUSE mounts) grant it to everybody. There, give every
run a folder of its own. A child forked by the run inherits the lock: it must end before the run can be resumed.
"""

import hashlib
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from prism import checkpoints
from prism.checkpoints import Checkpoint, check_keep
from prism.disk import check_step, explained, from_json, replace_file, sync_folder, to_json
from prism.environment import describe_environment
from prism.errors import RunError, UserError
from prism.journal import Journal

if TYPE_CHECKING:
    import torch

    from prism.tensorfile import Expected

CONFIG, ENVIRONMENT, RESULT, CHECKPOINTS, LOCK = (
    "config.json", "environment.json", "result.json", "checkpoints", ".lock")  # fmt: skip
SOURCE = "encoding.py"  # a user's own


class RunFolder:
    """One run on disk. `create` for the process that trains, `open` for everybody who looks."""

    def __init__(self, path: Path, config: dict[str, Any], lock: "_Lock | None" = None, keep: int = 2):
        self.path, self.config = path, config
        self._lock, self._keep = lock, keep
        self._metrics, self._timings, self._evaluations = self._journals = tuple(
            Journal(path / f"{name}.jsonl") for name in ("metrics", "timing", "evaluations")
        )

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], resume: bool = False, keep: int = 2) -> Self:
        """A run to write to: new, or with `resume` an interrupted one with the same configuration."""
        path, asked = Path(path), from_json(to_json(dict(config), "the configuration"))
        check_keep(keep)
        _refuse_unfit_place(path, resume)
        with explained("create", path):
            path.mkdir(parents=True, exist_ok=True)
        lock = _Lock(path)
        try:
            # Asked again under the lock: the folder may have become a run since.
            exists = (path / CONFIG).exists()
            if exists and not resume:
                raise UserError(f"{path} already holds a run: continue it with --resume, or choose another --out")
            if exists:
                _refuse_other_config(path, _read_object(path / CONFIG), asked)
            checkpoints.clean(path)
            checkpoints.clean(path / CHECKPOINTS)
            if not exists:
                replace_file(path / CONFIG, to_json(asked, CONFIG, indent=2))
                with explained("sync", path.parent):
                    sync_folder(path.parent)
            _record_environment(path / ENVIRONMENT)
            return cls(path, asked, lock, keep)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """A run to read, also while another process writes it."""
        path = Path(path)
        with explained("read", path):
            if not (path / CONFIG).is_file():
                raise UserError(f"{path} is not a run folder: it has no {CONFIG}")
        return cls(path, _read_object(path / CONFIG))

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether there is a run in this folder."""
        with explained("read", Path(path)):
            return (Path(path) / CONFIG).is_file()

    @staticmethod
    def writer(path: str | Path) -> int | None:
        """The process that is writing this run, if one is. The lock decides: a number left by a process that was killed
        may be anybody's by now."""
        try:
            with (Path(path) / LOCK).open("rb+") as file:
                if _try_lock(file.fileno()):
                    return None
                return int(file.read() or 0) or None
        except (OSError, ValueError):
            return None

    @classmethod
    def set_aside(cls, path: str | Path) -> Path:
        """Gives a run another name, so that a new one can have its place; refused while somebody writes it."""
        path = Path(path)
        lock = _Lock(path)
        try:
            aside = path.with_name(f"{path.name}-before-{time.strftime('%Y%m%d-%H%M%S')}")
            with explained("rename", path):
                os.replace(path, aside)
            return aside
        finally:
            lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the lock back; afterwards the run can only be read."""
        for journal in self._journals:
            journal.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # --- Records ---

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        self._writable()
        self._metrics.append(record)

    def append_timing(self, record: Mapping[str, Any]) -> None:
        self._writable()
        self._timings.append(record)

    def append_evaluation(self, record: Mapping[str, Any]) -> None:
        self._writable()
        self._evaluations.append(record)

    def metrics(self) -> list[dict[str, Any]]:
        return self._metrics.records()

    def timings(self) -> list[dict[str, Any]]:
        return self._timings.records()

    def evaluations(self) -> list[dict[str, Any]]:
        return self._evaluations.records()

    def truncate(self, step: int) -> None:
        """Takes the run back to `step`: every record, checkpoint and result from after it goes.

        Later checkpoints go too: left behind, a broken one would count as kept, and a sound one (of a run resumed
        from an earlier step on purpose) would win the next resume over records that no longer lead to it.
        """
        self._writable()
        check_step(step, "truncate")
        with explained("remove", self.path / RESULT):
            (self.path / RESULT).unlink(missing_ok=True)
        folder = self.path / CHECKPOINTS
        checkpoints.discard(folder, [later for later in checkpoints.steps(folder) if later > step])
        for journal in self._journals:
            journal.truncate(step)

    def keep_source(self, name: str, content: bytes) -> None:
        """Keeps a user's own code with the run that was made by it, for the record: nothing is ever run from there."""
        self._writable()
        if not self.has_source(name, content):
            raise UserError(f"{self.path / name} is not what your file says today: it has changed since this run "
                            "began. Put it back as it was to go on, or choose another --out")
        replace_file(self.path / name, content)

    def has_source(self, name: str, content: bytes) -> bool:
        """Whether the code kept under this name is this, or there is none yet."""
        path = self.path / name
        with explained("read", path):
            return not path.exists() or path.read_bytes() == content

    # --- Checkpoints ---

    def save_checkpoint(self, step: int, tensors: Mapping[str, "torch.Tensor"], state: Mapping[str, Any],
                        pins: Collection[int] = ()) -> None:  # fmt: skip
        """Saves, then keeps the newest `keep` checkpoints and those of the steps in `pins`."""
        self._writable()
        for journal in self._journals:  # a power cut must not leave a checkpoint newer than the records before it
            journal.sync()
        checkpoints.save(self.path / CHECKPOINTS, step, tensors, state, keep=self._keep, pins=pins)

    def load_checkpoint(self, step: int | None = None, expected: "Expected | None" = None) -> Checkpoint:
        """The newest checkpoint that verifies, or exactly `step`; `skipped` of the answer is for the user to see."""
        return checkpoints.load(self.path / CHECKPOINTS, step, expected)

    def checkpoint_steps(self) -> list[int]:
        return checkpoints.steps(self.path / CHECKPOINTS)

    # --- The whole run ---

    def write_result(self, result: Mapping[str, Any]) -> None:
        self._writable()
        replace_file(self.path / RESULT, to_json(dict(result), RESULT, indent=2))

    def result(self) -> dict[str, Any] | None:
        """The summary of a finished run; None while there is none."""
        return _read_object(self.path / RESULT) if (self.path / RESULT).exists() else None

    def environment(self) -> dict[str, Any]:
        return _read_object(self.path / ENVIRONMENT)

    def _writable(self) -> None:
        if self._lock is None:
            raise RunError(f"{self.path} is open for reading only")


class _Lock:
    """The operating system's lock on a run folder; whoever finds it taken learns by whom."""

    def __init__(self, folder: Path):
        with explained("lock", folder / LOCK):
            self._descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                if not any(_try_lock(self._descriptor, wait) for wait in (0, 0.02, 0.05)):  # or somebody just looks
                    holder = self._holder()
                    raise UserError(f"{folder} is in use by {holder}: wait for its end, or choose another --out")
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
            except BaseException:
                os.close(self._descriptor)
                raise

    def release(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)  # the file stays: removing it would let two processes lock two different files

    def _holder(self) -> str:
        for _ in range(20):  # between taking the lock and signing it there is a moment
            if text := os.pread(self._descriptor, 32, 0).strip():
                return f"process {text.decode(errors='replace')}"
            time.sleep(0.01)
        return "another process"


def _try_lock(descriptor: int, wait: float = 0.0) -> bool:
    """Takes the operating system's lock on an open file, after a moment, unless somebody has it."""
    try:
        import fcntl
    except ImportError as error:
        raise RunError("writing a run needs flock, which this system lacks: use Linux, macOS or WSL") from error
    time.sleep(wait)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def config_hash(config: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration as canonical JSON: the order of keys does not count, nor does 1 against 1.0."""
    return hashlib.sha256(_canonical(dict(config))).hexdigest()


def _canonical(value: Any) -> bytes:
    return to_json(_settled(from_json(to_json(value, "the configuration"))), "the configuration")


def _settled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _settled(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_settled(element) for element in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refuse_unfit_place(path: Path, resume: bool) -> None:
    """Before anything is touched: a mistyped folder must stay as it was."""
    with explained("read", path):
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file, not a folder for a run")
        names = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    if CONFIG in names:
        return
    if resume:
        raise UserError(f"there is no run in {path} to resume: start one without --resume")
    # A lock and leftovers are what a process killed in its first moments leaves: no run yet, and nobody else's folder.
    others = [name for name in names if name != LOCK and not name.startswith(".tmp-")]
    if others:
        raise UserError(f"{path} is not empty and not a run (it holds {others[0]!r}): choose another --out")


def _refuse_other_config(path: Path, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    if config_hash(stored) == config_hash(asked):
        return
    there, here = _leaves(stored), _leaves(asked)
    differences = [
        f"{key}: {there.get(key, 'nothing')} in the folder, {here.get(key, 'nothing')} asked for"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    raise UserError(
        f"{path} was made with another configuration ({'; '.join(differences)}): "
        "ask for the same, or choose another --out"
    )


def _leaves(value: Any, key: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        prefix = f"{key}." if key else ""
        return {leaf: text for name in value for leaf, text in _leaves(value[name], f"{prefix}{name}").items()}
    return {key: _canonical(value).decode()}


def _record_environment(path: Path) -> None:
    """The start's environment on top, every resume's below it: a change of machine or version ends bit equality."""
    now = describe_environment()
    if path.exists():
        first = _read_object(path)
        now = {**first, "resumed": [*first.get("resumed", []), now]}
    replace_file(path, to_json(now, ENVIRONMENT, indent=2))


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with explained("read", path):
            value = from_json(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise RunError(f"{path} is damaged: not a JSON object")
    return value
