"""The matrix, what stands of it, the runner that fills it, and the page made of it."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import prism.reproduce.page
from prism.config import RunConfig
from prism.errors import UserError
from prism.reproduce import matrix as matrices
from prism.reproduce.cells import Cell, Model, Row
from prism.reproduce.claims import CLAIMS
from prism.reproduce.matrix import chosen, find_cell, matrix
from prism.reproduce.page import draw_all
from prism.reproduce.runner import Runner, train_cell
from prism.reproduce.scan_lengths import lengths
from prism.reproduce.status import Places, minutes_left, overview, standing
from prism.runs import RunFolder
from tests.small import prism_says

TINY = {
    "model.width": 16, "model.layers": 1, "batch_size": 4, "steps": 12, "evaluation.lengths": (1, 2),
    "evaluation.every": 4, "evaluation.below_loss": 1e6, "evaluation.examples": 3, "evaluation.final_examples": 5,
    "evaluation.checkpoint_every": 4,
}
NOPE, APE = Model("nope", "quick", "nope"), Model("sinusoidal", "quick", "sinusoidal", {"positions.shift": 3})


def tiny(model: Model = NOPE, seed: int = 0, task: str = "copy", **changes: object) -> Cell:
    return Cell("laptop", task, 2, model, seed, {**TINY, **changes})


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path / "results", tmp_path / "runs")


# --- The matrix ---


def test_every_cell_is_a_run_that_can_be_made_and_has_a_name_of_its_own():
    cells = matrix()
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        config = cell.config()
        assert (config.task.name, config.max_length, config.seed) == (cell.task, cell.max_length, cell.seed)
        assert config.encoding == cell.model.encoding
        assert find_cell(cell.name) == cell


def test_the_paper_has_its_figures_and_three_seeds():
    rows = {cell.row for cell in matrix() if cell.part == "paper"}
    for figure in ("addition-10", "dyn_str_cpy-10", "scan_cot-80", "reverse-40", "copy-10", "copy-40", "odds_first-40",
                   "multiplication-9", "stack-40"):
        assert {f"paper/{figure}/prism", f"paper/{figure}/sinusoidal"} <= rows
    assert "paper/dyn_str_cpy-5/prism" in rows
    for row in {cell.row for cell in matrix()}:
        assert [cell.seed for cell in matrix() if cell.row == row] == [0, 1, 2]


def test_one_seed_of_every_figure_comes_before_a_second_of_any():
    paper = [cell for cell in matrix() if cell.part == "paper"]
    seeds = [cell.seed for cell in paper]
    assert seeds.index(1) == len({cell.row for cell in paper})
    headline = [cell for cell in paper if cell.seed and cell.task in ("copy", "addition", "reverse")]
    assert paper.index(headline[0]) == seeds.index(1)


def test_ablations_differ_from_the_paper_in_what_they_are_called_after():
    by_name = {cell.name: cell.config() for cell in matrix()}
    one = by_name["ablations/addition-10/expected-position-seed1"]
    assert one.positions.superposition == "expected"
    assert one.changed({"positions.superposition": "low_rank"}) == by_name["paper/addition-10/prism-seed1"]
    assert by_name["laptop/copy-10/reset-half-seed0"].positions.reset_start == 0.5


def test_cells_are_chosen_by_beginnings_and_patterns():
    assert {cell.part for cell in chosen(("ablations/",))} == {"ablations"}
    assert {cell.seed for cell in chosen(("*-seed2",))} == {2}
    with pytest.raises(UserError, match=r"no cell of the matrix matches 'laptopp'"):
        chosen(("laptop", "laptopp"))
    with pytest.raises(UserError, match=r"unknown cell .*did you mean 'paper/copy-10/prism-seed\d'\? prism reprod"):
        find_cell("paper/copy-10/prism-seed9")


def test_claims_are_of_tasks_of_the_matrix():
    assert set(CLAIMS) == {(cell.task, cell.max_length) for cell in matrix() if cell.part == "paper"}


# --- Where a cell stands ---


def test_a_cell_is_missing_then_stopped_then_done(places, monkeypatch):
    cell = tiny()
    assert standing(cell, places).kind == "missing"
    real = RunFolder.save_checkpoint

    def dying(self, step, *arguments, **more):
        real(self, step, *arguments, **more)
        if step == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "save_checkpoint", dying)
    with pytest.raises(KeyboardInterrupt):
        train_cell(cell, places, "cpu")
    assert (standing(cell, places).kind, standing(cell, places).step) == ("stopped", 8)
    assert "0 stopped at 8" in overview([standing(cell, places)])
    monkeypatch.setattr(RunFolder, "save_checkpoint", real)
    train_cell(cell, places, "cpu")
    done = standing(cell, places)
    assert (done.kind, done.step) == ("done", 12)
    assert done.seconds_per_step is None  # resumed: its seconds are not those of the whole
    kept = json.loads((places.results / "laptop/copy-2/nope-seed0.json").read_text())
    assert RunConfig.from_json(kept["config"]) == cell.config()


def test_a_run_being_written_is_running(places):
    cell = tiny()
    with RunFolder.create(places.run(cell), cell.config().to_json()):
        assert standing(cell, places).kind == "running"
    assert standing(cell, places).kind == "stopped"


def test_a_result_of_another_configuration_does_not_count(places):
    train_cell(tiny(), places, "cpu")
    longer = tiny(steps=13)
    assert standing(longer, places).kind == "outdated"
    train_cell(longer, places, "cpu")
    assert standing(longer, places).kind == "done"
    aside = [path.name for path in (places.runs / "laptop/copy-2").iterdir() if "before" in path.name]
    assert len(aside) == 1  # the run that was there is kept
    assert RunFolder.open(places.runs / "laptop/copy-2" / aside[0]).result()["final"]["step"] == 12


def test_a_result_from_before_an_option_existed_counts(places):
    cell = Cell("laptop", "copy", 2, Model("local", "quick", changes={"positions.cursors": 1}), 0, TINY)
    train_cell(cell, places, "cpu")
    for path in (places.result(cell), places.run(cell) / "config.json"):
        stored = json.loads(path.read_text())
        del stored.get("config", stored)["positions"]["landmarks"]
        path.write_text(json.dumps(stored))
    assert standing(cell, places).kind == "done"
    places.result(cell).unlink()
    assert standing(cell, places).kind == "stopped"
    assert train_cell(cell, places, "cpu")["final"]["step"] == 12  # and its run goes on


def test_costs_come_from_what_was_measured(places):
    train_cell(tiny(), places, "cpu")
    known = [standing(tiny(), places), standing(tiny(seed=1), places), standing(tiny(APE), places)]
    seconds = known[0].result["seconds"]
    assert minutes_left(known[1], known) == pytest.approx(seconds / 60)
    assert minutes_left(known[2], known) is None
    table = overview(known)
    assert re.search(r"laptop/copy-2/nope +0 done  1 missing +12 +\d+\.\d", table)
    assert re.search(r"laptop/copy-2/sinusoidal +0 missing +12 +\?", table)
    assert "1 of 3 done" in table
    assert "1 more of unknown cost" in table


def test_a_number_left_in_a_lock_is_nobody(places):
    """A worker that was killed leaves its process number, which is somebody else's by now."""
    with RunFolder.create(places.run(tiny()), tiny().config().to_json()):
        assert standing(tiny(), places).kind == "running"
    (places.run(tiny()) / ".lock").write_text(f"{os.getppid()}\n")
    assert standing(tiny(), places).kind == "stopped"


