"""The histogram scan: every form of it at one size, agreement first; and what it costs as sequences and batches grow.

Dimensions: batch; cursors; time; bins = 2 time + 1.
"""

import copy
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prism.bench.ceilings import Ceilings
from prism.bench.timing import Call, PeakMemory, Timing, replayed, time_in_turn
from prism.errors import RunError
from prism.ops.dispatch import has_triton
from prism.ops.histogram import Method, histogram_scan, histogram_step, one_hot_start, scan_step_by_step

# ||out - ref|| / ||ref|| against float64: float32 forms, and forms that keep histograms in 16 bits.
AGREEMENT = {torch.float32: 2e-5, torch.float16: 5e-4}
CHECKED_CURSORS = 8  # of one sequence, on which forms are compared with float64 before they are timed
REPLAYED = 1e-6  # ... and a captured form with itself, at the whole size

Gradients = list[Tensor]  # the histograms, and the gradients of weights and gamma


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


@dataclass(frozen=True)
class Form:
    """A way to scan forward and backward."""

    call: Call  # what is timed
    found: Callable[[Any], Gradients] = list  # what it returned, as all forms have it
    captured: bool = True  # on a GPU, as a CUDA graph


class Inputs:
    """What a scan of this size takes, from one-hot starts, and a gradient to send back."""

    def __init__(self, size: Size, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.size, self.device = size, device
        self.start = one_hot_start(size.batch, size.cursors, size.time, dtype=torch.float32, device=device)
        logits = normal(size.batch, size.time, size.cursors, 6)
        self.weights = torch.softmax(logits, -1).transpose(1, 2).requires_grad_()
        self.gamma = (1.5 + normal(size.cursors).abs()).requires_grad_()
        self.upstream = normal(size.batch, size.time, size.cursors, size.bins).transpose(1, 2)

    def exact(self) -> "Inputs":
        """The same numbers in float64."""
        other = copy.copy(self)
        other.start, other.upstream = self.start.double(), self.upstream.double()
        other.weights, other.gamma = (one.detach().double().requires_grad_() for one in (self.weights, self.gamma))
        return other

    def by(self, scan: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor | None = None) -> Gradients:
        histograms = scan(self.start, self.weights, self.gamma)
        given = self.upstream if upstream is None else upstream
        return [histograms.detach(), *torch.autograd.grad(histograms, (self.weights, self.gamma), given)]


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

    def both_ways(self) -> tuple[Tensor, Tensor]:
        self.normalisers = self.forward()
        return self.backward()

    def found(self, made: tuple[Tensor, Tensor]) -> Gradients:
        weights, gamma = made
        return [self.rows[..., self.columns].transpose(1, 2), weights.transpose(1, 2), gamma]


def _kernels(inputs: Inputs) -> Form:
    kernels = Kernels(inputs)
    return Form(kernels.both_ways, kernels.found)


def _adjoint(inputs: Inputs) -> Form:
    """With an upstream gradient that lies as its histograms do, as training's does."""
    upstream = inputs.upstream.permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    return Form(partial(inputs.by, partial(histogram_scan, method="adjoint"), upstream))


def _by(method: Method, captured: bool = True) -> Callable[[Inputs], Form]:
    return lambda inputs: Form(partial(inputs.by, partial(histogram_scan, method=method)), captured=captured)


def _compiled(inputs: Inputs) -> Form:
    """The loop of the reference around a step that `torch.compile` has made."""
    step = torch.compile(histogram_step, dynamic=False)
    return Form(partial(inputs.by, partial(scan_step_by_step, step=step)))


def forms_on(device: torch.device) -> dict[str, Callable[[Inputs], Form]]:
    """Every form of the scan there is on a device; the first is what training takes."""
    if device.type != "cuda" or not has_triton():
        return {"adjoint": _adjoint, "reference": _by("reference")}
    return {
        "kernels, 16-bit rows": _kernels, "kernels, float32": _by("triton"), "compiled, captured": _compiled,
        "reference": _by("reference", captured=False),  # plain autograd, launches and all
    }


def check(size: Size, device: torch.device, names: Collection[str]) -> dict[str, list[float]]:
    """The error of forms against float64, of histograms, weights' and gamma's gradient; refused if too large."""
    few = Inputs(Size(size.name, 1, min(size.cursors, CHECKED_CURSORS), size.time), device)
    exact = few.exact().by(partial(histogram_scan, method="reference"))
    errors = {}
    for name in names:
        form = forms_on(device)[name](few)
        errors[name] = [_relative_error(a, e) for a, e in zip(form.found(form.call()), exact, strict=True)]
        _refuse(name, max(errors[name]), AGREEMENT[torch.float16 if "16-bit" in name else torch.float32])
    return errors


def _refuse(name: str, error: float, allowed: float) -> None:
    if not error < allowed:
        raise RunError(f"the form '{name}' of the scan is wrong by {error:.1e} (relative norm, allowed {allowed:.0e}): "
                       "no times are given")


def _relative_error(actual: Tensor, exact: Tensor) -> float:
    error = float((actual.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf


def measure(size: Size, repeats: int, device: torch.device, ceilings: Ceilings | None) -> dict[str, Any]:
    """Forward and backward together of every form, and apart of the kernels. Nothing is said that disagrees."""
    inputs = Inputs(size, device)
    forms: dict[str, Form] = {}
    calls: dict[str, Call] = {}
    memories: dict[str, PeakMemory] = {}
    for name, make in forms_on(device).items():  # before the check, whose float64 would be a CPU's peak of memory
        with PeakMemory(device) as memories[name]:
            form = forms[name] = make(inputs)
            calls[name] = replayed(form.call, device) if form.captured else form.call
            calls[name]()
    timings = time_in_turn(calls, repeats, device)
    errors = check(size, device, forms)
    if device.type == "cuda":
        for name, form in forms.items():
            again = [one.clone() for one in form.found(calls[name]())]
            _refuse(f"{name}, replayed", max(map(_relative_error, again, form.found(form.call()))), REPLAYED)
    print(f"\n{size.name}: B = {size.batch}, {size.cursors} cursors, T = {size.time}, L = {size.bins}")
    found = {}
    for name, timing in timings.items():
        found[name] = {**timing.to_json(), "peak_bytes": memories[name].bytes, "errors": errors[name]}
        _say(name, timing, size, str(memories[name]))
    ours = next(iter(found))
    ratios = {name: one["median"] / found[ours]["median"] for name, one in found.items() if name != ours}
    for name, ratio in ratios.items():
        print(f"  {ours}: {ratio:.1f} times as fast as {name}")
    row: dict[str, Any] = {"size": asdict(size), "forms": found, "ours": ours, "ratios": ratios}
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
            name, make = next(iter(forms_on(device).items()))
            check(size, device, [name])
            form = make(Inputs(size, device))
            timing = time_in_turn({name: replayed(form.call, device)}, repeats, device)[name]
            per_chain = timing.median / (size.batch * size.cursors)
            rows.append({"axis": axis, "size": asdict(size), **timing.to_json(), "seconds_per_chain": per_chain,
                         "floors": None if ceilings is None else ceilings.scan_floors(size.bin_steps)})
            _say(f"B = {size.batch:3}, T = {size.time:3}", timing, size, f"  {1e6 * per_chain:9.3f} us a chain")
    return rows
