"""Training: sample, loss, step, evaluate, save; stop and go on at any moment without a trace in the result."""

import hashlib
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from prism.config import RunConfig
from prism.curriculum import longest_at
from prism.data import Batch, Prefetcher, batch, draw
from prism.errors import Interrupted, RunError, UserError, is_out_of_memory
from prism.evaluate import Score, score_subsets, sweep
from prism.optimizer import load_optimizer, make_optimizer, optimizer_tensors, set_rates
from prism.progress import Progress, silent
from prism.results import summarise
from prism.runs import RunFolder
from prism.trained import build, load_weights, weights
from prism.transformer import Transformer

LOG_EVERY = 10  # steps


@dataclass
class Standing:
    """What a run knows of itself beside its tensors: saved with every checkpoint."""

    step: int = 0
    ready: bool = False  # the loss has been low enough for evaluations to mean something
    best_step: int | None = None  # best on validation at the training length; test lengths have no say
    best_exact: float = -1.0
    best_loss: float = math.inf


def train(
    config: RunConfig, out: str | Path, resume: bool = False, device: str = "cpu", progress: Progress | None = None
) -> dict[str, Any]:
    """Trains a run to its end in the folder `out` and returns its result. A finished run is returned as it is."""
    progress = progress or silent()
    _refuse_lengths_without_examples(config)
    with RunFolder.create(out, config.to_json(), resume=resume) as folder:
        finished = folder.result()
        if finished is not None:
            return finished
        with progress:
            return _Training(config, folder, device, progress).run()


def _refuse_lengths_without_examples(config: RunConfig) -> None:
    """Said before there is a folder: the evaluation at the end is a bad place to learn it."""
    task, longest = config.task, config.max_length
    draw(task, seed=0, stream="train", step=0, size=1, max_length=longest)
    draw(task, seed=0, stream="validation", step=0, size=1, length=longest)
    for length in config.test_lengths():
        draw(task, seed=0, stream="test", step=0, size=1, length=length)


@contextmanager
def _memory_explained(step: int, made: Batch) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, time = made.tokens.shape
        raise RunError(f"out of memory at step {step + 1}: {rows} sequences of {time} tokens do not fit; "
                       "a smaller --batch-size or --max-length is the cure") from error


def completion_loss(model: Transformer, made: Batch) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Mean cross-entropy over the completion's tokens, and the share of examples that are right as a whole."""
    logits = model(made.tokens)
    loss = torch.nn.functional.cross_entropy(logits[made.mask], made.targets[made.mask])
    right = (logits.argmax(-1) == made.targets) | ~made.mask
    return loss, right.all(dim=-1).float().mean()