def test_a_run_that_is_being_written_is_not_set_aside(places):
    other = tiny(steps=13)
    with (
        RunFolder.create(places.run(other), other.config().to_json()),
        pytest.raises(UserError, match="is in use by process"),
    ):
        train_cell(tiny(), places, "cpu")
    assert RunFolder.open(places.run(other)).config["steps"] == 13


# --- The runner ---


def tiny_command(cell: Cell, places: Places) -> list[str]:
    """Trains a cell that is not in the matrix, by the same means."""
    program = f"""
        import sys, torch
        from pathlib import Path
        from prism.errors import Interrupted
        from prism.reproduce.cells import Cell, Model
        from prism.reproduce.runner import train_cell
        from prism.reproduce.status import Places
        torch.set_num_threads(1)
        cell = {cell!r}
        try:
            train_cell(cell, Places(Path({str(places.results)!r}), Path({str(places.runs)!r})), "cpu")
        except Interrupted as stop:
            sys.exit(128 + stop.signal)
    """
    return [sys.executable, "-c", textwrap.dedent(program)]


def tiny_runner(cells: list[Cell], places: Places, at_once: int, say: Callable[[str], None] = print) -> Runner:
    return Runner(cells, places, lambda cell: tiny_command(cell, places), at_once, say)


def test_the_runner_trains_what_is_missing_and_tells_what_failed(places, monkeypatch):
    monkeypatch.setattr("prism.reproduce.runner.SAVING", 0.0)
    impossible = tiny(APE, task="nonsense")
    train_cell(tiny(), places, "cpu")
    said: list[str] = []
    cells = [tiny(), tiny(seed=1)]
    runner = tiny_runner(cells, places, 2, said.append)
    assert [cell.name for cell in runner.waiting] == [tiny(seed=1).name]  # what is done is not done again
    runner.waiting.append(impossible)

    def known(cell: Cell, at: Places):
        return standing(cell if cell in cells else cells[0], at)

    monkeypatch.setattr("prism.reproduce.runner.standing", known)
    assert runner.run(5) is False
    assert standing(tiny(seed=1), places).kind == "done"
    text = "\n".join(said)
    assert re.search(r"done +laptop/copy-2/nope-seed1 +1: [\d.]+ +2: [\d.]+", text)
    assert re.search(r"FAILED +laptop/nonsense-2/sinusoidal-seed0 \(exit 1\): .*unknown task 'nonsense'", text)


