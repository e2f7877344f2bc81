"""Signals that ask for the end, collected so that it can be a clean one."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def collected(notice: str) -> Iterator[list[int]]:
    """Collects SIGINT, SIGTERM and SIGHUP (a closed terminal) instead of dying of them, and says so; a second one is
    final."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        signal.signal(number, before[signal.Signals(number)])
        os.write(2, f"{notice}; once more to stop at once\n".encode())  # print is not for signal handlers

    before: dict[signal.Signals, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before[number] = signal.signal(number, note)
    except ValueError:  # not the main thread: the signals are somebody else's to handle
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
