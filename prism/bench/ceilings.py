"""What a GPU can do at most, measured, and the least time that a scan can take on it.

A bin of a step needs two special functions (a logarithm and a power of two) each way, whatever the kernel; and each
way its histogram, in 16 bits, crosses the card's memory once, on the way back with its gradient.
"""

from dataclasses import asdict, dataclass

import torch

from prism.bench.timing import replayed, time_in_turn

SPECIAL_FUNCTIONS, ROW_BYTES = 2, 2  # a bin of a step, each way
ROUNDS = 4096


@dataclass(frozen=True)
class Ceilings:
    """Rates a second, measured here."""

    bytes_moved: float  # read plus written, by a large copy
    special_functions: float  # powers of two and logarithms
    tf32_flops: float
    bf16_flops: float

    def scan_floors(self, bin_steps: int) -> dict[str, float]:
        """Seconds of forward and backward: the slower of arithmetic and memory each way."""
        arithmetic = SPECIAL_FUNCTIONS * bin_steps / self.special_functions
        forward = max(arithmetic, ROW_BYTES * bin_steps / self.bytes_moved)
        backward = max(arithmetic, 2 * ROW_BYTES * bin_steps / self.bytes_moved)
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def measure_ceilings(device: torch.device, repeats: int) -> Ceilings:
    """A large copy, large matrix products on random numbers, and a loop of nothing but special functions."""
    from prism.bench.special_functions import special_functions

    source = torch.randn(1 << 29, device=device)
    target = torch.empty_like(source)
    factor = torch.randn(8192, 8192, device=device)
    half = factor.bfloat16()
    seeds = torch.rand(132 * 64 * 128, device=device)
    calls = {
        "copy": lambda: target.copy_(source),
        "special": lambda: special_functions(seeds, ROUNDS),
        "tf32": lambda: factor @ factor,
        "bf16": lambda: half @ half,
    }
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        found = time_in_turn({name: replayed(call, device) for name, call in calls.items()}, repeats, device)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    flops = 2 * 8192**3
    ceilings = Ceilings(
        2 * source.nbytes / found["copy"].median, 2 * ROUNDS * seeds.numel() / found["special"].median,
        flops / found["tf32"].median, flops / found["bf16"].median,
    )
    print(f"ceilings measured: memory {ceilings.bytes_moved / 1e12:.2f} TB/s, special functions "
          f"{ceilings.special_functions / 1e12:.2f} T/s, matrix products {ceilings.tf32_flops / 1e12:.0f} TFLOP/s in "
          f"tf32 and {ceilings.bf16_flops / 1e12:.0f} in bf16", flush=True)
    return ceilings
