"""Reverse: say it backwards.

>>> Reverse().answer("8349216=")
'6129438.'
"""

import random
from dataclasses import dataclass

from prism.tasks.task import DIGITS, Example, Split, Task, draw_symbols


@dataclass(frozen=True)
class Reverse(Task):
    """Digits, then the same digits from last to first."""

    name = "reverse"
    summary = "write a string of digits backwards: 8349216=6129438."
    length_means = "symbols to reverse"
    training_length = 40

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        digits = draw_symbols(rng, length)
        return Example(f"{digits}=", f"{digits[::-1]}.")

    def answer(self, prompt: str) -> str:
        (digits,) = self.parse("([0-9]+)=", prompt, "digits and '=', such as '8349216='")
        return f"{digits[::-1]}."
