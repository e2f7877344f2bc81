"""Training: sample, loss, step, evaluate, save; stop and go on at any moment without a trace in the result."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prism.config import RunConfig, means
from prism.curriculum import longest_at
from prism.data import Batch, Prefetcher, batch, collate, draw, vocabulary
from prism.device import matmul_precision, wants_graph
from prism.encodings import own_file
from prism.errors import Interrupted, RunError, UserError, is_out_of_memory
from prism.evaluate import Score, score_subsets, sweep
from prism.optimizer import load_optimizer, optimizer_tensors
from prism.progress import Progress, silent
from prism.results import summarise
from prism.runs import SOURCE, RunFolder
from prism.signals import collected
from prism.step import StepResult, make_step
from prism.step import completion_loss as completion_loss  # PAPER.md knows it by this address
from prism.trained import build, load_weights, weights

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
    config: RunConfig, out: str | Path, resume: bool = False, device: str = "cpu", progress: Progress | None = None,
    graph: bool | None = None,
) -> dict[str, Any]:
    """Trains a run to its end in the folder `out` and returns its result. A finished run is returned as it is.

    `graph`: whether a GPU takes its steps as CUDA graphs; by default it does.
    """
    progress = progress or silent()
    graph = wants_graph(graph, device)
    _refuse_lengths_without_examples(config)
    if not RunFolder.exists(out):
        _refuse_too_long(config)
    with RunFolder.create(out, _as_stored(config, out, resume), resume=resume) as folder:
        if own := own_file(config.encoding):
            folder.keep_source(SOURCE, own.read_bytes())
        finished = folder.result()
        if finished is not None:
            return finished
        with progress, matmul_precision(config.matmul):
            return _Training(config, folder, device, progress, graph).run()


def _as_stored(config: RunConfig, out: str | Path, resume: bool) -> dict[str, Any]:
    """The configuration as its folder has it, perhaps since before some of today's options existed."""
    stored = RunFolder.open(out).config if resume and RunFolder.exists(out) else None
    return stored if stored is not None and means(stored, config) else config.to_json()


def _refuse_lengths_without_examples(config: RunConfig) -> None:
    """Said before there is a folder: the evaluation at the end is a bad place to learn it."""
    task, longest = config.task, config.max_length
    draw(task, seed=0, stream="train", step=0, size=1, max_length=longest)
    draw(task, seed=0, stream="validation", step=0, size=1, length=longest)
    for length in config.test_lengths():
        draw(task, seed=0, stream="test", step=0, size=1, length=length)


def _refuse_too_long(config: RunConfig) -> None:
    """Training lengths have to fit; test lengths that do not are left out of the sweeps."""
    task, most = config.task, build(config).longest()
    drawn = draw(task, seed=0, stream="validation", step=0, size=100, length=config.max_length)
    needed = collate(vocabulary(task), drawn).tokens.shape[1]
    if most is not None and needed > most:
        raise UserError(f"{config.label} can read {most:,} tokens, and {task.name} up to {config.max_length} has "
                        f"sequences of {needed:,}: give it more places, or a smaller --max-length")


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


