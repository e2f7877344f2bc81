"""What a checkpoint brings back, which ones stay, and what is asked of them; kills and damage are tested elsewhere."""

import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch

import prism
from prism import checkpoints, tensorfile
from prism.errors import RunError, UserError
from tests.saved_steps import FILES, assert_is, bits, save, tensors_of

# --- Round trips ---


def test_every_dtype_comes_back_with_the_same_bits(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in tensorfile.DTYPES.values():
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5, dtype.itemsize), generator=generator)
        tensors[f"random {dtype}"] = raw.to(torch.uint8).view(dtype)  # NaN payloads and denormals among them
        tensors[f"empty {dtype}"] = torch.zeros((0, 4), dtype=dtype)
        tensors[f"scalar {dtype}"] = torch.ones((), dtype=dtype)
    checkpoints.save(tmp_path, 7, tensors, {"step": 7, "nested": {"list": [1, 0.1, None, "é\n"]}})
    loaded = checkpoints.load(tmp_path)
    assert {name: bits(t) for name, t in loaded.tensors.items()} == {name: bits(t) for name, t in tensors.items()}
    assert loaded.state == {"step": 7, "nested": {"list": [1, 0.1, None, "é\n"]}}
    assert loaded.skipped == ()


def test_views_tied_and_trained_tensors_are_stored_by_value(tmp_path):
    base = torch.arange(12.0, requires_grad=True)
    imaginary = torch.tensor([1 + 2j, 3 - 4j])
    tensors = {
        "transposed": base.reshape(3, 4).T, "strided": base[::5], "tied": base, "parameter": torch.nn.Parameter(base),
        "expanded": torch.ones(1).expand(4), "conjugate": imaginary.conj(), "negated": imaginary.conj().imag,
    }  # fmt: skip
    checkpoints.save(tmp_path, 1, tensors, {})
    for name, tensor in checkpoints.load(tmp_path).tensors.items():
        assert tensor.shape == tensors[name].shape, name
        assert torch.equal(tensor, tensors[name]), name


def test_no_tensors_and_no_state(tmp_path):
    checkpoints.save(tmp_path, 0, {}, {})
    loaded = checkpoints.load(tmp_path)
    assert (loaded.step, loaded.tensors, loaded.state) == (0, {}, {})


def test_the_library_reads_what_we_write_and_we_read_what_it_writes(tmp_path):
    tensors = {**tensors_of(5), "half": torch.randn(3, 3).bfloat16(), "empty": torch.zeros(0, 2)}
    checkpoints.save(tmp_path, 5, tensors, {})
    theirs = safetensors.torch.load_file(tmp_path / "step-00000005/state.safetensors")
    assert {n: bits(t) for n, t in theirs.items()} == {n: bits(t) for n, t in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    ours = tensorfile.read(tmp_path / "theirs.safetensors")
    assert {n: bits(t) for n, t in ours.items()} == {n: bits(t) for n, t in tensors.items()}


def test_the_name_the_format_keeps_for_itself_is_refused(tmp_path):
    with pytest.raises(RunError, match="'__metadata__'"):
        checkpoints.save(tmp_path, 1, {"__metadata__": torch.ones(1)}, {})


@pytest.mark.parametrize("unfit", [torch.ones(2).to_sparse(), torch.empty(2, device="meta"), torch.ones(2).cdouble()])
def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path, unfit):
    with pytest.raises(RunError, match=r"'odd'.*cannot be stored"):
        checkpoints.save(tmp_path / "c", 1, {"odd": unfit}, {})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"a": [1, {"b": float("-inf")}]}, {"t": torch.ones(1)},
                                   {"a": {3: "three"}}, {"a": {1, 2}}])  # fmt: skip
def test_a_state_that_would_not_come_back_is_refused(tmp_path, state):
    save(tmp_path, 10)
    with pytest.raises(RunError, match=r"the state of step 20, (loss|a|t)"):
        checkpoints.save(tmp_path, 20, {}, state)
    assert_is(checkpoints.load(tmp_path), 10)


@pytest.mark.parametrize("step", [-1, True, 10**18])
def test_a_step_is_a_whole_number(tmp_path, step):
    with pytest.raises(RunError, match="whole number"):
        checkpoints.save(tmp_path, step, {}, {})


# --- Which checkpoints stay ---


