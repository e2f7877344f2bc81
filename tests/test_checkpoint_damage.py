"""Damaged by accident or made with bad intentions: a checkpoint is refused with a sentence, never half believed."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest
import torch

from prism import checkpoints, tensorfile
from prism.errors import RunError, UserError
from tests.saved_steps import FILES, assert_is, forge, save


def _assert_skipped(folder: Path, name: str = "") -> None:
    """The newest (20) is refused with a sentence, 10 is loaded; asked for by name, 20 is an error."""
    loaded = checkpoints.load(folder)
    assert_is(loaded, 10)
    assert len(loaded.skipped) == 1
    assert "step-00000020" in loaded.skipped[0]
    assert name in loaded.skipped[0]
    with pytest.raises(RunError, match=r"refused the checkpoint .*step-00000020"):
        checkpoints.load(folder, 20)


@pytest.mark.parametrize("name", FILES)
def test_cut_short_anywhere_it_is_skipped(tmp_path, name):
    path = save(tmp_path, 10, 20) / name
    whole = path.read_bytes()
    for length in range(len(whole)):  # every offset of the header, and every other
        path.write_bytes(whole[:length])
        _assert_skipped(tmp_path, name if name != "manifest.json" else "")
    path.write_bytes(whole + b" ")
    _assert_skipped(tmp_path, name)
    path.unlink()
    _assert_skipped(tmp_path, name)


def test_of_300_flipped_bits_none_is_accepted(tmp_path):
    folder, generator = save(tmp_path, 10, 20), random.Random(0)
    sizes = [(folder / name).stat().st_size for name in FILES]
    for trial in range(300):
        name = FILES[trial] if trial < 3 else generator.choices(FILES, sizes)[0]
        whole = (folder / name).read_bytes()
        flipped = bytearray(whole)
        flipped[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(flipped)
        _assert_skipped(tmp_path, name if name != "manifest.json" else "")
        (folder / name).write_bytes(whole)
    assert_is(checkpoints.load(tmp_path), 20)


def test_every_bit_of_the_manifest_counts(tmp_path):
    path = save(tmp_path, 10, 20) / "manifest.json"
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert checkpoints.load(tmp_path).step == 10, bit


def test_a_checkpoint_moved_under_another_step_is_refused(tmp_path):
    save(tmp_path, 10)
    shutil.copytree(tmp_path / "step-00000010", tmp_path / "step-00000020")
    _assert_skipped(tmp_path, "another step")


def test_all_broken_or_none_there(tmp_path):
    with pytest.raises(RunError, match="none has been written"):
        checkpoints.load(tmp_path)
    for step in (10, 20):
        (save(tmp_path, step) / "state.json").write_text("{}")
    with pytest.raises(RunError, match=r"step-00000020: state.json .*; .*step-00000010: state.json"):
        checkpoints.load(tmp_path)
    with pytest.raises(UserError, match=r"no checkpoint of step 15 \(steps there: 10, 20\)"):
        checkpoints.load(tmp_path, 15)


# --- Malice ---


class Bomb:
    def __reduce__(self):
        return (os.mkdir, (str(Bomb.target),))


def test_a_planted_program_is_never_run(tmp_path):
    import pickle

    Bomb.target = tmp_path / "exploded"
    payload = pickle.dumps(Bomb())
    save(tmp_path, 10)
    forge(tmp_path, 20, payload)
    _assert_skipped(tmp_path, "state.safetensors")
    for name in FILES:
        (tmp_path / "step-00000020" / name).write_bytes(payload)
    (tmp_path / "step-00000020/.metadata").write_bytes(payload)
    _assert_skipped(tmp_path)
    for name in (".metadata", "data.pkl", "state.pt"):  # beside a sound checkpoint they are not even opened
        (tmp_path / "step-00000010" / name).write_bytes(payload)
    assert_is(checkpoints.load(tmp_path), 10)
    assert not Bomb.target.exists()
    pickle.loads(payload)
    assert Bomb.target.exists()  # the bomb was live


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


ENTRY = json.dumps(entry()).encode()
BAD_HEADERS = {
    "announced longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "announced longer than any": (2**64 - 1).to_bytes(8, "little") + b"{}" * 50,
    "not even a length": b"\x02\x00",
    "deeply nested": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "another encoding": (10).to_bytes(8, "little") + "{}   ".encode("utf-16-le"),
    "repeated name": (119).to_bytes(8, "little") + b'{"a":%b,"a":%b}' % (ENTRY, ENTRY) + bytes(8),
    "huge shape": {"a": entry(shape=(2**40, 2**10))},
    "a shape larger than its bytes": {"a": entry(shape=(2**20,))},
    "huge empty shape": {"a": entry(shape=(2**62, 2**62, 0), offsets=(0, 0)), "b": entry()},
    "overflowing shape": {"a": entry(shape=(2**63, 2))},
    "negative shape": {"a": entry(shape=(-1, -2))},
    "fractional shape": {"a": entry(shape=(2.0,))},
    "truth as a shape": {"a": entry(shape=(True, 2))},
    "many dimensions": {"a": entry(shape=(1,) * 1000 + (2,))},
    "unknown dtype": {"a": entry(dtype="O")},
    "dtype not a text": {"a": entry(dtype=["F32"])},
    "offsets beyond the file": {"a": entry(shape=(3,), offsets=(0, 12))},
    "offsets backwards": {"a": entry(offsets=(8, 0))},
    "offsets that leave a gap": {"a": entry(shape=(1,), offsets=(4, 8))},
    "offsets that overlap": {"a": entry(), "b": entry()},
    "bytes nobody owns": {"a": entry(shape=(1,), offsets=(0, 4))},
    "a missing key": {"a": {"dtype": "F32", "shape": [2]}},
    "an extra key": {"a": {**entry(), "file": "../../secret"}},
    "an entry that is a list": {"a": [1, 2]},
    "a list": b"\x02" + bytes(7) + b"[]",
    "too many": {"a": entry(), **{str(number): entry("U8", (0,), (0, 0)) for number in range(100_000)}},
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_HEADERS)
def test_a_bad_header_is_refused_before_memory_is_taken(tmp_path, monkeypatch, kind):
    save(tmp_path, 10)
    forge(tmp_path, 20, BAD_HEADERS[kind], bytes(8))
    taken, empty = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: taken.append(a) or empty(*a, **k))
    with pytest.raises(RunError, match=r"state\.safetensors"):
        checkpoints.load(tmp_path, 20)
    assert taken == []
    _assert_skipped(tmp_path, "state.safetensors")


def test_a_bloated_header_is_not_even_read(tmp_path):
    bloated = json.dumps({"a": entry()}).encode().ljust(tensorfile.MAX_HEADER_BYTES + 1)
    forge(tmp_path, 20, len(bloated).to_bytes(8, "little") + bloated + bytes(8))
    with pytest.raises(RunError, match="announces a header of 8388609 bytes"):
        checkpoints.load(tmp_path, 20)


def test_the_forger_can_make_a_good_one(tmp_path):
    forge(tmp_path, 20, {"a": entry(), "../../etc/passwd": entry(offsets=(8, 16))}, bytes(16))
    assert checkpoints.load(tmp_path).tensors["../../etc/passwd"].tolist() == [0, 0]  # a name is only a name


@pytest.mark.parametrize("manifest", [
    {"format": 1, "step": 20, "files": {"../../secret": {"sha256": "0" * 64, "size": 1}}},
    {"format": 1, "step": 20, "files": {"state.json": None, "state.safetensors": 3}},
    {"format": 2}, {"format": 1, "step": 20, "files": []},
])  # fmt: skip
def test_a_manifest_of_other_files_is_refused(tmp_path, manifest):
    save(tmp_path, 10)
    forge(tmp_path, 20, {"a": entry()}, bytes(8), manifest)
    _assert_skipped(tmp_path, "manifest.json")


def test_a_state_that_is_no_dict_is_refused(tmp_path):
    save(tmp_path, 10)
    forge(tmp_path, 20, {"a": entry()}, bytes(8), state=[20])
    _assert_skipped(tmp_path, "state.json is not a JSON object")


@pytest.mark.parametrize("name", FILES)
def test_links_and_pipes_are_not_followed(tmp_path, name):
    path = save(tmp_path, 10, 20) / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    _assert_skipped(tmp_path, "not a plain file")
    path.unlink()
    os.mkfifo(path)
    _assert_skipped(tmp_path, "not a plain file")


def test_names_that_are_not_steps_are_ignored(tmp_path):
    save(tmp_path, 10)
    for name in ("step-20", "step-000000020", "step-٠٠٠٠٠٠٢٠", "step--0000020", "best", ".tmp-1-20"):
        shutil.copytree(tmp_path / "step-00000010", tmp_path / name)
    (tmp_path / "step-00000030").write_text("a file")
    assert checkpoints.steps(tmp_path) == [10]
