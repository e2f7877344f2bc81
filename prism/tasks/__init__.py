"""The tasks: one file each, found by looking, named by their class."""

import sys
from functools import cache

from prism.discovery import choose, discover
from prism.tasks.task import Example, Task

__all__ = ["Example", "Task", "all_tasks", "find_task"]


@cache
def all_tasks() -> dict[str, type[Task]]:
    """Name -> class of every task in this folder."""
    return discover(sys.modules[__name__], Task)


def find_task(name: str) -> type[Task]:
    """The task called `name`, or an error that offers the nearest name."""
    return choose("task", name, all_tasks())
