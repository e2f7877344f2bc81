"""What Triton's compiler makes of the kernels for an H200: registers, spills, instructions a bin. No GPU is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
from prism.ops.histogram_triton import layout

ROOT = Path(__file__).parent.parent
# Kernel, size, and what may be spent a bin in the loop: instructions, of them special functions. Floors are 2 special
# functions, and 8.5 instructions forward in hand-written CUDA; the loop backward holds the first step's own path too.
SPENT = [
    ("scan_forward", 171, 14.5, 2.2), ("scan_backward", 171, 39.0, 2.2),
    ("scan_forward", 577, 16.5, 2.2), ("scan_backward", 577, 43.5, 2.2),
]
KERNELS = {
    "scan_forward", "scan_backward", "_scan_rows", "_forward", "_backward", "_backward_rows", "_backward_keys",
    "_position_forward", "_position_backward",
}


@pytest.fixture(scope="module")
def compiled():
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile_for_sm90"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.xdist_group("compiled")
def test_no_kernel_spills(compiled):
    assert {one["name"] for one in compiled} == KERNELS
    assert {(one["name"], one["case"]): one["stack"] for one in compiled if one["stack"] or one["local"]} == {}


@pytest.mark.xdist_group("compiled")
@pytest.mark.parametrize(("name", "bins", "instructions", "special"), SPENT)
def test_a_bin_costs_no_more_than_it_must(compiled, name, bins, instructions, special):
    (found,) = [one for one in compiled if (one["name"], one["case"]) == (name, f"scan of {bins} bins")]
    per_lane = layout(bins, half=True).per_lane
    assert found["loop"] / per_lane <= instructions
    assert found["special"] / per_lane <= special
    assert found["registers"] <= 168  # three warps or more for each scheduler
