"""`prism bench`: it measures what it says, writes what it prints, and says nothing of a form that is wrong."""

import json
from functools import partial

import pytest
import torch

import prism.bench
from prism.bench.ceilings import Ceilings
from prism.bench.model import StepCase
from prism.bench.scan import AGREEMENT, Inputs, Size, _by, _kernels, forms_on
from prism.bench.timing import Timing, time_in_turn
from prism.errors import RunError, UserError
from prism.ops import histogram_adjoint
from prism.ops.histogram import histogram_scan, histogram_step, scan_step_by_step
from tests.tolerances import assert_close

CPU = torch.device("cpu")
TINY = Size("tiny", 2, 3, 4)


@pytest.fixture
def tiny_plan(monkeypatch):
    plan = prism.bench.Plan(
        scans=[TINY], growth={"time": [TINY, Size("", 2, 3, 8)]},
        steps=[StepCase("tiny step", "quick", "copy", "sinusoidal", 3)], runs=[], evaluations=[("quick", 12, 2)],
        generations=[("quick", 2, 3)],
    )
    monkeypatch.setattr(prism.bench, "cpu_plan", lambda: plan)
    monkeypatch.setattr(prism.bench, "all_tasks", lambda: {})


@pytest.mark.usefixtures("tiny_plan")
def test_what_is_written_is_what_is_printed(tmp_path, capsys):
    prism.bench.run(2, tmp_path / "new" / "folder", "cpu")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "new" / "folder" / "cpu.json").read_text())
    (scan,) = report["scans"]
    assert list(scan["forms"]) == ["adjoint", "reference"]
    assert all(len(one["seconds"]) == 2 and max(one["errors"]) < 2e-5 for one in scan["forms"].values())
    assert all(section in report for section in prism.bench.SECTIONS if section != "runs")
    assert f"{scan['ratios']['reference']:.1f} times as fast as reference" in printed
    assert [row["size"]["time"] for row in report["growth"]] == [4, 8]
    assert f"{1e3 * report['steps'][0]['median']:.3f} ms" in printed
    assert report["steps"][0]["tokens"] == 7
    assert report["evaluations"][0]["tokens"] == 26
    assert f"{report['generations'][0]['tokens_per_second']:.0f} tokens/s" in printed
    assert report["environment"]["torch"] == torch.__version__


@pytest.mark.usefixtures("tiny_plan")
def test_a_form_that_is_wrong_is_not_timed(tmp_path, capsys, monkeypatch):
    real = histogram_adjoint._move_adjoint

    def wrong(out, *arguments):
        real(out, *arguments)
        out.mul_(1.001)

    monkeypatch.setattr(histogram_adjoint, "_move_adjoint", wrong)
    with pytest.raises(RunError, match=r"the form 'adjoint' of the scan is wrong by .*no times are given"):
        prism.bench.run(1, tmp_path, "cpu")
    assert "ns a bin" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_repeats_below_one_are_refused(tmp_path):
    with pytest.raises(UserError, match="--repeats must be at least 1, got 0"):
        prism.bench.run(0, tmp_path, "cpu")


@pytest.mark.usefixtures("tiny_plan")
def test_a_section_alone_and_one_that_is_not_there(tmp_path):
    assert set(prism.bench.run(1, tmp_path, "cpu", ("generations",))) == {
        "environment", "device", "repeats", "generations"
    }
    with pytest.raises(UserError, match="unknown section 'scan'; did you mean 'scans'"):
        prism.bench.run(1, tmp_path, "cpu", ("scan",))


@pytest.mark.parametrize("name", ["kernels, 16-bit rows", "kernels, float32", "adjoint", "reference"])
def test_every_form_gives_what_float64_gives(name):
    """The kernels by Triton's interpreter here."""
    pytest.importorskip("triton")
    makes = {**forms_on(CPU), "kernels, 16-bit rows": _kernels, "kernels, float32": _by("triton")}
    inputs = Inputs(Size("", 2, 3, 5), torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    exact = inputs.exact().by(partial(histogram_scan, method="reference"))
    form = makes[name](inputs)
    for found, expected in zip(form.found(form.call()), exact, strict=True):
        assert found.shape == expected.shape
        assert_close(found, expected, tolerance=AGREEMENT[torch.float16 if "16-bit" in name else torch.float32])


def test_the_loop_that_is_compiled_is_the_reference():
    inputs = Inputs(TINY, CPU)
    looped = inputs.by(partial(scan_step_by_step, step=lambda *given: histogram_step(*given)))
    for found, expected in zip(looped, inputs.by(partial(histogram_scan, method="reference")), strict=True):
        assert_close(found, expected)


def test_floors_are_the_slower_of_arithmetic_and_memory():
    quick_memory = Ceilings(1e15, 4e12, 1.0, 1.0).scan_floors(10**12)
    assert quick_memory == {"forward": 0.5, "backward": 0.5, "both": 1.0}
    slow_memory = Ceilings(4e12, 1e15, 1.0, 1.0).scan_floors(10**12)
    assert slow_memory == {"forward": 0.5, "backward": 1.0, "both": 1.5}


def test_calls_are_timed_in_turn_after_warming_up():
    heard = []
    found = time_in_turn({name: partial(heard.append, name) for name in "ab"}, 2, CPU)
    assert "".join(heard) == "aabb" + "abab"
    assert [len(timing.seconds) for timing in found.values()] == [2, 2]
    assert str(Timing([0.002, 0.001, 0.004])).split() == ["2.000", "ms", "(1.000", "-", "4.000)"]
