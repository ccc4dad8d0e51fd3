"""Where a long task is. Every room calls `report`; the process that owns the terminal decides how it looks.

A child prints its reports as marked lines on stdout, its parent (process.run) turns them back into events and passes them
on. So a report made three processes deep reaches the terminal, and code that reports needs no object handed to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

MARK = "@progress "
CHILD_VARIABLE = "MILES_VERIFIERS_PROGRESS"
"""Set for our children: print marked lines instead of plain ones."""
_MIN_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class Event:
    text: str
    done: int | None = None
    total: int | None = None


Sink = Callable[[Event], None]


def _default_sink(event: Event) -> None:
    if os.environ.get(CHILD_VARIABLE):
        print(MARK + json.dumps(asdict(event)), flush=True)
    else:
        count = f" {event.done}/{event.total}" if event.total is not None else ""
        print(f"{event.text}{count}", file=sys.stderr, flush=True)


_sink: Sink = _default_sink
_last: tuple[float, str] = (0.0, "")


def report(text: str, done: int | None = None, total: int | None = None) -> None:
    """Say where this process is: `text` in a few words, `done` of `total` where the count is known.

    Cheap enough to call in every loop: repeated reports of one text are thinned out, the last of a count never is.
    """
    global _last
    now = time.monotonic()
    at, before = _last
    finished = total is not None and done == total
    if text == before and not finished and now - at < _MIN_INTERVAL_S:
        return
    _last = (now, text)
    _sink(Event(text, done, total))


def parse(line: str) -> Event | None:
    """The event that a child's output line carries, or None for an ordinary line."""
    if not line.startswith(MARK):
        return None
    try:
        return Event(**json.loads(line[len(MARK) :]))
    except (ValueError, TypeError):
        return None


@contextmanager
def sent_to(sink: Sink) -> Iterator[None]:
    """Within the block, this process's events go to `sink`."""
    global _sink
    before, _sink = _sink, sink
    try:
        yield
    finally:
        _sink = before
