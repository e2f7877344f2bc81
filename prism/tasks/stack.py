"""Stack manipulation: run the actions, then write the stack from the top down.

The prompt is a stack of bits, bottom first, and then actions: 2 pops, 3 pushes a 0, 4 pushes a 1.

    0110422=    start 0110, push 1: 01101, pop: 0110, pop: 011
                top to bottom 110, the terminator 2, zeros up to one more symbol than the prompt has

>>> Stack().answer("0110422=")
'11020000.'

Popping an empty stack does nothing:

>>> Stack().answer("1223=")
'02000.'
"""

import random
from dataclasses import dataclass

from prism.tasks.task import Example, Split, Task, draw_symbols

POP, PUSH_0, PUSH_1 = "234"


@dataclass(frozen=True)
class Stack(Task):
    """Bits and actions, then the final stack, terminated and padded to a length the prompt fixes."""

    name = "stack"
    summary = "apply pushes and pops to a stack of bits: 0110422=11020000."
    length_means = "symbols of the prompt: stack and actions"
    training_length = 40

    @property
    def alphabet(self) -> tuple[str, ...]:
        return (*"01", POP, PUSH_0, PUSH_1, "=", ".")

    def example(self, rng: random.Random, length: int, split: Split = "test") -> Example:
        depth = rng.randint(1, max(1, length - 1))
        bits = draw_symbols(rng, depth, "01")
        actions = draw_symbols(rng, length - depth, POP + PUSH_0 + PUSH_1)
        return Example(f"{bits}{actions}=", _completion(bits, actions))

    def answer(self, prompt: str) -> str:
        # A lone bit may stand without actions; a longer stack always leaves room for one.
        form = "bits, then actions 2, 3 or 4 (at least one after two bits or more), then '=', such as '0110422='"
        bits, actions = self.parse("([01]|[01]+(?=[234]))([234]*)=", prompt, form)
        return _completion(bits, actions)


def _completion(bits: str, actions: str) -> str:
    stack = list(bits)
    for action in actions:
        if action == PUSH_0:
            stack.append("0")
        elif action == PUSH_1:
            stack.append("1")
        elif stack:
            stack.pop()
    top_down = "".join(reversed(stack))
    return f"{top_down}2".ljust(len(bits) + len(actions) + 1, "0") + "."
