"""The matrix: every run behind a figure or a table, in order of what it is worth.

Models are presets with the changes that make them; a new row of an ablation is a line here.
"""

import difflib
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from prism.compare.terms import contenders
from prism.config import Preset
from prism.errors import UserError
from prism.reproduce.cells import Cell, Changes, Model, Row
from prism.tasks import find_task

SEEDS = (0, 1, 2)


def _steps(steps: int, *lengths: int, **more: Any) -> dict[str, Any]:
    return {"steps": steps, "evaluation.lengths": lengths, **more}


# --- The paper's figures, with its settings; headline rows first ---

PRISM, APE = Model("prism", "paper"), Model("sinusoidal", "paper", "sinusoidal")
EVERY = {"evaluation.every": 5_000, "evaluation.checkpoint_every": 5_000}

HEADLINES = (
    Row("paper", "copy", 10, (PRISM, APE), _steps(30_000, 5, 10, 15, 20, 40, 100, 200, 400, **EVERY)),
    Row("paper", "addition", 10, (PRISM, APE), _steps(100_000, 5, 10, 12, 15, 20, 30, 40, 60, **EVERY)),
    Row("paper", "reverse", 40, (PRISM, APE), _steps(80_000, 20, 40, 60, 80, 100, 150, 200, 400, **EVERY)),
)
OTHERS = (
    Row("paper", "copy", 40, (PRISM, APE), _steps(60_000, 20, 40, 60, 80, 120, 200, 400, **EVERY)),
    Row("paper", "dyn_str_cpy", 10, (PRISM, APE), _steps(60_000, 5, 10, 15, 20, 30, 50, 100, 150, **EVERY)),
    Row("paper", "dyn_str_cpy", 5, (PRISM,), _steps(60_000, 3, 5, 8, 10, 15, 20, 30, 50, **EVERY)),
    Row("paper", "odds_first", 40, (PRISM, APE), _steps(80_000, 20, 40, 60, 80, 120, 200, 400, **EVERY)),
    Row("paper", "stack", 40, (PRISM, APE), _steps(80_000, 20, 40, 60, 80, 100, 120, 200, **EVERY)),
    Row("paper", "scan_cot", 80, (PRISM, APE), _steps(40_000, **EVERY)),
    Row("paper", "reverse", 10, (PRISM, APE), _steps(40_000, 5, 10, 15, 20, 40, 100, **EVERY)),
    Row("paper", "multiplication", 9, (PRISM, APE), _steps(100_000, 3, 5, 7, 9, 11, 13, 15, **EVERY)),
)

# --- The paper's own ablations, and those it speaks of ---

ABLATIONS = (
    Row("ablations", "reverse", 40, (
        Model("no-copy", "paper", changes={"positions.copy_every": 0}),
        Model("copy-trained-key", "paper", changes={"positions.copy_key": "trained"}),
    ), HEADLINES[2].changes),
    Row("ablations", "addition", 10, (
        Model("expected-position", "paper", changes={"positions.superposition": "expected"}),
        Model("gamma-near-1", "paper", changes={"positions.gamma_start": 1.01}),
        Model("recurrence-penalty", "paper", changes={"positions.recurrence": "penalty"}),
        Model("recurrence-normalised", "paper", changes={"positions.recurrence": "normalised"}),
        Model("recurrence-free", "paper", changes={"positions.recurrence": "free"}),
        Model("reset-0.047", "paper", changes={"positions.reset_start": 0.047}),
    ), HEADLINES[1].changes),
)

# --- At a laptop's size: what the quick preset hangs on, and which gates a task asks for ---

FAR = {"evaluation.lengths": (10, 100, 500, 1_000, 2_000), "evaluation.final_examples": 50}
COPY = Row("laptop", "copy", 10, (  # the first and the last are the quickstart's
    Model("local", "quick"),
    Model("local-far", "quick", changes={**FAR, "evaluation.every": 1_200}),  # the same weights, tested further
    Model("gru", "quick", changes={"positions.gates": "gru"}),
    Model("landmark", "quick", changes={"positions.gates": "landmark"}),
    Model("gamma-2", "quick", changes={"positions.gamma_start": 2.0}),
    Model("reset-half", "quick", changes={"positions.reset_start": 0.5}),
    Model("rate-1e-3", "quick", changes={"optimizer.rate": 1e-3}),
    Model("sinusoidal-shifts", "quick", "sinusoidal", {"positions.shift": 400}),
    Model("sinusoidal", "quick", "sinusoidal"),
), {"evaluation.lengths": (10, 20, 50, 100, 200), "evaluation.examples": 20})
LANDMARK = {"positions.gates": "landmark"}
SHARP = {"model.start_token": True, "positions.alpha_start": 10.0, "optimizer.rate": 1e-3}
GATES = (
    Model("local", "quick"),
    Model("landmark", "quick", changes=LANDMARK),
    Model("landmark-start-sharp", "quick", changes={**LANDMARK, **SHARP}),
    Model("gru", "quick", changes={"positions.gates": "gru"}),
    Model("sinusoidal", "quick", "sinusoidal"),
)
REVERSE = (
    *GATES,
    Model("landmark-start", "quick", changes={**LANDMARK, "model.start_token": True}),
    Model("landmark-sharp", "quick", changes={**LANDMARK, **SHARP, "model.start_token": False}),
    Model("landmark-start-sharp-no-copy", "quick", changes={**LANDMARK, **SHARP, "positions.copy_every": 0}),
    Model("local-start-sharp", "quick", changes=SHARP),
    Model("gru-start-sharp", "quick", changes={"positions.gates": "gru", **SHARP}),
    Model("landmark-positions-only", "quick", changes={**LANDMARK, "positions.content": False}),
)
LAPTOP = {"evaluation.examples": 20, "evaluation.every": 500}
TASKS = (
    Row("laptop", "reverse", 10, REVERSE, _steps(4_000, 10, 15, 20, 30, 40, 80, **LAPTOP)),
    Row("laptop", "odds_first", 10, GATES, _steps(4_000, 10, 15, 20, 30, 40, 80, **LAPTOP)),
    Row("laptop", "stack", 10, GATES, _steps(4_000, 10, 15, 20, 30, 40, 80, **LAPTOP)),
    Row("laptop", "dyn_str_cpy", 10, GATES, _steps(4_000, 10, 15, 20, 30, 40, 80, **LAPTOP)),
    Row("laptop", "addition", 4, GATES, _steps(4_000, 4, 5, 6, 8, 10, 15, **LAPTOP)),
)

