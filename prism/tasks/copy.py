"""Copy: say it again.

>>> Copy().answer("8349216=")
'8349216.'

Position coupling gives a symbol and its copy one number:

>>> from prism.hints import traced
>>> traced(Copy(), "coupling", "8349216=8349216.")
'123456701234567-'
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.tasks.task import DIGITS, Example, Split, Task, draw_symbols

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen


@dataclass(frozen=True)
class Copy(Task):
    """Digits, then the same digits."""

    name = "copy"
    summary = "repeat a string of digits: 8349216=8349216."
    length_means = "symbols to copy"
    training_length = 10
    digits = DIGITS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        digits = draw_symbols(rng, length)
        return Example(f"{digits}=", f"{digits}.")

    def answer(self, prompt: str) -> str:
        (digits,) = self.parse("([0-9]+)=", prompt, "digits and '=', such as '8349216='")
        return f"{digits}."

    def coupling(self, seen: "Seen") -> "Tensor":
        return seen.since("=")
