"""Compiles the kernels for an H200 as their launchers would launch them, without a GPU, and prints what came out.

Run as a program, in a process where Triton does not interpret: one JSON object a kernel and size. Nothing is launched:
a driver that is not there is told to compile and to stop.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from prism.ops import attention_triton, gate_triton, histogram_long
from prism.ops.histogram_triton import layout, run_backward, run_forward

PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BATCH, TIME, CURSORS = 2, 3, 12


class NoDriver:
    """Says it is an H200, and can do nothing."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


made: list[tuple[str, Any]] = []
run = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    made.append((self.__name__, kernel))
    return kernel


def disassembled(cubin: bytes) -> tuple[str, str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, code = ([PROGRAMS / "cuobjdump", "-res-usage", file.name], [PROGRAMS / "nvdisasm", "-c", file.name])
        return tuple(  # type: ignore[return-value]
            subprocess.run(one, capture_output=True, text=True, check=True).stdout for one in (usage, code)
        )


def facts(cubin: bytes) -> dict[str, Any]:
    """Registers, stack, the instructions of the longest loop, special functions, local-memory accesses."""
    usage, code = disassembled(cubin)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())  # type: ignore[union-attr]
    address, labels, pending, loop = 0, {}, [], []
    instructions: list[tuple[int, str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            pending.append(label.group(1))
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            address = int(found.group(1), 16)
            labels.update(dict.fromkeys(pending, address))
            pending = []
            instructions.append((address, found.group(2)))
            back = re.search(r"BRA.*?(\.L_x_\d+)", found.group(2))
            begin = labels.get(back.group(1), address) if back else address
            body = [text for at, text in instructions if begin <= at <= address]
            if begin < address and len(body) > len(loop):
                loop = body
    return {
        "registers": registers, "stack": stack, "instructions": len(instructions), "loop": len(loop),
        "special": sum(text.startswith("MUFU") for text in loop),
        "local": sum(text.startswith(("LDL", "STL")) for _, text in instructions),
    }


def scans(bins: int, half: bool, batch: int = BATCH, time: int = TIME, cursors: int = CURSORS) -> None:
    form = layout(bins, half)
    start, gamma = torch.rand(batch, cursors, bins), torch.rand(cursors) + 1
    weights = torch.rand(batch, time, cursors, 6)
    rows = torch.rand(batch, time, cursors, form.columns).to(form.dtype)
    places, scales = torch.arange(cursors, dtype=torch.int32), torch.ones(batch, time, cursors)
    normalisers = run_forward(start, weights, gamma, None, 0, 1e-8, form, rows, places)
    run_backward(
        start, weights, gamma, None, 0, 1e-8, form, rows, places, normalisers, rows.clone(), scales if half else None
    )


def everything() -> dict[str, list[tuple[str, Any]]]:
    """Case -> the kernels it compiled."""
    found = {}
    for bins, half in ((171, True), (577, True)):
        made.clear()
        scans(bins, half)
        found[f"scan of {bins} bins"] = list(made)
    made.clear()
    scans(9, False, 1, 1, 1)  # Triton makes constants of arguments that are 1: other code, which must compile too
    histogram_long.scan_long(torch.rand(1, 1, 9), torch.rand(1, 1, 1, 6), torch.rand(1) + 1, None, 1e-8)
    found["ones"] = list(made)
    made.clear()
    histogram_long.scan_long(torch.rand(2, 3, 8193), torch.rand(2, 3, 2, 6), torch.rand(3) + 1, None, 1e-8)
    logits = torch.rand(BATCH, TIME, CURSORS, 4)
    gate_triton.gate_weights_backward(logits, None, gate_triton.gate_weights(logits, None))
    query = torch.rand(BATCH, 7, 88, 32)
    bias = torch.rand(BATCH, 7, 88, 88)
    out, lse = attention_triton.attend(query, query, query, bias)
    attention_triton.attend_backward(out, query, query, query, bias, out, lse, True)
    longer = torch.rand(BATCH, 7, 284, 32)
    out, lse = attention_triton.attend(longer, longer, longer, None)
    attention_triton.attend_backward(out, longer, longer, longer, None, out, lse, False)
    vectors = torch.rand(BATCH, 88, 14, 64).half()
    scores = attention_triton.position_scores(vectors, vectors, torch.rand(7, 2))
    attention_triton.position_gradients(scores, vectors, vectors, torch.rand(7, 2))
    found["others"] = list(made)
    return found


def main() -> None:
    driver.set_active(NoDriver())
    JITFunction.run = compile_only  # type: ignore[method-assign]
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # as training multiplies
    for case, kernels in everything().items():
        for name, kernel in kernels:
            print(json.dumps({"case": case, "name": name, **facts(kernel.asm["cubin"])}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
