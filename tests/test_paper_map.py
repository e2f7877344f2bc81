"""PAPER.md says where every piece of the paper is in the code: each name, label, value and command in it is real."""

import ast
import dataclasses
import importlib
import re
import shlex
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from prism.cli import VERBS, parse_train

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "PAPER.md").read_text()

# Every label of an equation, algorithm, task, table and figure in the paper's LaTeX source, in its order; two
# algorithms' labels there have U+2010 for the hyphen.
LABELS = (
    "tab:related_extrap_part1", "tab:related_extrap_part2",
    "eq:cont_distance", "eq:dynamic_origin", "eq:pmf_no_reset", "eq:pmf_with_reset", "eq:path_indicator",
    "eq:rel-dist-pmf-path", "eq:similarity", "eq:alpha-coeff", "eq:hybrid-score",
    "tab:tasks-1", "task:cot-addition", "tab:tasks-2",
    "fig:addition", "fig:dynstrcpy5", "fig:dynstrcpy10", "fig:scan", "fig:reverse40", "fig:tokencopy10",
    "fig:tokencopy40", "fig:oddsfirst", "fig:multiplication", "fig:stackmanip",
    "eq:superposition",
    "fig:init-gate-probs", "fig:trained-gate-probs", "fig:tokencopy-init", "fig:tokencopy-trained", "fig:reverse",
    "fig:addition-ood", "fig:reverse-queries", "fig:dm-randomized-pe", "fig:reverse-mask", "fig:reverse-mask-ood",
    "alg:histogram", "alg:superposition", "alg:abs-ln-optim", "alg:compute-position-scores",
    "fig:scan-full-seq-lens", "fig:scan-output-only", "fig:scan-input-only",
)  # fmt: skip

CODE = sorted(set(re.findall(r"\b(prism/[\w/]+\.py)::([\w.]*\w)", TEXT)))
TESTS = sorted(set(re.findall(r"\b(tests/\w+\.py)::(\w+)", TEXT)))
VALUES = sorted(set(re.findall(r"`(prism/[\w/]+\.py)::(\w+)\.(\w+)` = `([^`]*)`", TEXT)))
COMMANDS = sorted(set(re.findall(r"`(prism \w[^`]*)`", TEXT)))


@cache
def module(path: str) -> ModuleType:
    return importlib.import_module(path.removesuffix(".py").replace("/", "."))


@cache
def functions_of(path: str) -> set[str]:
    """The names of a file's test functions, without importing it."""
    return {node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)}


def has(found: object, names: list[str]) -> bool:
    """Whether there is a `found.a.b...`; a dataclass's field counts even if it has no default."""
    for name in names:
        if not hasattr(found, name):
            return name in getattr(found, "__dataclass_fields__", {}) and name == names[-1]
        found = getattr(found, name)
    return True


def test_there_is_something_to_check():
    assert len(CODE) > 50
    assert len(TESTS) > 40
    assert len(VALUES) > 30
    assert len(COMMANDS) > 10


@pytest.mark.parametrize(("path", "name"), CODE, ids=str)
def test_what_the_map_points_to_is_there(path, name):
    assert (ROOT / path).is_file()
    assert has(module(path), name.split("."))


@pytest.mark.parametrize(("path", "name"), TESTS, ids=str)
def test_the_tests_it_names_are_tests(path, name):
    assert name.startswith("test_")
    assert name in functions_of(path)


@pytest.mark.parametrize(("path", "name", "field", "value"), VALUES, ids=str)
def test_the_values_it_quotes_are_the_defaults(path, name, field, value):
    fields = {one.name: one for one in dataclasses.fields(getattr(module(path), name))}
    default, quoted = fields[field].default, ast.literal_eval(value)
    assert default == quoted
    assert type(default) is type(quoted)


def test_no_name_escapes_the_checks():
    """A path with a name is code of the package or a test; a quoted value stands behind one of its settings."""
    checked = {f"{path}::{name}" for path, name in CODE + TESTS}
    assert set(re.findall(r"[\w./-]+::[\w.]*\w", TEXT)) == checked
    assert len(re.findall(r"` = `", TEXT)) == len(re.findall(r"`prism/[\w/]+\.py::\w+\.\w+` = `[^`]*`", TEXT))


@pytest.mark.parametrize("label", LABELS)
def test_every_label_of_the_paper_is_on_the_map(label):
    assert f"`{label}`" in TEXT


def test_the_map_knows_no_label_the_paper_lacks():
    assert set(re.findall(r"`((?:eq|alg|fig|tab|task):[^`]*)`", TEXT)) == set(LABELS)


def test_what_is_owed_has_an_issue():
    owed = re.findall(r"not yet.{0,20}", TEXT, re.IGNORECASE)
    assert owed
    assert [one for one in owed if not re.match(r'not yet, issue (\d+|N")', one, re.IGNORECASE)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_parses(command):
    _, verb, *arguments = shlex.split(command)
    assert verb in VERBS
    if verb == "train":
        chosen = parse_train(arguments)
        assert chosen.config.preset == "paper"
        assert chosen.config.task.name == arguments[0]
