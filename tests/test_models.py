"""Models that are kept: the final weights and nothing of the optimiser, opened like the run they come from."""

import json
import re
from pathlib import Path

import pytest
import torch

from prism.evaluate import sweep
from prism.models import export, kept_in
from prism.runs import RunFolder
from prism.train import train
from prism.trained import open_run
from tests.small import prism_says, small_config

MODELS = Path(__file__).parent.parent / "models"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "copy"
    train(small_config("copy", "prism"), path)
    return path


def test_a_kept_model_is_the_runs_final_one(run, tmp_path):
    kept = export(run, tmp_path / "models" / "small")
    ours, theirs = open_run(kept), open_run(run, 24)
    assert ours.step == 24
    for name, tensor in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], tensor), name
    scores = sweep(ours.model, ours.config.task, [2, 4], 6)
    recorded = RunFolder.open(run).result()["final"]["test"]
    assert {name: score.exact for name, score in scores.items()} == {
        name: one["exact"] for name, one in recorded.items()
    }
    for name in ("config.json", "environment.json", "result.json"):
        assert json.loads((kept / name).read_text()) == json.loads((run / name).read_text())
    tensors = RunFolder.open(kept).load_checkpoint().tensors
    assert all(name.startswith("model.") for name in tensors)
    assert sorted(path.name for path in kept.iterdir()) == [
        "CARD.md", "checkpoints", "config.json", "environment.json", "result.json"
    ]


def test_the_card_says_what_a_reader_asks(run, tmp_path):
    card = (export(run, tmp_path / "small") / "CARD.md").read_text()
    result = RunFolder.open(run).result()
    for said in ("# small", "`copy`", "at most 3", "from seed 0, 8 examples a step", "steps: 24",
                 str(result["environment"]["commit"]), "exact match in %, by test length"):
        assert said in card
    row = re.search(r"^ +4 +([\d.]+) ", card, re.M)
    assert row is not None
    assert float(row.group(1)) == pytest.approx(100 * result["final"]["test"]["4"]["exact"], abs=0.05)


def test_models_are_listed_and_used_by_the_commands(run, tmp_path, capsys):
    place = tmp_path / "models"
    assert prism_says(capsys, "export", str(run), "--out", str(place / "one"))[:2] == (0, f"{place / 'one'}\n")
    code, out, _ = prism_says(capsys, "models", "--folder", str(place))
    assert code == 0
    assert re.search(rf"{place / 'one'} copy <= 3, prism, [\d.]+ M parameters, [\d.]+ MB\n +2: [\d.]+  4: [\d.]+", out)
    assert prism_says(capsys, "evaluate", str(place / "one"), "--lengths", "2", "--examples", "3")[0] == 0
    assert prism_says(capsys, "generate", str(place / "one"), "12=", "--limit", "3")[0] == 0
    assert prism_says(capsys, "figures", str(place / "one"), "--out", str(tmp_path / "drawn"))[0] == 0
    again = prism_says(capsys, "train", "copy", "--out", str(place / "one"), "--resume")
    assert again[0] == 0  # finished: shown, not trained
    assert [one.path.name for one in kept_in(place)] == ["one"]


@pytest.mark.parametrize("kept", kept_in(MODELS), ids=lambda kept: kept.path.name)
def test_the_models_of_this_repository_do_what_their_cards_say(kept):
    trained = open_run(kept.path)
    lengths = [int(name) for name in kept.result["final"]["test"]][:3]
    for name, score in sweep(trained.model, trained.config.task, lengths, 10).items():
        assert score.exact >= kept.result["final"]["test"][name]["exact"] - 0.2
    assert kept.bytes < 5e6
    assert (kept.path / "CARD.md").read_text().startswith(f"# {kept.path.name}")


def test_what_cannot_be_kept_is_refused(run, tmp_path, capsys):
    unfinished = tmp_path / "unfinished"
    RunFolder.create(unfinished, small_config("copy", "prism").to_json()).close()
    (tmp_path / "there").mkdir()
    for arguments, said in (
        (["export", str(unfinished), "--out", str(tmp_path / "new")], "is not finished"),
        (["export", str(run), "--out", str(tmp_path / "there")], "exists already: choose another --out"),
        (["export", str(tmp_path / "nothing"), "--out", str(tmp_path / "new")], "is not a run folder"),
        (["models", "--folder", str(tmp_path / "nowhere")], "there is no folder"),
    ):
        code, _, err = prism_says(capsys, *arguments)
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()
