"""Killed, refused or out of space at any moment: the last good checkpoint is there, and a failure is never silent.

PRISM_KILLS sets how many times a saving process is killed at a random moment.
"""

import errno
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from prism import checkpoints, disk, tensorfile
from prism.errors import RunError
from prism.runs import RunFolder
from tests.saved_steps import assert_is, needs_fork, save, tensors_of, unprivileged, warm_processes

KILLS = int(os.environ.get("PRISM_KILLS", "6"))


# --- Kills ---


def _save_for_ever(folder: Path, first: int, acknowledged) -> None:
    torch.set_num_threads(1)
    for step in range(first, 10**6):
        checkpoints.save(folder, step, tensors_of(step, 200_000), {"step": step})
        acknowledged.send(step)


@needs_fork
def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path, monkeypatch):
    context = warm_processes(monkeypatch)
    generator, last = random.Random(0), 0
    for _ in range(KILLS):
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_save_for_ever, args=(tmp_path, last + 1, send))
        process.start()
        send.close()
        assert receive.recv() == last + 1
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        process.join()
        assert process.exitcode == -9
        last += 1
        try:
            while True:
                last = receive.recv()
        except EOFError:
            pass
        checkpoints.clean(tmp_path)
        loaded = checkpoints.load(tmp_path)
        assert loaded.skipped == ()
        assert loaded.step >= last
        assert_is(loaded, loaded.step, 200_000)
        assert not list(tmp_path.glob(".tmp-*"))
        last = loaded.step


def _die_at_line(number: int, folder: Path, step: int) -> None:
    """Saves, and dies as by kill -9 when the `number`-th line of the code below is about to run."""
    ours, count = {checkpoints.__file__, disk.__file__, tensorfile.__file__}, 0

    def trace(frame, event, argument):
        nonlocal count
        inside_deletion = frame.f_code.co_filename == shutil.__file__ and frame.f_code.co_name.startswith("_rmtree")
        if frame.f_code.co_filename in ours or inside_deletion:
            count += event == "line"
        elif frame.f_code.co_filename != shutil.__file__:
            return None
        if count == number:
            os._exit(9)
        return trace

    os.fsync = lambda descriptor: None  # a kill, not a power cut: what was written stays, synced or not
    sys.settrace(trace)
    checkpoints.save(folder, step, tensors_of(step), {"step": step, "again": True})
    os._exit(0)


def _die_everywhere(base: Path, step: int, answers) -> None:
    torch.set_num_threads(1)
    number, code = 0, 9
    while code == 9:
        number += 1
        folder = base.with_name(f"line-{number}")
        shutil.copytree(base, folder)
        child = os.fork()
        if child == 0:
            _die_at_line(number, folder, step)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if step not in checkpoints.steps(base):  # a reader that cleans nothing finds a checkpoint as well
            assert_is(checkpoints.load(folder), checkpoints.load(folder).step)
        checkpoints.clean(folder)
        loaded = checkpoints.load(folder)
        assert loaded.skipped == (), number
        assert loaded.step >= 20, number
        for left in checkpoints.steps(folder):  # what is half-deleted must not look like a checkpoint
            assert_is(checkpoints.load(folder, left), left)
        assert not list(folder.glob(".tmp-*")), number
        answers.send((number, code, "again" in loaded.state))
        shutil.rmtree(folder)
    answers.send(None)


@needs_fork
@pytest.mark.parametrize("step", [20, 30])
def test_a_kill_at_every_single_line_leaves_a_checkpoint(tmp_path, monkeypatch, step):
    context = warm_processes(monkeypatch)
    save(tmp_path / "base", 10, 20)
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_die_everywhere, args=(tmp_path / "base", step, send))
    process.start()
    send.close()
    answers = list(iter(receive.recv, None))
    process.join()
    assert process.exitcode == 0
    assert len(answers) > 100
    assert answers[-1][1:] == (0, True)
    assert answers[0][2] is False  # the first kills came before, the last after the rename


# --- Failures ---


