"""Peak memory of this process and everything below it, for the record of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

INTERVAL_S = 10.0
"""Adding up the pages of twenty processes takes a quarter of a second, which the job would wait for."""


class Peak:
    """Largest sum of proportional set sizes (shared pages counted once), bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def look(self) -> None:
        own = psutil.Process()
        total = 0
        for process in [own, *own.children(recursive=True)]:
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        self.bytes = max(self.bytes, total)


@contextmanager
def peak() -> Iterator[Peak]:
    """Watch until the block ends."""
    seen = Peak()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(INTERVAL_S):
            seen.look()

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(timeout=INTERVAL_S)
