"""Trained models to keep and to hand on: a run folder with its final weights, its result and a card, nothing else.

Whatever opens a run opens such a folder: `prism evaluate`, `prism generate`, `prism figures`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism import checkpoints
from prism.config import model_label
from prism.disk import explained, replace_file, to_json
from prism.errors import RunError, UserError
from prism.report import result_table
from prism.runs import CHECKPOINTS, CONFIG, ENVIRONMENT, RESULT, RunFolder

CARD = "CARD.md"


@dataclass(frozen=True)
class Kept:
    """A model that is kept, without its weights."""

    path: Path
    result: Mapping[str, Any]
    bytes: int

    def line(self) -> str:
        config, test = self.result["config"], self.result["final"]["test"]
        sweep = "  ".join(f"{name}: {100 * one['exact']:.1f}" for name, one in test.items())
        return (f"{self.path!s:28} {config['task']['name']} <= {config['max_length']}, {model_label(config)}, "
                f"{self.result['parameters'] / 1e6:.2f} M parameters, {self.bytes / 1e6:.1f} MB\n{'':28} {sweep}")


def export(run: str | Path, out: str | Path | None = None) -> Path:
    """Keeps a finished run's final model in the folder `out`, which must be new."""
    from prism.trained import open_run, weights

    folder = RunFolder.open(run)
    named = Path("models", f"{folder.config['task']['name']}-{folder.config['max_length']}")
    path = named if out is None else Path(out)
    result = folder.result()
    if result is None:
        raise UserError(f"{run} is not finished: train it to its end first (--resume)")
    if path.exists():
        raise UserError(f"{path} exists already: choose another --out")
    step = result["final"]["step"]
    trained = open_run(run, step)
    with explained("create", path):
        path.mkdir(parents=True)
    checkpoints.save(path / CHECKPOINTS, step, weights(trained.model), {"step": step})
    for name, content in ((CONFIG, folder.config), (ENVIRONMENT, folder.environment()), (RESULT, result)):
        replace_file(path / name, to_json(content, name, indent=1))
    replace_file(path / CARD, card(path, result).encode())
    return path


def kept_in(folder: str | Path) -> list[Kept]:
    """The models of a folder, by name."""
    found = []
    with explained("read", Path(folder)):
        if not Path(folder).is_dir():
            raise UserError(f"there is no folder {folder}; prism export RUN --out {folder}/NAME puts a model there")
        places = sorted(place for place in Path(folder).iterdir() if RunFolder.exists(place))
    for place in places:
        result = RunFolder.open(place).result()
        if result is None:
            raise RunError(f"{place} has no {RESULT}: it is a run that is not finished, not a model that was exported")
        size = sum(file.stat().st_size for file in (place / CHECKPOINTS).rglob("*") if file.is_file())
        found.append(Kept(place, result, size))
    return found


def card(path: Path, result: Mapping[str, Any]) -> str:
    """What a reader wants to know of a model before using it."""
    config, environment = result["config"], result["environment"]
    hardware = ", ".join(environment["gpus"]) or environment["cpu"]
    return f"""\
# {path.name}

A model of {result["parameters"] / 1e6:.2f} M parameters (`{model_label(config)}`) \
for the task `{config["task"]["name"]}`, trained from scratch on examples of at most {config["max_length"]}.

- data: drawn by `prism` from seed {config["seed"]}, {config["batch_size"]} examples a step
- steps: {config["steps"]:,}, {result["seconds"] / 60:.1f} minutes on {hardware}
- preset `{config["preset"]}`; every setting is in [{CONFIG}]({CONFIG})
- code: commit {environment["commit"]}, torch {environment["torch"]}
- weights: final, as safetensors, with a SHA-256 manifest

```
{result_table(result)}
```

    prism evaluate {path} --lengths {next(iter(result["final"]["test"]))}
    prism generate {path} 'PROMPT'
"""
