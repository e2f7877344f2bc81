"""The training step: from a batch to new weights. Eager on a CPU; on a GPU one CUDA graph for each shape of batch.

A step of the paper's model is thousands of short GPU operations that take longer to launch one by one than to run, so
a GPU records them once and replays the record. Nothing in such a step may wait for the host: shapes are static, the
learning rates are tensors, and a number that is not finite closes a latch on the device, after which no step changes
anything until the host comes to look.

Both forms are a pure function of weights, optimiser state, batch, seed and step. A replay draws what the eager step
would: it reads the seed that `torch.manual_seed` has set, not the one it was recorded under.

Dimensions: batch; time = tokens of a sequence.
"""

import hashlib
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import cross_entropy

from prism.architectures import Architecture
from prism.config import RunConfig
from prism.data import Batch
from prism.errors import RunError, is_out_of_memory
from prism.optimizer import make_optimizer, recordable, set_rates

IGNORED = -100  # no token's id: a target the loss passes over
WIDTH_MULTIPLE = 8  # on a GPU widths are rounded up to this, so that a few recordings serve every batch
WARM_UP = 3  # steps before a recording: libraries make their workspaces and Triton its kernels at the first ones


class StepResult(NamedTuple):
    """What a step says of itself. On a GPU these are overwritten by the next step, and reading them waits for it."""

    loss: Float[Tensor, ""]  # mean over the completions' tokens
    exact: Float[Tensor, ""]  # share of examples that are right as a whole
    norm: Float[Tensor, ""]  # of the gradient, before clipping
    rate: float  # the first group's learning rate


class Fault(NamedTuple):
    """The first step whose loss or gradient was not finite. Neither it nor any later one has changed the weights."""

    step: int  # 1-based
    loss: float
    norm: float


