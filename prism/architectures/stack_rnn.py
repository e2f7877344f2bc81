"""The stack RNN: a recurrent network that pushes vectors onto stacks and reads what lies on top.

What happens to a stack is a mixture of three actions, weighed by a softmax, so all of it can be differentiated:

    stack <- push * (value, stack[0], stack[1], ...) + pop * (stack[1], stack[2], ...) + stay * stack

This is Joulin and Mikolov's network as Delétang et al., Neural Networks and the Chomsky Hierarchy, 2023, define and
train it: a vanilla RNN with relu as the controller, cells of 8 numbers, one stack, pushed values linear in the hidden
state, an empty cell 0. (Joulin and Mikolov: sigmoids, cells of one number, an empty cell -1.) Different from them:

- Stacks have no bottom to overflow. Theirs hold a fixed number of cells (30 by default), which would bound the
  lengths; here a stack grows by a cell with every token, so nothing that was pushed is ever lost.
- Each of several stacks weighs its own actions. Their code has one softmax over the actions of all stacks together;
  for one stack, all they report on, it is the same.
- Tokens come in through an embedding, and logits out through its transpose after a layer norm, as in the Transformer;
  theirs are one-hot vectors, and a linear layer.

Dimensions: batch; time = tokens of this chunk; width = of embedding and hidden state alike; stacks; depth = cells of
a stack so far; cells = numbers in a cell; reads = stacks * cells.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from prism.architectures.recurrent import Controller, Recurrent, small_start
from prism.settings import SizeConfig, setting

ACTIONS = 3  # push, pop, stay
State = tuple[Tensor, Tensor]  # hidden state [batch, width] and stacks [batch, stacks, depth, cells]


@dataclass(frozen=True)
class StackRnnConfig(SizeConfig):
    """The stack RNN: `width` is that of the controller's state as well; it has one layer."""

    width: int = setting(256, low=2, high=65_536)
    layers: int = setting(1, low=1, high=1)
    stacks: int = setting(1, low=1, high=64)
    cells: int = setting(8, low=1, high=1_024)  # numbers in a cell of a stack


class StackRnn(Recurrent):
    """A vanilla RNN with stacks it can read the top of."""

    name = "stack_rnn"
    summary = "a recurrent network with a stack, pushed and popped by soft actions"
    citation = ("Joulin and Mikolov, Inferring Algorithmic Patterns with Stack-Augmented Recurrent Nets, 2015; as in "
                "Delétang et al., Neural Networks and the Chomsky Hierarchy, 2023")
    Config = StackRnnConfig
    config: StackRnnConfig

    def __init__(self, config: StackRnnConfig) -> None:
        super().__init__(config)
        reads = config.stacks * config.cells
        self.controller = Controller(config.width, reads)
        self.act = nn.Linear(config.width, config.stacks * ACTIONS)
        self.push = nn.Linear(config.width, reads)
        small_start(self.act, self.push)

    def unroll(
        self, x: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch time"], state: State | None
    ) -> tuple[Float[Tensor, "batch time width"], State]:
        batch, config = x.shape[0], self.config
        hidden, stack = state or (x.new_zeros(batch, config.width), x.new_zeros(batch, config.stacks, 1, config.cells))
        made = []
        for now in self.controller.take(x).unbind(1):
            hidden = self.controller(now, hidden, stack[:, :, 0].flatten(1))
            actions = self.act(hidden).view(batch, config.stacks, ACTIONS, 1, 1).softmax(2)
            value = self.push(hidden).view(batch, config.stacks, 1, config.cells)
            stack = moved(stack, value, actions)
            made.append(hidden)
        return torch.stack(made, dim=1), (hidden, stack)

    def numbers_per_token(self, time: int) -> int:
        config = self.config
        return max(config.width, config.vocabulary, config.stacks * config.cells)

    def numbers_kept(self, time: int) -> int:
        return self.config.width + self.config.stacks * (time + 1) * self.config.cells


def moved(
    stack: Float[Tensor, "batch stacks depth cells"], value: Float[Tensor, "batch stacks 1 cells"],
    actions: Float[Tensor, "batch stacks 3 1 1"],
) -> Float[Tensor, "batch stacks depth+1 cells"]:
    """The stacks after their actions, a cell deeper."""
    push, pop, stay = actions.unbind(2)
    pushed = torch.cat((value, stack, stack.new_zeros(*stack.shape[:2], 2, stack.shape[3])), dim=2)
    return push * pushed[:, :, :-2] + stay * pushed[:, :, 1:-1] + pop * pushed[:, :, 2:]