def test_at_the_end_of_the_time_runs_are_saved_and_go_on_the_next_time(places, monkeypatch):
    cell = tiny(steps=1_000_000, **{"evaluation.every": 1_000_000, "evaluation.checkpoint_every": 1_000_000})
    said: list[str] = []
    over = 0.0  # the time is over once the run has got somewhere, however slow the machine

    def run_beyond(step: int) -> bool:
        nonlocal over

        def watch(runner: Runner) -> None:
            nonlocal over
            record = runner.timings(cell)
            over = 1e6 if record is not None and record["step"] > step else 0.0

        over = 0.0
        return Runner([cell], places, lambda cell: tiny_command(cell, places), 1, said.append, watch).run(100)

    real = time.monotonic
    clock = SimpleNamespace(monotonic=lambda: real() + over, sleep=time.sleep, strftime=time.strftime)
    monkeypatch.setattr("prism.reproduce.runner.time", clock)
    assert run_beyond(0) is True
    stopped = standing(cell, places)
    assert stopped.kind == "stopped"
    assert stopped.step > 0
    assert any(f"stopped   {cell.name} at step {stopped.step:,}" in line for line in said)
    assert run_beyond(stopped.step) is True
    assert standing(cell, places).step > stopped.step


def test_ctrl_c_stops_the_runner_like_the_deadline(places, tmp_path):
    program = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        from pathlib import Path
        from tests.test_reproduce import tiny, tiny_runner
        from prism.reproduce.status import Places
        cell = tiny(steps=10**6, **{{"evaluation.every": 10**6, "evaluation.checkpoint_every": 10**6}})
        print("ready", flush=True)
        tiny_runner([cell], Places(Path({str(places.results)!r}), Path({str(places.runs)!r})), 1).run(60)
    """)
    cell = tiny(steps=10**6, **{"evaluation.every": 10**6, "evaluation.checkpoint_every": 10**6})
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=pipe, text=True)
    deadline = time.monotonic() + 60
    while not (RunFolder.exists(places.run(cell)) and RunFolder.open(places.run(cell)).metrics()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert "stopping; once more to stop at once" in err
    assert f"stopped   {cell.name} at step" in out
    assert standing(cell, places).kind == "stopped"


# --- The page ---


@pytest.fixture
def small_matrix(monkeypatch):
    rows = (Row("paper", "addition", 2, (NOPE, APE), TINY), Row("laptop", "copy", 2, (NOPE,), TINY))
    cells = [cell for seed in (0, 1) for row in rows for cell in row.cells(seed)]
    monkeypatch.setattr(matrices, "matrix", lambda: cells)
    monkeypatch.setattr(prism.reproduce.page, "matrix", lambda: cells)
    return cells


def test_the_page_says_what_was_measured_and_what_is_missing(places, small_matrix):
    for cell in small_matrix[:4]:
        train_cell(cell, places, "cpu")
    written = draw_all(places.results)
    page = (places.results.parent / "RESULTS.md").read_text()
    assert [path.name for path in written] == [
        "RESULTS.md", "paper-addition-2.png", "paper-addition-2.pdf", "laptop-copy-2.png", "laptop-copy-2.pdf",
        "scan-lengths.png", "scan-lengths.pdf",
    ]
    results = [standing(small_matrix[place], places).result for place in (0, 3)]
    exact = [100 * one["final"]["test"]["2"]["exact"] for one in results]
    mean = f"{sum(exact) / 2:.1f}" + (f" ({min(exact):.1f} - {max(exact):.1f})" if exact[0] != exact[1] else "")
    row = re.search(r"^\| \*\*nope\*\*, 2 seeds, 12 steps \| (.*) \| (.*) \|$", page, re.M)
    assert row is not None
    assert row.group(2) == mean
    assert re.search(r"^\| \*\*sinusoidal\*\*, 1 seed, 12 steps \| [\d.]+ \([\d.]+ - [\d.]+\) \|", page, re.M)
    parts = {part for one in results for part in one["final"]["test"]["2"]["parts"]}
    assert all(f"| final, {part} alone | " in page for part in parts)
    assert "2 of the 6 cells" in page
    assert "- paper/addition-2/sinusoidal: seed 1" in page
    assert "- laptop/copy-2/nope: seed 1" in page
    assert draw_all(places.results) == written
    assert (places.results.parent / "RESULTS.md").read_text() == page


def test_the_lengths_of_scan_are_those_of_its_pairs():
    whole, outputs, inputs = lengths().values()
    for counts in (whole, outputs, inputs):
        assert {name: one.total() for name, one in counts.items()} == {"trained on": 16_990, "test": 3_920}
    assert (max(whole["trained on"]), min(whole["test"]), max(whole["test"])) == (80, 54, 107)
    assert sum(count for tokens, count in whole["test"].items() if tokens > 80) == 1_352
    assert max(inputs["test"]) == max(inputs["trained on"]) == 9
    total = {name: sum(tokens * count for tokens, count in one.items()) for name, one in whole.items()}
    for name, tokens in total.items():  # every token is left of the =, right of it, or the =
        parts = [sum(size * count for size, count in part[name].items()) for part in (outputs, inputs)]
        assert sum(parts) + whole[name].total() == tokens


def test_a_damaged_result_is_named(places, small_matrix):
    path = places.result(small_matrix[0])
    path.parent.mkdir(parents=True)
    path.write_text('{"config": 3}')
    with pytest.raises(UserError, match=f"{re.escape(str(path))} is not the result of a run"):
        draw_all(places.results)


# --- The command ---


def test_the_command_lists_and_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = prism_says(capsys, "reproduce", "--list", "--only", "paper/copy-10")
    assert (code, err) == (0, "")
    assert re.search(r"paper/copy-10/prism +0 missing  1 missing  2 missing +30,000 +\?", out)
    assert "0 of 6 done" in out
    for arguments, said in (
        (["--minutes", "0"], "--minutes must be a number above 0, got 0.0"),
        (["--minutes", "nan"], "--minutes must be a number above 0, got nan"),
        (["--minutes", "1", "--at-once", "0"], "--at-once must be at least 1, got 0"),
        (["--train", "paper/copy-10/prism"], "unknown cell 'paper/copy-10/prism'"),
        (["--list", "--only", "papers"], "no cell of the matrix matches 'papers'"),
    ):
        code, out, err = prism_says(capsys, "reproduce", *arguments)
        assert code == 2
        assert said in err
        assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
