"""Addition with its chain of thought: a step for every column, then the sum.

Numbers are written least significant digit first, so this is 928 + 30 = 958:

    829+03=8008,2305,9009→859.

    8 0 0 8    first column: 8 + 0 makes 8, nothing to carry
    2 3 0 5    a step is: digit of a, digit of b, outgoing carry, digit of the sum
    9 0 0 9    a digit that is not there counts as 0
    859        the sum, in the same order as the operands

>>> Addition().answer("829+03=")
'8008,2305,9009→859.'

A carry out of the last column is one more digit of the sum and has no step of its own:

>>> Addition().answer("99+1=")
'9110,9010→001.'

Position coupling gives one number to all that stands for a column, its step included:

>>> from prism.hints import traced
>>> example = "829+03=8008,2305,9009→859."
>>> print(example, traced(Addition(), "coupling", example), sep="\\n")
829+03=8008,2305,9009→859.
1230120111112222233330123-
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prism.tasks.task import DIGITS, Example, Split, Task, draw_number

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen


@dataclass(frozen=True)
class Addition(Task):
    """Two numbers, then the columns of their addition and their sum."""

    name = "addition"
    summary = "add two numbers column by column: 829+03=8008,2305,9009→859."
    length_means = "digits of the longer operand"
    training_length = 10
    digits = DIGITS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, "+", "=", ",", "→", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        return _example(rng, length, length)

    def training_example(self, rng: random.Random, max_length: int, split: Split = "train") -> Example:
        """The two digit counts are drawn independently, so the longer operand is usually long."""
        return _example(rng, rng.randint(1, max_length), rng.randint(1, max_length))

    def answer(self, prompt: str) -> str:
        number = "([0-9]|[0-9]+[1-9])"
        form = ("two numbers joined by '+' and '=', least significant digit first, so that no number of two digits "
                "or more ends with a 0, such as '829+03='")
        a, b = self.parse(rf"{number}\+{number}=", prompt, form)
        return _completion(a, b)

    def parts(self, completion: str) -> Mapping[str, slice]:
        """The arrow ends the chain of thought; the end token belongs to the sum."""
        arrow = completion.index("→")
        return {"chain of thought": slice(0, arrow + 1), "final sum": slice(arrow + 1, len(completion))}

    def coupling(self, seen: "Seen") -> "Tensor":
        column = seen.before(",") + 1
        thinking = seen.after("=") & ~seen.at("→") & ~seen.after("→")
        return column.where(thinking, seen.since("+", "=", "→"))


def _example(rng: random.Random, digits_a: int, digits_b: int) -> Example:
    a, b = draw_number(rng, digits_a)[::-1], draw_number(rng, digits_b)[::-1]
    return Example(f"{a}+{b}=", _completion(a, b))


def _step(carry: str, a: str, b: str) -> str:
    total = int(carry) + int(a) + int(b)
    return f"{a}{b}{total // 10}{total % 10}"


# All 200 columns there are: training writes some hundred thousand steps a second.
_STEPS = {(carry, a, b): _step(carry, a, b) for carry in "01" for a in DIGITS for b in DIGITS}


def _completion(a: str, b: str) -> str:
    width = max(len(a), len(b))
    steps, carry = [], "0"
    for column in zip(a.ljust(width, "0"), b.ljust(width, "0"), strict=True):
        step = _STEPS[carry, *column]
        steps.append(step)
        carry = step[2]
    total = "".join([step[3] for step in steps]) + carry.strip("0")
    return f"{','.join(steps)}→{total}."