def completion_loss(model: Architecture, made: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean cross-entropy over the completion's tokens, and the share of examples that are right as a whole."""
    logits = model(made.tokens)
    # Not logits[mask]: how many there are is known to the host only after waiting for the device.
    targets = made.targets.masked_fill(~made.mask, IGNORED)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    right = (logits.argmax(-1) == made.targets) | ~made.mask
    return loss, right.all(dim=-1).float().mean()


def step_seed(seed: int, step: int) -> int:
    """The seed of what a model draws at random in a step. The run's seed and the step alone: so a resume is exact."""
    return int.from_bytes(hashlib.blake2b(f"{seed} step {step}".encode(), digest_size=7).digest(), "big")


def make_step(model: Architecture, config: RunConfig, graph: bool) -> "TrainingStep":
    """The step for the device the model is on; `graph` chooses between the two forms of a GPU."""
    if next(model.parameters()).device.type == "cpu":
        return TrainingStep(model, config)
    return GraphedStep(model, config) if graph else LatchedStep(model, config)


class TrainingStep:
    """One update of a model by a batch: the eager form, which looks at every step's numbers before it updates."""

    width_multiple = 1  # batches are to be as wide as a multiple of this
    sees_every_step = True  # whether reading a result costs nothing; else it is read now and then
    fused = False

    def __init__(self, model: Architecture, config: RunConfig) -> None:
        self.model, self.config = model, config
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, config.optimizer, self.fused)
        self._fault: Fault | None = None

    def prepare(self, made: Batch) -> Batch:
        """What the thread that makes batches ahead is to do to each."""
        return made

    def __call__(self, made: Batch, step: int) -> StepResult:
        """The update of step `step` (0-based). Nothing is touched unless loss and gradients are finite."""
        _refuse_nothing_to_learn(made, step)
        torch.manual_seed(step_seed(self.config.seed, step))
        rate = set_rates(self.optimizer, self.config.optimizer, step, self.config.steps)
        loss, exact, norm = self._gradients(made.to(self.device))
        if self._fault is None and not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            self._fault = Fault(step + 1, loss.item(), norm.item())
        if self._fault is None:
            self.optimizer.step()
        return StepResult(loss, exact, norm, rate)

    def fault(self) -> Fault | None:
        """What has stopped the updates, if anything has."""
        return self._fault

    def _gradients(self, made: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
        """Leaves clipped gradients in the parameters; loss, share of right examples, and norm before clipping."""
        self.model.train()
        loss, exact = completion_loss(self.model, made)
        penalty = self.model.penalty()
        self.optimizer.zero_grad()
        (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        return loss.detach(), exact, norm


class Latch:
    """Closes on the device at the first loss or norm that is not finite, and keeps what it saw."""

    def __init__(self, device: torch.device) -> None:
        self.closed = torch.zeros((), device=device)  # 0 or 1: a fused optimiser's `found_inf`
        self.step = torch.zeros((), dtype=torch.float64, device=device)  # 1-based, of the step under way
        self.seen = torch.zeros(3, dtype=torch.float64, device=device)  # step, loss, norm

    def look(self, loss: Float[Tensor, ""], norm: Float[Tensor, ""]) -> None:
        """Notes a step's numbers, on the device."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        now = torch.stack((self.step, loss.double(), norm.double()))
        self.seen.copy_(torch.where(bad & (self.closed == 0), now, self.seen))
        self.closed.copy_(torch.maximum(self.closed, bad.float()))

    def fault(self) -> Fault | None:
        """Waits for the device."""
        if not self.closed.item():
            return None
        step, loss, norm = self.seen.tolist()
        return Fault(int(step), loss, norm)


class LatchedStep(TrainingStep):
    """The eager form of a GPU: what a graph records, launched one by one."""

    width_multiple = WIDTH_MULTIPLE
    sees_every_step = False
    fused = True

    def __init__(self, model: Architecture, config: RunConfig) -> None:
        super().__init__(model, config)
        self.latch = Latch(self.device)
        self.optimizer.found_inf = self.latch.closed  # type: ignore[attr-defined]  # where 1, a step changes nothing
        self._numbers = torch.zeros(3, device=self.device)

    def prepare(self, made: Batch) -> Batch:
        if self.device.type != "cuda":  # in tests of all that needs no GPU
            return made
        with torch.cuda.device(self.device):  # a thread of its own would wake up the first GPU
            return made.pinned()

    def __call__(self, made: Batch, step: int) -> StepResult:
        _refuse_nothing_to_learn(made, step)
        update = self._ready(made)
        torch.manual_seed(step_seed(self.config.seed, step))  # after a recording, which draws too
        rate = set_rates(self.optimizer, self.config.optimizer, step, self.config.steps)
        self.latch.step.fill_(step + 1)
        update()
        loss, exact, norm = self._numbers.unbind()
        return StepResult(loss, exact, norm, rate)

    def fault(self) -> Fault | None:
        return self.latch.fault()

    def _ready(self, made: Batch) -> Callable[[], None]:
        """The update by this batch, ready to go."""
        return partial(self._update, made.to(self.device))

    def _update(self, made: Batch) -> None:
        loss, exact, norm = self._gradients(made)
        self.latch.look(loss, norm)
        self.optimizer.step()
        self._numbers.copy_(torch.stack((loss, exact, norm)))


class GraphedStep(LatchedStep):
    """The step of a GPU as one CUDA graph for each shape of batch, recorded when a batch first has it.

    The recordings share one pool of memory and may be replayed in any order, since nothing in the pool outlives a
    replay: weights, optimiser state, inputs, latch and results all lie outside.
    """

    def __init__(self, model: Architecture, config: RunConfig) -> None:
        super().__init__(model, config)
        self._recorded: dict[tuple[int, ...], tuple[Batch, Callable[[], None]]] = {}
        self._recorder = Recorder(self.device)
        self._recording = threading.Lock()

    def prepare(self, made: Batch) -> Batch:
        with self._recording:  # CUDA forbids a process to allocate, as pinning does, while it records
            return super().prepare(made)

    def _ready(self, made: Batch) -> Callable[[], None]:
        shape = tuple(made.tokens.shape)
        if shape not in self._recorded:
            self._recorded[shape] = self._record(made)
        inputs, replay = self._recorded[shape]
        for place, part in zip(inputs, made, strict=True):
            place.copy_(part, non_blocking=True)  # in the order of the stream: after the replay before, before ours
        return replay

    def _record(self, made: Batch) -> tuple[Batch, Callable[[], None]]:
        inputs = Batch(*(part.to(self.device, copy=True) for part in made))
        closed = self.latch.closed.clone()
        try:
            self.latch.closed.fill_(1)  # what comes before a recording is real steps: none of them may change anything
            with self._recording:
                replay = self._recorder(partial(self._update, inputs), self.optimizer)
        finally:
            self.latch.closed.copy_(closed)
        self.optimizer.zero_grad()  # gradients lie in the pool, and every replay makes its own
        return inputs, replay


class Recorder:
    """Makes CUDA graphs that share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, update: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Runs `update` a few times, records it, and returns what replays it on the current stream."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            # On the stream that records: workspaces, and the nodes that add up gradients, belong to a stream.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UP):
                    update()
            torch.cuda.current_stream().wait_stream(self._stream)
            with torch.cuda.stream(torch.cuda.current_stream()):  # a recording that fails would leave its own in place
                return self._record(update, optimizer)

    def _record(self, update: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        graph, within = torch.cuda.CUDAGraph(), None
        try:
            with recordable(optimizer), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                try:
                    update()
                except Exception as error:
                    within = error  # leaving the recording raises an error of its own, which says less
                    raise
        except Exception as error:
            cause = within or error
            if is_out_of_memory(cause):
                raise cause from None
            reason = (str(cause).splitlines() or [type(cause).__name__])[0]
            raise RunError(f"the training step cannot be a CUDA graph ({reason}): --no-graph trains without") from cause
        return graph.replay


def _refuse_nothing_to_learn(made: Batch, step: int) -> None:
    """On the batch as it was made, in the host's memory; its loss would be 0 / 0."""
    if not made.mask.any():
        raise RunError(f"the batch of step {step + 1} has no completion token, so there is nothing to learn from it")
