"""The contract of a method that is no causal next-token model, or needs more than one training.

It trains on the batches, and is tested on the examples, that every other model gets, under the same terms: those of the
Transformer without positions of a preset. Its scores are counted alike; they answer a question that is made easier by
what it is `told`, and a table that shows them has to say so.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from prism.config import RunConfig
from prism.disk import replace_file, to_json
from prism.environment import describe_environment
from prism.errors import UserError
from prism.evaluate import Score

Report = Callable[[str], None]


class Method:
    """A way to train and test; a new one is one new file in this folder."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line
    citation: ClassVar[str]
    told: ClassVar[str]  # in one sentence: what it is told that the others are not
    tasks: ClassVar[tuple[str, ...]]  # those it can be run on as its authors define it

    def train_and_test(self, terms: RunConfig, device: str, report: Report) -> tuple[Mapping[str, Score], int]:
        """Scores by test length, `terms.test_lengths()`, and the number of its parameters.

        `terms` decide task, seed, steps, batches, curriculum, optimiser and size; `report` hears how it goes.
        """
        raise NotImplementedError


def run(
    method: type[Method], terms: RunConfig, device: str = "cpu", report: Report = lambda line: None,
    path: Path | None = None,
) -> dict[str, Any]:
    """Trains and tests a method; everything one needs to judge its scores, also written to `path`."""
    if terms.task.name not in method.tasks:
        raise UserError(f"{method.name} is defined for {' and '.join(method.tasks)}; got {terms.task.name}")
    begun = time.monotonic()
    scores, parameters = method().train_and_test(terms, device, report)
    result = {
        "method": method.name, "citation": method.citation, "told": method.told,
        "terms": terms.to_json(), "seed": terms.seed, "parameters": parameters,
        "scores": {length: score.to_json() for length, score in scores.items()},
        "seconds": round(time.monotonic() - begun, 1), "environment": describe_environment(),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(result, path.name, indent=1) + b"\n")
    return result
