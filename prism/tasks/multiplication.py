"""Multiplication, its chain of thought only: the product is laid out, never summed.

Numbers are written most significant digit first. The multiplier has one summand per digit: the digit, then
in brackets itself marked 1, then each digit to its right marked 0. So 1259 = 1*1000 + 2*100 + 5*10 + 9*1 is

    1*(1→1)(2→0)(5→0)(9→0)    1 with three digits to its right
    2*(2→1)(5→0)(9→0)
    5*(5→1)(9→0)
    9*(9→1)

>>> Multiplication().answer("675x1259=")
'675x[1*(1→1)(2→0)(5→0)(9→0)+2*(2→1)(5→0)(9→0)+5*(5→1)(9→0)+9*(9→1)].'

A digit 0 is treated like any other:

>>> Multiplication().answer("7x40=")
'7x[4*(4→1)(0→0)+0*(0→1)].'

Position coupling gives one number to a digit of the multiplier and to all that is written of it:

>>> from prism.hints import traced
>>> example = "675x12=675x[1*(1→1)(2→0)+2*(2→1)]."
>>> print(example, traced(Multiplication(), "coupling", example), sep="\\n")
675x12=675x[1*(1→1)(2→0)+2*(2→1)].
123012012300111111122222122222222-
"""

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.tasks.task import DIGITS, Example, Split, Task, draw_number

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen


@dataclass(frozen=True)
class Multiplication(Task):
    """Two numbers, then the first times the second broken up into its digits."""

    name = "multiplication"
    summary = "lay out a product digit by digit: 67x12=67x[1*(1→1)(2→0)+2*(2→1)]."
    length_means = "digits of each operand"
    training_length = 9
    digits = DIGITS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, *"x=[]*()→+.")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        return _example(rng, length, length)

    def training_example(self, rng: random.Random, max_length: int, split: Split = "train") -> Example:
        """The two digit counts are drawn independently."""
        return _example(rng, rng.randint(1, max_length), rng.randint(1, max_length))

    def sweep(self, max_length: int) -> tuple[int, ...]:
        """Up to a third further than three times the training length: a sequence grows with the length's square."""
        factors = (1 / 2, 1, 4 / 3, 5 / 3, 20 / 9, 10 / 3)  # of 9 digits: 4, 9, 12, 15, 20, 30
        return tuple(sorted({max(1, round(factor * max_length)) for factor in factors}))

    def answer(self, prompt: str) -> str:
        number = "([0-9]|[1-9][0-9]+)"
        form = "two numbers without leading zeros, 'x' between them and '=' at the end, such as '675x1259='"
        a, b = self.parse(f"{number}x{number}=", prompt, form)
        return _completion(a, b)

    @property
    def marks(self) -> tuple[str, ...]:
        """Punctuation, and the sign of multiplication."""
        return (*super().marks, "x")

    def coupling(self, seen: "Seen") -> "Tensor":
        summand = seen.before("+") + 1
        bracket = seen.count("(", since=("[", "+"))  # the summand's own digit stands before the first
        multiplier = summand + (bracket - 1).clamp_min(0)
        return multiplier.where(seen.after("["), seen.since("x", "=", "["))


def _example(rng: random.Random, digits_a: int, digits_b: int) -> Example:
    a, b = draw_number(rng, digits_a), draw_number(rng, digits_b)
    return Example(f"{a}x{b}=", _completion(a, b))


def _completion(a: str, b: str) -> str:
    zeros = [f"({digit}→0)" for digit in b]
    summands = [f"{digit}*({digit}→1){''.join(zeros[place + 1 :])}" for place, digit in enumerate(b)]
    return f"{a}x[{'+'.join(summands)}]."
