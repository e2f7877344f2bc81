"""The README says what is so: its tree, its links, its commands and its code."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from prism.cli import VERBS
from prism.figures import draw_runs
from prism.reproduce.page import draw_all

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text() if README.exists() else ""
UNFINISHED = re.findall(r"@@\w+@@", TEXT)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.M | re.S)

pytestmark = pytest.mark.skipif(not TEXT, reason="no README yet")
finished = pytest.mark.skipif(bool(UNFINISHED), reason=f"the README still lacks {', '.join(UNFINISHED)}")


def tracked(*paths: str) -> list[str]:
    """The files of the repository, by git; without git, all there are."""
    if shutil.which("git") and (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "ls-files", "--", *paths]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [file for path in paths for file in [ROOT / path, *(ROOT / path).rglob("*")] if file.is_file()]
    return [str(file.relative_to(ROOT)) for file in found if "__pycache__" not in file.parts]


def tree() -> set[str]:
    """The paths of the tree block: a name a line, deeper ones indented, folders with a slash."""
    (block,) = [body for kind, body in BLOCKS if not kind and re.search(r"\bprism/\s", body)]
    paths, above = set(), []
    for line in block.splitlines():
        plain = re.sub("[│├└─]", " ", line)
        if not plain.strip() or plain.startswith(12 * " "):
            continue  # nothing, or a description that goes on
        depth, name = len(plain) - len(plain.lstrip()), plain.split()[0]
        above = [(at, folder) for at, folder in above if at < depth]
        path = "".join(folder for _, folder in above) + name
        paths.add(path.rstrip("/"))
        if name.endswith("/"):
            above.append((depth, name))
    return paths


def test_a_committed_readme_is_finished():
    if tracked("README.md"):
        assert not UNFINISHED


@finished
def test_what_the_tree_names_exists():
    named = tree()
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@finished
def test_the_tree_names_all_of_the_package():
    package = {"/".join(Path(path).parts[:2]) for path in tracked("prism")}
    assert len(package) > 10
    assert sorted(package - tree()) == []


@finished
def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#\s]+)", TEXT)
    assert links
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


@finished
def test_the_commands_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    indented, inline = re.findall(r"^    (.*)", TEXT, re.M), re.findall(r"`([^`\n]+)`", TEXT)
    code = "\n".join([body for _, body in BLOCKS] + indented + inline)
    made, verbs = set(re.findall(r"\bmake ([a-z]+)", code)), set(re.findall(r"^ *prism ([a-z]+)", code, re.M))
    assert {"quickstart", "test"} <= made <= targets
    assert {"quickstart", "train", "evaluate", "figures", "generate"} <= verbs <= set(VERBS)


@finished
def test_the_scores_are_the_recorded_ones(tmp_path):
    kept = ROOT / "results" / "laptop" / "copy-10"
    runs = [path for name in ("local", "sinusoidal") for path in sorted(kept.glob(f"{name}-seed?.json"))]
    (drawing,) = draw_runs(runs, tmp_path)
    assert drawing.table in TEXT
    rows = dict(re.findall(r"^(\w+, seed \d)(.*)", drawing.table, re.M))
    for encoding in ("prism", "sinusoidal"):  # what the quickstart printed is seed 0's row of the same runs
        (printed,) = re.findall(rf"^{encoding}  (.*)", TEXT, re.M)
        assert printed.split() == rows[f"{encoding}, seed 0"].split()


def test_the_results_page_is_made_from_the_results(tmp_path):
    shutil.copytree(ROOT / "results", tmp_path / "results", ignore=shutil.ignore_patterns("figures"))
    draw_all(tmp_path / "results")
    assert (tmp_path / "RESULTS.md").read_text() == (ROOT / "RESULTS.md").read_text()


@finished
def test_the_speeds_are_the_recorded_ones():
    recorded = json.loads((ROOT / "results" / "bench" / "cpu.json").read_text())
    quoted = re.findall(r"adjoint: ([\d.]+) times as fast as reference", TEXT)
    assert quoted == [f"{row['ratios']['reference']:.1f}" for row in recorded["scans"]]
    for step in recorded["steps"]:
        assert re.search(rf"{re.escape(step['case']['name'])} +{1e3 * step['median']:.3f} ms", TEXT)


def test_the_code_runs_as_it_is_written():
    blocks = [body for kind, body in BLOCKS if kind == "python"]
    assert blocks
    for body in blocks:
        exec(compile(body, "README.md", "exec"), {"__name__": "readme"})
