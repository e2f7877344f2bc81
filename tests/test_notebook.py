"""The notebook runs from top to bottom as it is written, asserts what it says, and has its outputs with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def cells(notebook: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.fixture
def _as_the_reader_has_it(monkeypatch):
    """No window opens, and the folder is the notebook's own."""
    import matplotlib

    before = matplotlib.get_backend()
    matplotlib.use("Agg")
    monkeypatch.chdir(EXAMPLES)
    yield
    import matplotlib.pyplot as plt

    plt.close("all")
    matplotlib.use(before)


@pytest.mark.usefixtures("_as_the_reader_has_it")
def test_the_program_counter_is_what_the_notebook_says(capsys):
    """All of it, training included: that takes seconds."""
    name: dict[str, Any] = {"__name__": "__main__"}
    code = cells(EXAMPLES / "program_counter.ipynb", "code")
    for number, cell in enumerate(code, 1):
        exec(compile(source(cell), f"program_counter.ipynb, cell {number}", "exec"), name)
    assert name["answer"] == "31415926535897932384626433832795028841971693993751."
    assert name["scores"][50] > 0.8
    said = capsys.readouterr().out
    assert "digit 9, a 8" in said
    claims = [line for cell in code for line in source(cell).splitlines() if line.strip().startswith("assert ")]
    assert len(claims) >= 8


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_small_and_has_its_outputs(notebook):
    assert notebook.stat().st_size < 400_000
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    drawing = [cell for cell in code if "plt.subplots" in source(cell)]
    assert len(pictures) == len(drawing) > 3
    printing = [cell for cell in code if re.search(r"^ *print\(", source(cell), re.M)]
    assert all(any(output["output_type"] == "stream" for output in cell["outputs"]) for cell in printing)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.name)
def test_what_a_notebook_links_to_is_there_and_it_names_no_machine(notebook):
    text = "\n".join(source(cell) for cell in cells(notebook, "markdown"))
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert links
    for link in links:
        assert "://" in link or (EXAMPLES / link).exists(), link
    assert not re.search(r"/(home|root|work|tmp|Users)/", notebook.read_text())