class _Training:
    def __init__(self, config: RunConfig, folder: RunFolder, device: str, progress: Progress) -> None:
        self.config, self.folder, self.device, self.progress = config, folder, device, progress
        self.model = build(config).to(device)
        self.optimizer = make_optimizer(self.model, config.optimizer)
        self.standing = Standing()
        self.resumed_at = self._go_on()
        self.began = time.perf_counter()

    def run(self) -> dict[str, Any]:
        config, standing = self.config, self.standing
        self.progress.start(config, self.model, standing.step)
        with _signals() as received, Prefetcher(self._batch, range(standing.step, config.steps)) as batches:
            for made in batches:
                with _memory_explained(standing.step, made):
                    self._step(made)
                at_end = standing.step == config.steps
                due = standing.step % config.evaluation.every == 0 and standing.ready
                improved = (due or at_end) and self._evaluate(at_end)
                stopped_by = received[0] if received else None  # looked at once: what comes later ends the next step
                # Always after the evaluation: a checkpoint stands for everything up to its step, records included.
                if improved or at_end or stopped_by or standing.step % config.evaluation.checkpoint_every == 0:
                    self._save()
                if stopped_by and not at_end:
                    raise Interrupted(stopped_by, standing.step)
        return self._finish()

    def _batch(self, step: int) -> Batch:
        return batch(
            self.config.task, seed=self.config.seed, stream="train", step=step, size=self.config.batch_size,
            max_length=self._longest(step),
        )

    def _longest(self, step: int) -> int:
        longest = self.config.max_length
        return longest_at(step, self.config.curriculum, longest) if self.config.task.has_curriculum else longest

    def _step(self, made: Batch) -> None:
        """One update. Nothing is touched unless loss and gradients are finite."""
        config, step = self.config, self.standing.step
        # What a model draws at random (the baseline's shifts) depends on seed and step alone, so a resume is exact.
        torch.manual_seed(_step_seed(config.seed, step))
        self.model.train()
        rate = set_rates(self.optimizer, config.optimizer, step, config.steps)
        loss, exact = completion_loss(self.model, made.to(self.device))
        penalty = self.model.encoding.penalty()
        self.optimizer.zero_grad()
        (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optimizer.clip)
        loss_now, norm_now = loss.item(), norm.item()
        self._refuse_non_finite(loss_now, norm_now)
        self.optimizer.step()
        self.standing.step = step + 1
        self.standing.ready |= loss_now < config.evaluation.below_loss
        if (step + 1) % LOG_EVERY == 0 or step + 1 == config.steps:
            record = {
                "step": step + 1, "longest": self._longest(step),
                "loss": loss_now, "exact": exact.item(), "gradient_norm": norm_now, "rate": rate,
            }
            self.folder.append_metrics(record)
            seconds = time.perf_counter() - self.began
            speed = (step + 1 - self.resumed_at) / seconds
            self.folder.append_timing({"step": step + 1, "seconds": seconds, "steps_per_second": speed})
            self.progress.step(record, speed)

    def _refuse_non_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        what = f"loss is {loss}" if not math.isfinite(loss) else f"gradient norm is {norm}"
        kept = self.folder.checkpoint_steps()
        raise RunError(
            f"the {what} at step {self.standing.step + 1} (seed {self.config.seed}): stopped before that update; "
            + (f"the last checkpoint is of step {kept[-1]}" if kept else "there is no checkpoint yet")
            + "; a lower --optimizer.rate or --optimizer.clip is the usual cure"
        )

    def _evaluate(self, at_end: bool) -> bool:
        """Records a sweep; true if the model is the best so far on validation at its training length."""
        config, standing = self.config, self.standing
        most = config.evaluation.final_examples  # for validation every time: the best is the best on the same examples
        validation = sweep(self.model, config.task, [config.max_length], most, "validation")[str(config.max_length)]
        test = self._test(most, self.progress.score) if at_end else self._test(config.evaluation.examples, _unheard)
        self.folder.append_evaluation({
            "step": standing.step, "validation": validation.to_json(),
            "test": {name: one.to_json() for name, one in test.items()},
        })
        self.progress.evaluation(standing.step, test)
        improved = (validation.exact, -validation.loss) > (standing.best_exact, -standing.best_loss)
        if improved:
            standing.best_step = standing.step
            standing.best_exact, standing.best_loss = validation.exact, validation.loss
        return improved

    def _test(self, examples: int, report: Callable[[str, Score], None]) -> dict[str, Score]:
        config = self.config
        scores = sweep(self.model, config.task, config.test_lengths(), examples, report=report)
        return {**scores, **score_subsets(self.model, config.task, report)}

    def _save(self) -> None:
        tensors = {**weights(self.model), **optimizer_tensors(self.model, self.optimizer)}
        pins = [] if self.standing.best_step is None else [self.standing.best_step]
        state = {**asdict(self.standing), "best_loss": _finite(self.standing.best_loss)}
        self.folder.save_checkpoint(self.standing.step, tensors, state, pins=pins)

    def _go_on(self) -> int:
        """From the newest sound checkpoint, if there is one; records past it are made again."""
        if self.folder.checkpoint_steps():
            checkpoint = self.folder.load_checkpoint()
            for sentence in checkpoint.skipped:
                self.progress.note(sentence)
            load_weights(self.model, checkpoint.tensors)
            load_optimizer(self.model, self.optimizer, checkpoint.tensors)
            best_loss = checkpoint.state["best_loss"]
            self.standing = Standing(**{**checkpoint.state, "best_loss": math.inf if best_loss is None else best_loss})
        self.folder.truncate(self.standing.step)
        return self.standing.step

    def _finish(self) -> dict[str, Any]:
        """The result: the final weights, and beside them the best by training length on as many examples."""
        seconds = time.perf_counter() - self.began
        final = self.folder.evaluations()[-1]["test"]
        best, best_step = final, self.standing.best_step
        if best_step is not None and best_step != self.config.steps:
            best = self._test_best(best_step)
        result = summarise(self.config, self.model, self.folder, best, best_step, seconds)
        self.folder.write_result(result)
        return result

    def _test_best(self, step: int) -> dict[str, Any]:
        try:
            tensors = self.folder.load_checkpoint(step).tensors
        except (RunError, UserError) as error:  # no reason to lose the run: its final weights are sound
            self.progress.note(f"{error}; the best weights keep the scores they had in training")
            return next(record["test"] for record in self.folder.evaluations() if record["step"] == step)
        load_weights(self.model, tensors)
        scores = self._test(self.config.evaluation.final_examples, _unheard)
        return {name: one.to_json() for name, one in scores.items()}


def _unheard(name: str, score: Score) -> None:
    pass


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _step_seed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} step {step}".encode(), digest_size=7).digest(), "big")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them, so that the step can be finished; a second one is final."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])
        os.write(2, b"finishing this step and saving; once more to stop at once\n")  # print is not for signal handlers

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the signals are somebody else's to handle
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
