"""What whole models cost: a training step, a run's steps a second, a long evaluation, generation."""

import time
from typing import Any, NamedTuple

import torch

from prism.architectures import count_parameters
from prism.bench.timing import PeakMemory, time_in_turn
from prism.config import RunConfig, preset
from prism.data import Batch, Prefetcher, batch, draw, vocabulary
from prism.device import matmul_precision
from prism.evaluate import score
from prism.generate import stream_tokens
from prism.step import TrainingStep, make_step
from prism.tasks import find_task
from prism.trained import build

STEPS_AT_ONCE = 20  # timed together: what a run does between two looks at its numbers
DISTINCT_BATCHES = 8


class StepCase(NamedTuple):
    """A training step to time. `width`: inputs are padded to so many tokens; None: as training pads them."""

    name: str
    preset: str
    task: str
    encoding: str
    max_length: int
    width: int | None = None
    graph: bool = True


def config_of(case: StepCase) -> RunConfig:
    return preset(case.preset, find_task(case.task)(), case.encoding, max_length=case.max_length)


def measure_step(case: StepCase, repeats: int, device: torch.device) -> dict[str, Any]:
    """Seconds a step, over batches that are on the device's doorstep; peak memory; the model's size."""
    config = config_of(case)
    graph = case.graph and device.type == "cuda"
    with matmul_precision(config.matmul), PeakMemory(device) as memory:
        model = build(config).to(device)
        update = make_step(model, config, graph)
        batches = [_batch(config, update, place, case.width) for place in range(DISTINCT_BATCHES)]
        at_once = STEPS_AT_ONCE if device.type == "cuda" else 2
        place = iter(range(10**9))

        def steps() -> None:
            for _ in range(at_once):
                step = next(place)
                update(batches[step % DISTINCT_BATCHES], step)

        timing = time_in_turn({"step": steps}, repeats, device)["step"]
    seconds = [one / at_once for one in timing.seconds]
    median = timing.median / at_once
    tokens = max(made.tokens.shape[1] for made in batches)
    spread = f"({1e3 * min(seconds):.3f} - {1e3 * max(seconds):.3f})"
    print(f"  {case.name:46} {1e3 * median:9.3f} ms {spread}{memory}", flush=True)
    return {
        "case": case._asdict(), "tokens": tokens, "batch": config.batch_size, "graph": graph, "median": median,
        "seconds": seconds, "peak_bytes": memory.bytes, "parameters": count_parameters(model),
        "matmul": config.matmul,
    }


def _batch(config: RunConfig, update: TrainingStep, step: int, width: int | None = None) -> Batch:
    made = batch(
        config.task, seed=config.seed, stream="train", step=step, size=config.batch_size,
        max_length=config.max_length, pad_to=width, multiple=update.width_multiple,
    )
    return update.prepare(made)


def measure_run(case: StepCase, steps: int, device: torch.device) -> dict[str, Any]:
    """Steps a second of training as `prism train` does it, drawing and copying of batches included."""
    config = config_of(case)
    with matmul_precision(config.matmul):
        update = make_step(build(config).to(device), config, case.graph and device.type == "cuda")
        warm = DISTINCT_BATCHES
        with Prefetcher(lambda step: _batch(config, update, step), range(warm + steps)) as batches:
            for step, made in enumerate(batches):
                if step == warm:
                    update.fault()  # waits for the device
                    began = time.perf_counter()
                update(made, step)
        update.fault()
        seconds = time.perf_counter() - began
    rate = steps / seconds
    print(f"  {case.name:46} {rate:9.1f} steps/s: {config.steps:,} steps in {config.steps / rate / 60:.1f} minutes",
          flush=True)
    return {"case": case._asdict(), "steps": steps, "seconds": seconds, "steps_per_second": rate,
            "run_minutes": config.steps / rate / 60}


def measure_evaluation(preset_name: str, length: int, size: int, device: torch.device) -> dict[str, Any]:
    """One batch of copying, of a length that training never sees, scored once."""
    config = preset(preset_name, find_task("copy")(), "prism")
    with matmul_precision(config.matmul):
        model = build(config).to(device)
        examples = draw(config.task, seed=0, stream="test", step=0, size=size, length=length)
        score(model, config.task, examples[:1])
        with PeakMemory(device) as memory:
            began = time.perf_counter()
            score(model, config.task, examples)
            seconds = time.perf_counter() - began
    tokens = 2 * length + 2
    print(f"  copy of {length:6,}, T = {tokens:6,}, batch {size:3}  {seconds:9.3f} s{memory}", flush=True)
    return {"preset": preset_name, "length": length, "tokens": tokens, "batch": size, "seconds": seconds,
            "peak_bytes": memory.bytes}


def measure_generation(
    preset_name: str, prompts: int, limit: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Tokens a second, greedily, with a cache."""
    config = preset(preset_name, find_task("copy")(), "prism")
    with matmul_precision(config.matmul):
        model = build(config).to(device).eval()
        ids = torch.from_numpy(vocabulary(config.task).encode("0123456789=")).to(device).expand(prompts, -1)
        timing = time_in_turn({"tokens": lambda: list(stream_tokens(model, ids, limit))}, repeats, device)["tokens"]
    rate = prompts * limit / timing.median
    print(f"  {limit} tokens for {prompts:3} prompts at once  {timing!s:34} {rate:9.0f} tokens/s", flush=True)
    return {"preset": preset_name, "prompts": prompts, "limit": limit, **timing.to_json(), "tokens_per_second": rate}
