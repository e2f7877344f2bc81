"""The curriculum: which longest example a step may see."""

from prism.config import CurriculumConfig


def longest_at(step: int, curriculum: CurriculumConfig, max_length: int) -> int:
    """The longest training example of this step (0-based).

    >>> paper = CurriculumConfig()
    >>> [longest_at(step, paper, 40) for step in (0, 5_000, 10_000, 20_000, 30_000, 149_999)]
    [5, 10, 20, 30, 40, 40]
    >>> [longest_at(step, paper, 9) for step in (0, 5_000, 10_000)]
    [5, 9, 9]
    """
    first = 0
    longest = 0
    for longest, steps in curriculum.stages:
        first += steps
        if step < first:
            return min(longest, max_length)
    grown = longest + curriculum.growth * (1 + (step - first) // curriculum.growth_steps)
    return min(grown, max_length)