class Saboteur:
    """Lets the first `number` steps of a write succeed and fails the next."""

    def __init__(self, monkeypatch, number: int, code: int = errno.ENOSPC):
        self.left, self.code, self.fired = number, code, False
        for name in ("fsync", "rename", "mkdir", "open"):
            monkeypatch.setattr(os, name, self.failing(getattr(os, name)))
        monkeypatch.setattr(disk, "open", self.open, raising=False)

    def failing(self, function):
        def step(*arguments, **options):
            if self.left == 0 and not self.fired:
                self.fired = True
                raise OSError(self.code, os.strerror(self.code))
            self.left -= 1
            return function(*arguments, **options)

        return step

    def open(self, path, mode):
        if mode == "rb":
            return open(path, mode)
        file = self.failing(open)(path, mode)
        return _Sabotaged(file, self.failing(file.write))


class _Sabotaged:
    def __init__(self, file, write):
        self._file, self.write = file, write

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failure_at_every_write_step_is_loud_and_harmless(tmp_path, again, code):
    step, number, failures = 20 if again else 30, 0, 0
    while True:
        folder = tmp_path / str(number)
        save(folder, 10, 20)
        with pytest.MonkeyPatch.context() as patch:
            saboteur = Saboteur(patch, number, code)
            try:
                save(folder, step)
            except RunError as error:
                text = str(error)
                assert str(folder) in text
                assert os.strerror(code) in text
                assert int(re.search(r"\((\d+) bytes needed\)", text)[1]) >= 6 * 4 + 6 * 8 + 8
            else:
                if not saboteur.fired:
                    break
                assert list(folder.glob(".tmp-old-*"))  # the only failure to go unmentioned: the replaced one stayed
                checkpoints.clean(folder)
        failures += saboteur.fired
        assert not list(folder.glob(".tmp-*"))
        loaded = checkpoints.load(folder)
        assert loaded.skipped == ()
        assert loaded.step in (20, step)
        assert_is(loaded, loaded.step)
        number += 1
    assert failures == number >= 15


def test_a_failure_to_remove_an_old_one_keeps_the_new_one(tmp_path, monkeypatch):
    save(tmp_path, 10, 20)
    real = os.rename
    monkeypatch.setattr(os, "rename", lambda a, b: real(a, b) if ".tmp-del" not in str(b) else os.stat("/nowhere"))
    with pytest.raises(RunError, match="could not remove the checkpoint of step 10"):
        save(tmp_path, 30, keep=2)
    assert_is(checkpoints.load(tmp_path), 30)


@needs_fork
def test_a_read_only_folder_is_named(tmp_path):
    folder = Path(tempfile.mkdtemp())
    try:
        save(folder / "c", 10)
        (folder / "c").chmod(0o555)
        folder.chmod(0o755)
        with unprivileged():
            with pytest.raises(RunError, match=re.escape(str(folder / "c")) + r" \(\d+ bytes needed\): Permission"):
                save(folder / "c", 20)
            assert_is(checkpoints.load(folder / "c"), 10)
    finally:
        (folder / "c").chmod(0o755)
        shutil.rmtree(folder)


@needs_fork
def test_a_checkpoint_we_may_not_read_is_an_error_not_a_reason_to_start_over_from_an_older_one(tmp_path):
    folder = Path(tempfile.mkdtemp())
    try:
        (save(folder, 10, 20) / "state.safetensors").chmod(0)
        folder.chmod(0o755)
        with unprivileged(), pytest.raises(RunError, match="may not be read"):
            checkpoints.load(folder)
    finally:
        shutil.rmtree(folder)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file a descriptor is")
def test_every_byte_and_name_is_on_the_disk_before_anything_relies_on_it(tmp_path, monkeypatch):
    """A power cut cannot be had in a test; the order of syncs and renames that survives one can be watched."""
    run, events, fsync, rename = RunFolder.create(tmp_path, {}), [], os.fsync, os.rename

    def note_sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append("sync " + ("temporary" if path.name.startswith(".tmp-") else path.name))
        fsync(descriptor)

    def note_rename(source, target):
        events.append(f"rename to {Path(target).name.replace(f'{os.getpid()}-', '')}")
        rename(source, target)

    for step in (10, 20, 30):
        events.clear()
        run.append_metrics({"step": step})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", note_sync)
            patch.setattr(os, "rename", note_rename)
            run.save_checkpoint(step, tensors_of(step), {})
    run.close()
    assert events[0] == "sync metrics.jsonl"
    assert sorted(events[1:3]) == ["sync state.json", "sync state.safetensors"]
    assert events[3:] == ["sync manifest.json", "sync temporary", "rename to step-00000030", "sync checkpoints",
                          "rename to .tmp-del-10"]  # fmt: skip
