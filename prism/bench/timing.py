"""How long a call takes on the device it runs on: several calls in turn, each warmed up first."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from prism.device import most_memory

Call = Callable[[], Any]
WARM_UP = 2
GPU_WARM_UP, GPU_SAMPLE = 0.2, 0.02  # seconds: a card's clock takes a while to rise, and a launch is not to be seen


class Timing(NamedTuple):
    """The seconds of each repeat."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "seconds": self.seconds}

    def __str__(self) -> str:
        scale, unit = next((s, u) for s, u, least in ((1, "s ", 1), (1e3, "ms", 1e-3), (1e6, "us", 0))
                           if self.median >= least)
        low, high = min(self.seconds), max(self.seconds)
        return f"{scale * self.median:8.3f} {unit} ({scale * low:.3f} - {scale * high:.3f})"


def time_in_turn(calls: Mapping[str, Call], repeats: int, device: torch.device) -> dict[str, Timing]:
    """In turn, so that a busy moment of the machine meets every call alike."""
    times = {name: _warmed_up(call, device) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(seconds_of(call, device, times[name]))
    return {name: Timing(found) for name, found in seconds.items()}


def _warmed_up(call: Call, device: torch.device) -> int:
    """How many calls make a sample, found while warming up."""
    for _ in range(WARM_UP):
        call()
    if device.type != "cuda":
        return 1
    once = seconds_of(call, device)
    seconds_of(call, device, max(1, int(GPU_WARM_UP / once)))
    return max(1, math.ceil(GPU_SAMPLE / once))


def seconds_of(call: Call, device: torch.device, times: int = 1) -> float:
    """The mean of some calls in a row, from an idle device to an idle device; on a GPU, as its own clock sees it."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return 1e-3 * float(begin.elapsed_time(end)) / times


def replayed(call: Call, device: torch.device) -> Call:
    """The call as a CUDA graph, so that what is timed is the device and not the host that feeds it."""
    if device.type != "cuda":
        return call
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP + 1):
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = call()

    def replay(inputs: Call = call) -> Any:  # the graph knows addresses alone: what it reads must stay
        graph.replay()
        return made

    return replay


class PeakMemory:
    """The most memory a `with` block has taken: on a GPU, beyond what was; on a CPU, by the whole process so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None  # None: no more than the process has once had before

    def __enter__(self) -> "PeakMemory":
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            self._before = most_memory(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        elif (most := most_memory(self.device)) > self._before:
            self.bytes = most

    def __str__(self) -> str:
        return "" if self.bytes is None else f"   peak memory {self.bytes / 2**30:.2f} GiB"