class _Training:
    def __init__(self, config: RunConfig, folder: RunFolder, device: str, progress: Progress, graph: bool) -> None:
        self.config, self.folder, self.progress = config, folder, progress
        self.model = build(config).to(device)
        self.update = make_step(self.model, config, graph)
        self.standing = Standing()
        self.resumed_at = self._go_on()
        self.began = time.perf_counter()
        self.aside = 0.0  # seconds spent on anything but steps: evaluations and checkpoints

    def run(self) -> dict[str, Any]:
        config, standing = self.config, self.standing
        self.progress.start(config, self.model, standing.step)
        steps = range(standing.step, config.steps)
        with collected("finishing this step and saving") as received, Prefetcher(self._batch, steps) as batches:
            for made in batches:
                with _memory_explained(standing.step, made):
                    self._step(made)
                at_end = standing.step == config.steps
                due = standing.step % config.evaluation.every == 0 and standing.ready
                improved = False
                if due or at_end:
                    self._refuse_non_finite()  # it waits for the device, so that what follows is not taken for steps
                    with self._not_training():
                        improved = self._evaluate(at_end)
                stopped_by = received[0] if received else None  # looked at once: what comes later ends the next step
                # Always after the evaluation: a checkpoint stands for everything up to its step, records included.
                if improved or at_end or stopped_by or standing.step % config.evaluation.checkpoint_every == 0:
                    with self._not_training():
                        self._save()
                if stopped_by and not at_end:
                    raise Interrupted(stopped_by, standing.step)
        return self._finish()

    def _batch(self, step: int) -> Batch:
        made = batch(
            self.config.task, seed=self.config.seed, stream="train", step=step, size=self.config.batch_size,
            max_length=self._longest(step), multiple=self.update.width_multiple,
        )
        return self.update.prepare(made)

    def _longest(self, step: int) -> int:
        longest = self.config.max_length
        return longest_at(step, self.config.curriculum, longest) if self.config.task.has_curriculum else longest

    def _step(self, made: Batch) -> None:
        """One update, looked at where that costs nothing or a record is due."""
        config, standing = self.config, self.standing
        result = self.update(made, standing.step)
        standing.step += 1
        due = standing.step % LOG_EVERY == 0 or standing.step == config.steps
        if due or self.update.sees_every_step:
            self._refuse_non_finite()
            standing.ready |= result.loss.item() < config.evaluation.below_loss
        if due:
            self._log(result)

    def _log(self, result: StepResult) -> None:
        step = self.standing.step
        record = {
            "step": step, "longest": self._longest(step - 1), "loss": result.loss.item(),
            "exact": result.exact.item(), "gradient_norm": result.norm.item(), "rate": result.rate,
        }
        self.folder.append_metrics(record)
        seconds = time.perf_counter() - self.began  # after the numbers are read, so the device has done the step
        speed = (step - self.resumed_at) / seconds
        self.folder.append_timing({"step": step, "seconds": seconds, "steps_per_second": speed})
        self.progress.step(record, speed)

    def _refuse_non_finite(self) -> None:
        """Where a step met a number that is not finite, perhaps a few steps ago: nothing has changed since."""
        fault = self.update.fault()
        if fault is None:
            return
        what = f"loss is {fault.loss}" if not math.isfinite(fault.loss) else f"gradient norm is {fault.norm}"
        kept = self.folder.checkpoint_steps()
        raise RunError(
            f"the {what} at step {fault.step} (seed {self.config.seed}): stopped before that update; "
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

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.aside += time.perf_counter() - began

    def _test(self, examples: int, report: Callable[[str, Score], None]) -> dict[str, Score]:
        config = self.config
        scores = sweep(self.model, config.task, config.test_lengths(), examples, report=report, leave_out=True)
        return {**scores, **score_subsets(self.model, config.task, report)}

    def _save(self) -> None:
        self._refuse_non_finite()
        tensors = {**weights(self.model), **optimizer_tensors(self.model, self.update.optimizer)}
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
            load_optimizer(self.model, self.update.optimizer, checkpoint.tensors)
            best_loss = checkpoint.state["best_loss"]
            self.standing = Standing(**{**checkpoint.state, "best_loss": math.inf if best_loss is None else best_loss})
        self.folder.truncate(self.standing.step)
        return self.standing.step

    def _finish(self) -> dict[str, Any]:
        """The result: the final weights, and beside them the best by training length on as many examples."""
        seconds = time.perf_counter() - self.began
        training = seconds - self.aside
        final = self.folder.evaluations()[-1]["test"]
        best, best_step = final, self.standing.best_step
        if best_step is not None and best_step != self.config.steps:
            best = self._test_best(best_step)
        speed = (self.config.steps - self.resumed_at) / training
        result = summarise(self.config, self.model, self.folder, best, best_step, seconds, speed)
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
