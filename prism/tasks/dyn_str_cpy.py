"""Dynamic string copy: from the one place where a digit occurs, copy to the end.

    5839472,3=    3 occurs once in 5839472, in third place; what starts there is 39472

>>> DynStrCpy().answer("5839472,3=")
'39472.'
"""

import random
from dataclasses import dataclass

from prism.errors import UserError
from prism.tasks.task import DIGITS, Example, Split, Task, draw_symbols


@dataclass(frozen=True)
class DynStrCpy(Task):
    """A string and a digit found in it exactly once, then the string from that digit on."""

    name = "dyn_str_cpy"
    summary = "copy a string from the one occurrence of a digit: 5839472,3=39472."
    length_means = "symbols of the string"
    training_length = 10
    digits = DIGITS

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*DIGITS, ",", "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        digit = rng.choice(DIGITS)
        others = draw_symbols(rng, length - 1, DIGITS.replace(digit, ""))
        place = rng.randrange(length)
        tail = digit + others[place:]
        return Example(f"{others[:place]}{tail},{digit}=", f"{tail}.")

    def answer(self, prompt: str) -> str:
        form = "digits, ',', one digit and '=', such as '5839472,3='"
        text, digit = self.parse("([0-9]+),([0-9])=", prompt, form)
        if text.count(digit) != 1:
            raise UserError(f"in a prompt of {self.name} the digit after ',' occurs exactly once before it; "
                            f"{digit} occurs {text.count(digit)} times in {prompt!r}")
        return f"{text[text.index(digit):]}."
