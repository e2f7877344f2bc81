"""The histogram scan: every form of it at one size, agreement first; and what it costs as sequences and batches grow.

Dimensions: batch; cursors; time; bins = 2 time + 1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prism.bench.ceilings import Ceilings
from prism.bench.timing import Call, PeakMemory, Timing, replayed, time_in_turn
from prism.errors import RunError
from prism.ops.dispatch import has_triton
from prism.ops.histogram import Method, histogram_scan, histogram_step, one_hot_start

# ||out - ref|| / ||ref|| against float64: float32 forms, and forms that keep histograms in 16 bits.
AGREEMENT = {torch.float32: 2e-5, torch.float16: 5e-4}
CHECKED_BATCH = 2  # sequences on which forms are compared before they are timed

Gradients = list[Tensor]
Form = Callable[[], Gradients]  # forward and backward: the histograms, and the gradients of weights and gamma


@dataclass(frozen=True)
class Size:
    """A scan: B sequences of T tokens, so many cursors, L = 2T + 1 bins."""

    name: str
    batch: int
    cursors: int
    time: int

    @property
    def bins(self) -> int:
        return 2 * self.time + 1

    @property
    def bin_steps(self) -> int:
        return self.batch * self.cursors * self.time * self.bins


class Inputs:
    """What a scan of this size takes, from one-hot starts, and a gradient to send back."""

    def __init__(self, size: Size, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)
        self.size, self.device = size, device
        self.start = one_hot_start(size.batch, size.cursors, size.time, dtype=dtype, device=device)
        logits = torch.randn(size.batch, size.time, size.cursors, 6, generator=generator).to(device, dtype)
        self.weights = torch.softmax(logits, -1).transpose(1, 2).requires_grad_()
        self.gamma = (1.5 + 2 * torch.rand(size.cursors, generator=generator)).to(device, dtype).requires_grad_()
        upstream = torch.randn(size.time, size.bins, size.batch, size.cursors, generator=generator)
        self.upstream = upstream.to(device, dtype).permute(2, 3, 0, 1)

    def both_ways(self, scan: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Gradients:
        histograms = scan(self.start, self.weights, self.gamma)
        return [histograms.detach(), *torch.autograd.grad(histograms, (self.weights, self.gamma), self.upstream)]


class Kernels:
    """The Triton kernels as training runs them: rows of 16 bits, and an upstream gradient of 16 bits with scales."""

    def __init__(self, inputs: Inputs) -> None:
        from prism.ops.histogram_triton import layout, row_order

        size, device = inputs.size, inputs.device
        self.form = layout(size.bins, half=True)
        self.start, self.gamma = inputs.start, inputs.gamma.detach()
        self.weights = inputs.weights.detach().transpose(1, 2).contiguous()
        self.places = torch.arange(size.cursors, dtype=torch.int32, device=device)
        shape = (size.batch, size.time, size.cursors, self.form.columns)
        self.rows = torch.empty(shape, dtype=torch.float16, device=device)
        self.columns = row_order(self.form).argsort(stable=True)[: size.bins].to(device)
        self.upstream = torch.zeros(shape, dtype=torch.float16, device=device)
        self.upstream[..., self.columns] = inputs.upstream.transpose(1, 2).half()
        self.scales = torch.ones(shape[:3], device=device)
        self.normalisers = self.forward()

    def forward(self) -> Tensor:
        from prism.ops.histogram_triton import run_forward

        return run_forward(self.start, self.weights, self.gamma, None, 0, 1e-8, self.form, self.rows, self.places)

    def backward(self) -> tuple[Tensor, Tensor]:
        from prism.ops.histogram_triton import run_backward

        _, weights, gamma, _ = run_backward(
            self.start, self.weights, self.gamma, None, 0, 1e-8, self.form, self.rows, self.places, self.normalisers,
            self.upstream, self.scales,
        )
        return weights, gamma

    def both_ways(self) -> Gradients:
        self.normalisers = self.forward()
        weights, gamma = self.backward()
        return [self.rows[..., self.columns].transpose(1, 2), weights.transpose(1, 2), gamma]


def compiled_scan(start: Tensor, weights: Tensor, gamma: Tensor, step: Callable[..., Tensor]) -> Tensor:
    """The loop of the reference around a step that `torch.compile` has made."""
    histogram, histograms, per_chain = start, [], gamma.expand(start.shape[:2])
    for t in range(weights.shape[2]):
        histogram = step(histogram, weights[:, :, t], per_chain, None, 1e-8)
        histograms.append(histogram)
    return torch.stack(histograms, dim=2)


def forms_of(inputs: Inputs) -> dict[str, Form]:
    """Every form of the scan there is on the device of the inputs; the first is what training takes."""

    def by(method: Method) -> Form:
        return partial(inputs.both_ways, partial(histogram_scan, method=method))

    if inputs.device.type != "cuda" or not has_triton():
        return {"adjoint": by("adjoint"), "reference": by("reference")}
    step = torch.compile(histogram_step, dynamic=False)
    return {
        "kernels, 16-bit rows": Kernels(inputs).both_ways,
        "kernels, float32": by("triton"),
        "compiled, captured": partial(inputs.both_ways, partial(compiled_scan, step=step)),
        "reference": by("reference"),
    }


def check(size: Size, device: torch.device) -> dict[str, list[float]]:
    """The error of each form against float64, of histograms, weights' and gamma's gradient; refused if too large."""
    few = Size(size.name, min(size.batch, CHECKED_BATCH), size.cursors, size.time)
    exact = Inputs(few, device, torch.float64).both_ways(partial(histogram_scan, method="reference"))
    errors = {}
    for name, form in forms_of(Inputs(few, device)).items():
        found = form()
        errors[name] = [_relative_error(a, e) for a, e in zip(found, exact, strict=True)]
        allowed = AGREEMENT[torch.float16 if "16-bit" in name else torch.float32]
        if not max(errors[name]) < allowed:
            raise RunError(f"the form '{name}' of the scan is wrong by {max(errors[name]):.1e} (relative norm, allowed "
                           f"{allowed:.0e}): no times are given")
    return errors


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    error = float((actual.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf


def measure(size: Size, repeats: int, device: torch.device, ceilings: Ceilings | None) -> dict[str, Any]:
    """Forward and backward together of every form, and apart of the kernels. Nothing is said that disagrees."""
    inputs = Inputs(size, device)
    calls: dict[str, Call] = {}
    memories: dict[str, PeakMemory] = {}
    for name, form in forms_of(inputs).items():  # before the check, whose float64 would be a CPU's peak of memory
        with PeakMemory(device) as memories[name]:
            calls[name] = form if name == "reference" else replayed(form, device)  # plain autograd, launches and all
            calls[name]()
    timings = time_in_turn(calls, repeats, device)
    errors = check(size, device)
    print(f"\n{size.name}: B = {size.batch}, {size.cursors} cursors, T = {size.time}, L = {size.bins}")
    forms = {}
    for name, timing in timings.items():
        forms[name] = {**timing.to_json(), "peak_bytes": memories[name].bytes, "errors": errors[name]}
        _say(name, timing, size, str(memories[name]))
    ours = next(iter(forms))
    ratios = {name: one["median"] / forms[ours]["median"] for name, one in forms.items() if name != ours}
    for name, ratio in ratios.items():
        print(f"  {ours}: {ratio:.1f} times as fast as {name}")
    row: dict[str, Any] = {"size": asdict(size), "forms": forms, "ours": ours, "ratios": ratios}
    if ceilings is not None:
        row["parts"] = _parts(size, repeats, Kernels(inputs), device)
        row["floors"] = floors = ceilings.scan_floors(size.bin_steps)
        print("  floor" + "".join(f"   {name} {1e3 * seconds:.3f} ms" for name, seconds in floors.items()))
    return row


def _parts(size: Size, repeats: int, kernels: Kernels, device: torch.device) -> dict[str, Any]:
    calls = {"forward": replayed(kernels.forward, device), "backward": replayed(kernels.backward, device)}
    timings = time_in_turn(calls, repeats, device)
    for name, timing in timings.items():
        _say(f"kernels, {name}", timing, size)
    return {name: timing.to_json() for name, timing in timings.items()}


def _say(name: str, timing: Timing, size: Size, more: str = "") -> None:
    print(f"  {name:24} {timing!s:34}  {1e9 * timing.median / size.bin_steps:8.4f} ns a bin{more}", flush=True)


def growth(
    sizes: Mapping[str, list[Size]], repeats: int, device: torch.device, ceilings: Ceilings | None
) -> list[dict[str, Any]]:
    """What training's form costs along each axis: forward and backward together."""
    rows = []
    for axis, along in sizes.items():
        print(f"\nforward and backward, along {axis}")
        for size in along:
            name, form = next(iter(forms_of(Inputs(size, device)).items()))
            timing = time_in_turn({name: replayed(form, device)}, repeats, device)[name]
            per_chain = timing.median / (size.batch * size.cursors)
            rows.append({"axis": axis, "size": asdict(size), **timing.to_json(), "seconds_per_chain": per_chain,
                         "floors": None if ceilings is None else ceilings.scan_floors(size.bin_steps)})
            _say(f"B = {size.batch:3}, T = {size.time:3}", timing, size, f"  {1e6 * per_chain:9.3f} us a chain")
    return rows
