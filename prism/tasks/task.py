"""The contract of a task: how an example is drawn, and what counts as its length."""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

from prism.errors import UserError
from prism.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from prism.hints import Seen

Split = Literal["train", "validation", "test"]

DIGITS = "0123456789"


class Example(NamedTuple):
    """One line of text in two halves. The prompt ends with `=`, the completion with `.`; only the latter is scored."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Task(Settings):
    """A source of examples. Its fields, if any, are its options; `name` makes it known to the command line.

    A new task is one new file in this folder: a frozen dataclass that inherits from `Task`, sets the class
    attributes below and implements `example`. Everything else has a default that suits most tasks.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `prism tasks`
    length_means: ClassVar[str]  # what the x axis of a figure counts
    training_length: ClassVar[int] = 10  # the default of --max-length: the paper's
    has_curriculum: ClassVar[bool] = True  # false where examples come from a fixed set
    separator: ClassVar[str] = ""  # "" one token per character, " " one token per word
    digits: ClassVar[str] = ""  # what it writes numbers with; "" where it writes none

    @property
    def alphabet(self) -> tuple[str, ...]:
        """Every token the task can write, in a fixed order; the position is the token's id."""
        raise NotImplementedError

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        """An example of exactly this length, drawn from `rng` alone."""
        raise NotImplementedError

    def training_example(self, rng: random.Random, max_length: int, split: Split = "train") -> Example:
        """An example as training sees it: by default of a length uniform in 1..max_length."""
        return self.example(rng, rng.randint(1, max_length), split)

    def answer(self, prompt: str) -> str:
        """The right completion of a prompt. Raises `UserError` for a prompt the task could not have written."""
        raise NotImplementedError

    def parts(self, completion: str) -> Mapping[str, slice]:
        """Named stretches of a completion, in tokens, that are scored on their own as well. None by default."""
        return {}

    def sweep(self, max_length: int) -> tuple[int, ...]:
        """The test lengths of a figure, for a model trained up to `max_length`."""
        factors = (0.5, 1, 1.5, 2, 3, 4, 6, 10)
        return tuple(sorted({max(1, round(factor * max_length)) for factor in factors}))

    def subsets(self) -> Mapping[str, Sequence[Example]]:
        """Fixed test sets that are scored whole, by name. None by default."""
        return {}

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens that end a segment of its text: by default, every single sign that is no letter and no digit."""
        return tuple(token for token in self.alphabet if len(token) == 1 and not token.isalnum())

    def coupling(self, seen: "Seen") -> "Tensor | None":
        """A number for every token, the same for tokens that belong together: digits of one significance, a symbol and
        its copy. It may be read off the text's form, never off what the symbols say: that would be telling the answer.

        A sign that announces numbered symbols is one step before the first of them. None: nothing is declared.
        """
        return None

    @classmethod
    def hint_kinds(cls) -> tuple[str, ...]:
        """What it can tell an encoding that asks for hints (prism/hints.py)."""
        coupled = cls.coupling is not Task.coupling
        return ("segments", *(("digits",) if cls.digits else ()), *(("coupling",) if coupled else ()))

    def parse(self, pattern: str, prompt: str, form: str) -> tuple[str, ...]:
        """The groups of `pattern` in the whole prompt, or a `UserError` that shows the `form` a prompt has."""
        match = re.fullmatch(pattern, prompt)
        if match is None:
            raise UserError(f"a prompt of {self.name} is {form}; got {prompt!r}")
        return match.groups()


def draw_symbols(rng: random.Random, count: int, symbols: str = DIGITS) -> str:
    """So many symbols, uniform and independent."""
    return "".join(rng.choices(symbols, k=count))


def draw_number(rng: random.Random, digits: int) -> str:
    """A number of so many digits, most significant first and never zero; 0 itself is a number of one digit."""
    if digits == 1:
        return rng.choice(DIGITS)
    return rng.choice(DIGITS[1:]) + draw_symbols(rng, digits - 1)
