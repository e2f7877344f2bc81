"""The result of a run, and the three ways to tell how good it was, side by side.

    final   the last weights: the number to quote
    best    the weights that did best on validation at the training length; test lengths had no say in the choice
    top3    the paper's protocol, the mean of the three best test scores over training: optimistic
"""

from collections.abc import Mapping, Sequence
from typing import Any

from prism.architectures import Architecture, count_parameters
from prism.config import RunConfig
from prism.device import most_memory
from prism.runs import RunFolder, config_hash

Scores = Mapping[str, Mapping[str, Any]]  # length or subset -> a `Score` as JSON


def summarise(
    config: RunConfig, model: Architecture, folder: RunFolder, best: Scores, best_step: int | None, seconds: float,
    steps_per_second: float,
) -> dict[str, Any]:
    """What result.json says: enough to draw and quote from, without the run folder."""
    history = folder.evaluations()
    environment = folder.environment()
    return {
        "config": config.to_json(),
        "config_hash": config_hash(config.to_json()),
        "parameters": count_parameters(model),
        "final": {"step": config.steps, "test": dict(history[-1]["test"])},
        "best": {"step": best_step if best_step is not None else config.steps, "test": dict(best)},
        "top3": {"evaluations": len(history), "test": top_three(history)},
        "history": history,
        "seconds": seconds,  # of this process: a resumed run counts from its resume
        "cost": {"steps_per_second": steps_per_second, "peak_memory": most_memory(model.device)},  # likewise
        "environment": environment,
    }


def top_three(history: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per length, the mean of the three best exact-match rates of the evaluations (fewer, if there were fewer).

    >>> seen = [{"test": {"20": {"exact": exact}}} for exact in (0.1, 0.9, 0.5, 0.7)]
    >>> round(top_three(seen)["20"]["exact"], 3)
    0.7
    """
    lengths = history[-1]["test"] if history else {}
    means = {}
    for length in lengths:
        best = sorted((one["test"][length]["exact"] for one in history if length in one["test"]), reverse=True)[:3]
        means[length] = {"exact": sum(best) / len(best)}
    return means
