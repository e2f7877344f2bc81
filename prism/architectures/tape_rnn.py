"""The tape RNN: a recurrent network that writes to a tape and moves along it, by a cell or by the prompt's length.

At every token the network reads the cell under its head, writes to it, and moves; where to is a mixture of five
actions weighed by a softmax: stay, one cell left, one cell right, l cells left, l cells right. As Delétang et al.,
Neural Networks and the Chomsky Hierarchy, 2023, define it (the paper and its code), the head stands still and the
tape moves under it: each action gives a tape, and the new tape is their weighted mean.

    tape[0] <- value        tape[m] <- sum over actions a of probability[a] * tape[m + offset[a]]

Theirs are the five actions, the write before the move, cells of 8 numbers, one tape, the vanilla RNN with relu as the
controller, and the two hidden layers of 64 between its state and the value it writes. Different, because a causal
model of any length asks for it:

- Their l is the length of the whole input, told from the first token on. What has not been read cannot be known here:
  l is the number of tokens read so far, and remains what it was when the first `=` is read, which ends the prompt.
  So while the answer is written, l is the prompt's length without `=`, as theirs is. It remains a hint that other
  models do not get: a counter, and that `=` stops it. Without the jumps, no head could be back at the beginning of
  the prompt in time, since there are no steps to think in.
- Their tape is a ring of a fixed size (40 cells in their example), which would bound the lengths. This one is open at
  both ends, and forgets what comes to lie further from the head than twice the number of tokens read so far. Single
  steps never take a cell so far, nor does one jump among them; a second one in the same direction may.
- Tokens come in through an embedding, and logits out through its transpose after a layer norm, as in the Transformer;
  theirs are one-hot vectors, and a linear layer.

Dimensions: batch; time = tokens of this chunk; width = of embedding and hidden state alike; tape = its cells, the
head in the middle; cells = numbers in a cell.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from prism.architectures.recurrent import Controller, Recurrent, small_start
from prism.config import RunConfig
from prism.data import vocabulary
from prism.settings import SizeConfig, setting

PROMPT_END = "="
REACH = 2  # cells of tape on either side of the head, for every token read
ACTIONS = 5  # stay, left, right, jump left, jump right
# Hidden state [batch, width], tape [batch, tape, cells], and of each sequence: its l so far, and whether it has ended.
State = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TapeRnnConfig(SizeConfig):
    """The tape RNN: `width` is that of the controller's state as well; it has one layer."""

    width: int = setting(256, low=2, high=65_536)
    layers: int = setting(1, low=1, high=1)
    cells: int = setting(8, low=1, high=1_024)  # numbers in a cell of the tape
    writer: int = setting(64, low=1, high=65_536)  # width of the two layers that make what is written


class TapeRnn(Recurrent):
    """A vanilla RNN with a tape and a head."""

    name = "tape_rnn"
    summary = "a recurrent network with a tape; it may jump by the prompt's length, which is counted for it"
    citation = "Delétang et al., Neural Networks and the Chomsky Hierarchy, 2023"
    hint = "end of prompt"
    Config = TapeRnnConfig
    config: TapeRnnConfig

    def __init__(self, config: TapeRnnConfig, prompt_end: int) -> None:
        super().__init__(config)
        self.prompt_end = prompt_end
        self.controller = Controller(config.width, config.cells)
        self.act = nn.Linear(config.width, ACTIONS)
        first, second = nn.Linear(config.width, config.writer), nn.Linear(config.writer, config.writer)
        last = nn.Linear(config.writer, config.cells)
        self.write = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
        small_start(self.act, first, second, last)

    @classmethod
    def build(cls, config: RunConfig) -> "TapeRnn":
        assert isinstance(config.model, TapeRnnConfig)
        return cls(config.model, int(vocabulary(config.task).encode(PROMPT_END)[0]))

    def unroll(
        self, x: Float[Tensor, "batch time width"], tokens: Int[Tensor, "batch time"], state: State | None
    ) -> tuple[Float[Tensor, "batch time width"], State]:
        batch, config = x.shape[0], self.config
        hidden, tape, length, ended = state or (
            x.new_zeros(batch, config.width), x.new_zeros(batch, 1, config.cells),
            tokens.new_zeros(batch), tokens.new_zeros(batch, dtype=torch.bool),
        )
        lengths, over = self._lengths(tokens, length, ended)
        made = []
        for now, jump in zip(self.controller.take(x).unbind(1), lengths.unbind(1), strict=True):
            middle = tape.shape[1] // 2
            hidden = self.controller(now, hidden, tape[:, middle])
            written = torch.cat((tape[:, :middle], self.write(hidden)[:, None], tape[:, middle + 1 :]), dim=1)
            tape = moved(written, jump, self.act(hidden).softmax(-1))
            made.append(hidden)
        return torch.stack(made, dim=1), (hidden, tape, lengths[:, -1], over[:, -1])

    def _lengths(
        self, tokens: Int[Tensor, "batch time"], length: Int[Tensor, " batch"], ended: Bool[Tensor, " batch"]
    ) -> tuple[Int[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
        """The l of every token, and whether the prompt is over, from what the tokens before had."""
        over = ((tokens == self.prompt_end).cumsum(1) > 0) | ended[:, None]
        return length[:, None] + (~over).cumsum(1), over

    def numbers_per_token(self, time: int) -> int:
        config = self.config
        return max(config.width, config.vocabulary, 2 * REACH * config.cells)

    def numbers_kept(self, time: int) -> int:
        return self.config.width + (2 * REACH * time + 1) * self.config.cells


def moved(
    tape: Float[Tensor, "batch tape cells"], jump: Int[Tensor, " batch"],
    actions: Float[Tensor, "batch actions"],
) -> Float[Tensor, "batch longer cells"]:
    """The tape after a mixture of moves, longer by `REACH` cells at either end: there is one more token now."""
    wide = pad(tape, (0, 0, REACH + 1, REACH + 1))
    stay, left, right, jump_left, jump_right = actions[:, :, None, None].unbind(1)
    here: Tensor = wide[:, 1:-1]
    return (
        stay * here + left * wide[:, :-2] + right * wide[:, 2:]
        + jump_left * Shift.apply(here, -jump) + jump_right * Shift.apply(here, jump)  # type: ignore[no-untyped-call]
    )


class Shift(torch.autograd.Function):
    """Row b of the result at m is row b of the tape at m + by[b], or 0 beyond its ends.

    Its adjoint is the shift back: with a gradient of its own, nothing is scattered, and the order of sums is fixed.
    """

    @staticmethod
    def forward(ctx: Any, tape: Float[Tensor, "batch tape cells"], by: Int[Tensor, " batch"]) -> Tensor:
        ctx.save_for_backward(by)
        return shifted(tape, by)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (by,) = ctx.saved_tensors
        return shifted(gradients[0], -by), None


def shifted(
    tape: Float[Tensor, "batch tape cells"], by: Int[Tensor, " batch"]
) -> Float[Tensor, "batch tape cells"]:
    size = tape.shape[1]
    places = (torch.arange(1, size + 1, device=tape.device) + by[:, None]).clamp(0, size + 1)
    return pad(tape, (0, 0, 1, 1)).gather(1, places[:, :, None].expand(-1, -1, tape.shape[2]))
