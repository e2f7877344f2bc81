"""The first three minutes: PRISM beside the paper's baseline on copying, at a laptop's size."""

import dataclasses
import time
from pathlib import Path

from prism.config import RunConfig, preset
from prism.device import use_threads
from prism.figures import draw_runs
from prism.progress import for_terminal
from prism.report import comparison_table
from prism.tasks import find_task
from prism.train import train

LENGTHS = (10, 20, 50, 100, 200)
ENCODINGS = ("prism", "sinusoidal")


def quickstart_config(encoding: str, seed: int, steps: int | None = None) -> RunConfig:
    """The quick preset on copy <= 10, with the table's lengths for a test at the end."""
    config = preset("quick", find_task("copy")(), encoding, seed=seed)
    evaluation = dataclasses.replace(config.evaluation, lengths=LENGTHS, examples=20)
    return dataclasses.replace(config, steps=config.steps if steps is None else steps, evaluation=evaluation)


def run(out: Path, seed: int, steps: int | None) -> None:
    """Trains both, prints one table, draws one figure. What is already trained is not trained again."""
    import matplotlib  # noqa: F401  (if it is missing, that is better known now than after the training)

    began = time.perf_counter()
    folders = {encoding: out / f"{encoding}-seed{seed}" for encoding in ENCODINGS}
    results = {}
    for encoding, folder in folders.items():
        config = quickstart_config(encoding, seed, steps)
        use_threads(None, config.model)
        resume = (folder / "config.json").exists()
        results[encoding] = train(config, folder, resume=resume, progress=for_terminal())
    figure = next(path for path in draw_runs(list(folders.values()), out) if path.suffix == ".png")
    print(f"\ncopy, trained on at most 10 digits, seed {seed}: exact match in % (95 % interval)\n")
    rows = {name: result["final"]["test"] for name, result in results.items()}
    print(comparison_table(rows, [str(length) for length in LENGTHS]))
    print(f"\n{time.perf_counter() - began:.0f} s in all; figure: {figure}\n")
    print(f"""try next:
  prism generate {folders["prism"]} '27182818284590452353602874713526624977='
  prism evaluate {folders["prism"]} --lengths 400 --examples 50
  prism train reverse --max-length 10
  prism tasks""")
