"""Reverse: say it backwards.

>>> Reverse().answer("8349216=")
'6129438.'

Position coupling gives a symbol and its copy one number, so they are counted up and then down:

>>> from prism.hints import traced
>>> traced(Reverse(), "coupling", "8349216=6129438.")
'123456787654321-'
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.tasks.task import DIGITS, Example, Split, Task, draw_symbols

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen


@dataclass(frozen=True)
class Reverse(Task):
    """Digits, then the same digits from last to first."""

    name = "reverse"
    summary = "write a string of digits backwards: 8349216=6129438."
    length_means = "symbols to reverse"
    training_length = 40
    digits = DIGITS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        digits = draw_symbols(rng, length)
        return Example(f"{digits}=", f"{digits[::-1]}.")

    def answer(self, prompt: str) -> str:
        (digits,) = self.parse("([0-9]+)=", prompt, "digits and '=', such as '8349216='")
        return f"{digits[::-1]}."

    def coupling(self, seen: "Seen") -> "Tensor":
        return seen.place - 2 * seen.since("=") * seen.after("=")
