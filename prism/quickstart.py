"""The first minute: PRISM beside a sinusoidal baseline of its size, copying."""

import dataclasses
import shlex
import shutil
import time
from pathlib import Path

from prism.config import RunConfig, preset
from prism.device import use_threads
from prism.errors import Interrupted
from prism.figures import draw_runs
from prism.progress import for_terminal
from prism.report import comparison_table
from prism.runs import RunFolder
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
        use_threads(None, config)
        try:
            results[encoding] = train(config, folder, resume=RunFolder.exists(folder), progress=for_terminal())
        except Interrupted as stop:
            given = "" if steps is None else f" --steps {steps}"
            stop.again = f"prism quickstart --seed {seed}{given} --out {shlex.quote(str(out))}"
            raise
    (drawing,) = draw_runs(list(folders.values()), out)
    print(f"\ncopy, trained on at most 10 digits, seed {seed}: exact match in % (95 % interval)\n")
    rows = {name: result["final"]["test"] for name, result in results.items()}
    print(comparison_table(rows, [str(length) for length in LENGTHS]))
    print(f"\n{time.perf_counter() - began:.0f} s in all; figure: {drawing.files[0]}\n")
    where = "" if shutil.which("prism") else "  . .venv/bin/activate\n"
    print(f"""try next:
{where}  prism generate {folders["prism"]} '27182818284590452353602874713526624977='
  prism evaluate {folders["prism"]} --lengths 400 --examples 50
  prism train reverse --max-length 10
  prism tasks""")
