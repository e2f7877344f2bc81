"""What others have said of these tasks, to stand beside what we measured. Nothing here was run by us.

The paper has plots without numbers, so its claims are words. The notebook is its author's later public one, a larger
and changed model, one hand-picked checkpoint a task. The peers' numbers are from their papers, and their tasks are
close to these, not the same.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claims:
    """Beside one task at one training length."""

    paper: str
    notebook: str = ""
    peers: str = ""


CLAIMS: dict[tuple[str, int], Claims] = {
    ("copy", 10): Claims(
        "copies 100 tokens \"after seeing 10-token examples\" (discussion); a figure without numbers",
        peers="T5 bias 56 / 0 %, ALiBi 23 / 0 %, NoPE 17 / 0 % at 30 / 40 after <= 20; Hard-ALiBi >= 95 % at 1,000 "
        "after 50",
    ),
    ("copy", 40): Claims("a figure without numbers", peers="Hard-ALiBi >= 95 % at 1,000 after 50"),
    ("addition", 10): Claims(
        "from 10 digits \"to over 30\" (introduction), to 20 (discussion); a figure without numbers",
        "97 % at 60, 78 % at 80, 28 % at 100 digits, with a special symbol for missing digits, which is easier",
        "with a scratchpad, NoPE and T5 bias 15 to 18 % at 9 to 16 after <= 8; with index hints, Abacus up to 99 % at "
        "100 after 20",
    ),
    ("reverse", 40): Claims(
        "a figure without numbers; attention shown at 150",
        "trained <= 30: 100 % at 60, 87 % at 100",
        "T5 bias 85 / 31 / 0 %, NoPE 80 / 24 / 0 % at 24 / 26 / 40 after <= 20",
    ),
    ("reverse", 10): Claims("reverses 100 tokens \"after seeing 10-token examples\" (discussion); no figure"),
    ("odds_first", 40): Claims("a figure without numbers", "trained <= 30: 100 % at 60, 96 % at 80, 92 % at 120"),
    ("stack", 40): Claims(
        "a figure without numbers", "trained <= 30: 90 to 96 % at 60, 57 to 88 % at 80, 24 to 56 % at 100"
    ),
    ("dyn_str_cpy", 5): Claims("a figure without numbers, PRISM alone"),
    ("dyn_str_cpy", 10): Claims("a figure without numbers", "46 % at 30; trained <= 30: 99 % at 250"),
    ("multiplication", 9): Claims(
        "from 10 digits \"to over 30\" (introduction), though its figure trains to 9; no numbers", "33 % at 17 x 17"
    ),
    ("scan_cot", 80): Claims(
        "a figure without numbers", "84 to 90 %",
        "actions only, no chain of thought: NoPE and T5 bias 77 to 84 %, ALiBi 39 to 46, RoPE 21 to 33, APE 5 to 7",
    ),
}