# --- The arena: other positional encodings on equal terms (prism/compare/terms.py) ---

MAIN = ("prism", "nope", "sinusoidal_shifted", "rope", "alibi", "t5", "kerple", "fire", "randomized_sinusoidal", "cope",
        "forgetting", "stick_breaking", "path", "hard_alibi", "relative")
RECURRENT = ("lstm", "stack_rnn", "tape_rnn")


@cache
def arena() -> tuple[Row, ...]:
    """At the card's size what everybody asks for, on the three headline tasks; at a laptop's size all there are."""
    ends = {"evaluation.every": 10_000, "evaluation.checkpoint_every": 5_000}
    small = {"evaluation.examples": 20, "evaluation.every": 1_000}
    return (
        _contest("arena", "copy", 10, "best", MAIN, (), _steps(20_000, 10, 15, 20, 40, 100, 200, **ends)),
        _contest("arena", "reverse", 40, "best", MAIN, (), _steps(60_000, 40, 60, 80, 100, 150, 200, **ends)),
        _contest("arena", "addition", 10, "best", (*MAIN, "abacus", "position_coupling"), (),
                 _steps(40_000, 10, 12, 15, 20, 30, 40, **ends)),
        _contest("arena-quick", "copy", 10, "quick", (*MAIN, "all"), RECURRENT,
                 _steps(4_000, 5, 10, 15, 20, 40, 100, **small)),
        _contest("arena-quick", "reverse", 10, "quick", (*MAIN, "all"), RECURRENT,
                 _steps(4_000, 5, 10, 15, 20, 40, **small)),
        _contest("arena-quick", "addition", 4, "quick", (*MAIN, "abacus", "position_coupling"), (),
                 _steps(4_000, 4, 5, 6, 8, 10, **small)),
    )


def _contest(part: str, task: str, max_length: int, given: Preset, encodings: tuple[str, ...],
             architectures: tuple[str, ...], changes: Changes) -> Row:
    lengths = changes["evaluation.lengths"]
    models = contenders(encodings, architectures, given, find_task(task)(), max_length, lengths)
    return Row(part, task, max_length, tuple(models), changes)


def matrix() -> list[Cell]:
    """Every cell, the most valuable first: one seed of every figure, then three of the headlines, then the rest."""
    cells = [cell for row in (*HEADLINES, *OTHERS, *ABLATIONS) for cell in row.cells(0)]
    cells += [cell for rows in (HEADLINES, OTHERS, ABLATIONS) for seed in SEEDS[1:] for row in rows
              for cell in row.cells(seed)]
    cells += [cell for seed in SEEDS for row in (COPY, *TASKS, *arena()) for cell in row.cells(seed)]
    return cells


def chosen(patterns: tuple[str, ...]) -> list[Cell]:
    """The cells whose names match one of the patterns, or begin with one; all, where there is no pattern."""
    cells = matrix()
    if not patterns:
        return cells
    for pattern in patterns:
        if not any(_matches(cell, pattern) for cell in cells):
            raise UserError(f"no cell of the matrix matches {pattern!r}; prism reproduce --list shows them all")
    return [cell for cell in cells if any(_matches(cell, pattern) for pattern in patterns)]


def find_cell(name: str) -> Cell:
    """The cell of this name."""
    cells = {cell.name: cell for cell in matrix()}
    if name not in cells:
        near = difflib.get_close_matches(name, cells, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown cell {name!r}; {hint}prism reproduce --list shows the rows: PART/TASK-LENGTH/MODEL, "
                        "then -seed0, -seed1 or -seed2")
    return cells[name]


def _matches(cell: Cell, pattern: str) -> bool:
    return fnmatchcase(cell.name, pattern) or cell.name.startswith(pattern)
