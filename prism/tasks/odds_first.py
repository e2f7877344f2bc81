"""Odds first: the symbols at odd positions, then those at even positions, counting from 0.

    position   0 1 2 3 4 5
    symbol     0 1 2 3 4 5    odd: 1 3 5    even: 0 2 4

>>> OddsFirst().answer("012345=")
'135024.'

The paper's words count from 1; its example, and the code of the benchmark it follows, count from 0 as here.
That benchmark is binary, which is one option away:

>>> OddsFirst(symbols=2).answer("00110101=")
'01110100.'

Position coupling gives a symbol and its copy one number:

>>> from prism.hints import traced
>>> traced(OddsFirst(), "coupling", "012345=135024.")
'1234560246135-'
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.settings import setting
from prism.tasks.task import DIGITS, Example, Split, Task, draw_symbols

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen


@dataclass(frozen=True)
class OddsFirst(Task):
    """Digits below `symbols`, then the odd positions followed by the even ones."""

    name = "odds_first"
    summary = "symbols at odd positions, then at even ones: 012345=135024."
    length_means = "symbols to rearrange"
    training_length = 40
    digits = DIGITS

    symbols: int = setting(10, low=2, high=10)

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS[: self.symbols], "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        text = draw_symbols(rng, length, DIGITS[: self.symbols])
        return Example(f"{text}=", f"{text[1::2]}{text[0::2]}.")

    def answer(self, prompt: str) -> str:
        last = self.symbols - 1
        (text,) = self.parse(f"([0-{last}]+)=", prompt, f"digits from 0 to {last} and '=', such as '0110='")
        return f"{text[1::2]}{text[0::2]}."

    def coupling(self, seen: "Seen") -> "Tensor":
        written = seen.since("=")
        odd = (seen.place - written - 1) // 2  # symbols at odd positions: half of those before `=`
        source = (2 * written).where(written <= odd, 2 * (written - odd) - 1)
        return source.where(seen.after("="), written)
