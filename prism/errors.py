"""The ways a command can end early on purpose: one sentence each, no traceback."""

import difflib
import signal
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: says what was wrong, what was given, what would be right. Exit code 2."""


class TooLong(UserError):
    """A sequence longer than a model can place: a sweep goes on without that length."""


class RunError(RuntimeError):
    """Work that could not be finished: a full disk, a broken checkpoint, a loss that is not finite. Exit code 1."""


class Interrupted(Exception):
    """A signal asked for the end and everything is saved. Exit code 128 and the signal's number, as shells have it."""

    again = ""  # the command that goes on; whoever knows it fills it in

    def __init__(self, received: int, step: int) -> None:
        self.signal, self.step = received, step
        super().__init__(f"stopped by {signal.Signals(received).name} after step {step}; all of it is saved")


def unknown(kind: str, given: str, known: Iterable[str]) -> UserError:
    """The error for a name nobody has, with the nearest names that exist.

    >>> print(unknown("task", "cpoy", ["copy", "reverse"]))
    unknown task 'cpoy'; did you mean 'copy'? (known: copy, reverse)
    """
    names = sorted(known)
    near = difflib.get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean '{near[0]}'?" if near else ";"
    return UserError(f"unknown {kind} '{given}'{hint} (known: {', '.join(names)})")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, the CPU's allocator (which has no error class of its own) or the GPU's ran out of memory."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or (
        "can't allocate memory" in str(error)
    )
