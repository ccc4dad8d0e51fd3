"""What a person sees: the phase, how far it is, and at the end a table. In a pipe or in CI plain lines, never a blank screen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from miles_verifiers.system import progress

PLAIN_INTERVAL_S = 5.0
"""In plain mode a phase whose text stays the same is shown this often."""

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def phase(name: str, log: Path | None, *, to: Console = out) -> Iterator[None]:
    """Show the progress of one phase until the block ends; the same lines go to `log`."""
    shown: _Live | _Plain = _Live(name, to) if to.is_terminal else _Plain(name, to)
    begun = time.monotonic()

    def sink(event: progress.Event) -> None:
        shown.show(event)
        if log is not None:
            _append(log, f"[{name} {time.monotonic() - begun:.1f}s] {_text(event)}")

    with shown, progress.sent_to(sink):
        yield


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    grid = Table(title=title, title_justify="left", expand=False)
    for column in columns:
        grid.add_column(column, overflow="fold")
    for row in rows:
        grid.add_row(*row)
    out.print(grid)


def fail(text: str) -> None:
    err.print(f"error: {text}", markup=False)


class _Plain:
    def __init__(self, name: str, to: Console) -> None:
        self._name, self._to = name, to
        self._begun = time.monotonic()
        self._last = ("", 0.0)

    def __enter__(self) -> None:
        self._to.print(f"{self._name} ...", markup=False)

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: progress.Event) -> None:
        text, at = self._last
        now = time.monotonic()
        # Texts such as "rollout 1: 52 tok/s" change all the time: their first word group is what counts as new.
        stem = event.text.split(":")[0]
        if stem == text and now - at < PLAIN_INTERVAL_S and not (event.total and event.done == event.total):
            return
        self._last = (stem, now)
        self._to.print(f"{self._name} {now - self._begun:6.1f}s  {_text(event)}", markup=False)


class _Live:
    def __init__(self, name: str, to: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.fields[phase]}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=to,
            transient=True,
        )
        self._name = name
        self._task: TaskID | None = None

    def __enter__(self) -> None:
        self._progress.start()
        self._task = self._progress.add_task("", total=None, phase=self._name)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: progress.Event) -> None:
        assert self._task is not None
        self._progress.update(
            self._task,
            description=event.text,
            total=event.total,
            completed=event.done or 0,
        )


def _text(event: progress.Event) -> str:
    return event.text if event.total is None else f"{event.text} {event.done}/{event.total}"


def _append(log: Path, line: str) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        print(line, file=file)