def test_the_newest_stay_and_so_do_the_pinned(tmp_path):
    for step in range(10, 70, 10):
        save(tmp_path, step, keep=2, pins=(20, 50, 999))
    assert checkpoints.steps(tmp_path) == [20, 50, 60]
    assert_is(checkpoints.load(tmp_path, 20), 20)
    save(tmp_path, 70, keep=3)  # no longer pinned
    assert checkpoints.steps(tmp_path) == [50, 60, 70]


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_fewer_than_two_are_refused(tmp_path, keep):
    with pytest.raises(UserError, match="at least 2"):
        save(tmp_path, 10, keep=keep)


def test_later_checkpoints_do_not_push_out_the_one_just_saved(tmp_path):
    save(tmp_path, 30, 40, 50)
    save(tmp_path, 10, keep=2)
    assert checkpoints.steps(tmp_path) == [10, 30, 40, 50]


def test_a_step_saved_twice_is_replaced(tmp_path):
    save(tmp_path, 10)
    checkpoints.save(tmp_path, 10, {"other": torch.ones(2)}, {"second": True})
    assert checkpoints.load(tmp_path).state == {"second": True}
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000010"]


def test_files_obey_the_umask(tmp_path):
    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            path = save(tmp_path / str(umask), 1)
        finally:
            os.umask(before)
        assert {stat.S_IMODE((path / name).stat().st_mode) for name in FILES} == {mode}
        assert stat.S_IMODE(path.stat().st_mode) == 0o777 & ~umask


def test_leftovers_go_when_their_process_is_dead_and_only_then(tmp_path):
    save(tmp_path, 10)
    dead = 2**22 + 1  # above the largest pid Linux gives out
    for name in (f".tmp-{dead}-20", f".tmp-del-{dead}-5", f".tmp-old-{dead}-10", f".tmp-{os.getpid()}-20", ".tmp-1-30"):
        shutil.copytree(tmp_path / "step-00000010", tmp_path / name)
    (tmp_path / f".tmp-{dead}-config.json").write_text("{")
    (tmp_path / ".tmp-of-somebody").write_text("mine")
    checkpoints.clean(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".tmp-1-30", ".tmp-of-somebody", "step-00000010"]


def test_what_a_killed_replacement_set_aside_is_put_back(tmp_path):
    save(tmp_path, 10).rename(tmp_path / ".tmp-old-4194305-10")
    checkpoints.clean(tmp_path)
    assert_is(checkpoints.load(tmp_path), 10)


def test_a_process_of_somebody_else_is_alive(tmp_path, monkeypatch):
    def refuse(pid, signal):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    (tmp_path / ".tmp-1-30").mkdir()
    checkpoints.clean(tmp_path)
    assert (tmp_path / ".tmp-1-30").exists()


# --- What is expected ---


EXPECTED = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors_of(0).items()}


def test_what_is_expected_is_loaded(tmp_path):
    save(tmp_path, 10)
    assert_is(checkpoints.load(tmp_path, expected=EXPECTED), 10)


@pytest.mark.parametrize(("change", "message"), [
    ({"bias": (torch.float32, (2,))}, "lacks the tensor 'bias'"),
    ({"weight": None}, "has the unknown tensor 'weight'"),
    ({"weight": (torch.float32, (7,))}, r"'weight' as torch.float32 \(6,\), expected torch.float32 \(7,\)"),
    ({"weight": (torch.bfloat16, (6,))}, r"'weight' as torch.float32 \(6,\), expected torch.bfloat16"),
])  # fmt: skip
def test_a_sound_checkpoint_of_another_model_is_an_error_at_once(tmp_path, monkeypatch, change, message):
    save(tmp_path, 10, 20)
    expected = {name: wanted for name, wanted in {**EXPECTED, **change}.items() if wanted is not None}
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("memory was taken"))
    with pytest.raises(RunError, match="step-00000020.*" + message):
        checkpoints.load(tmp_path, expected=expected)


def test_nothing_in_prism_can_unpickle():
    banned = re.compile(r"pickle|torch\.load\(|torch\.save\(|\b(?:import|from) (?:shelve|marshal|dill|joblib)\b", re.I)
    sources = list(Path(prism.__file__).parent.rglob("*.py"))
    assert len(sources) > 5
    assert [str(path) for path in sources if banned.search(path.read_text(encoding="utf-8"))] == []
