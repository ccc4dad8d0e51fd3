"""Progress: reported anywhere, thinned out, shown as lines or a bar, kept in the log."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from miles_verifiers.system import console, progress


def test_repeated_reports_are_thinned_out_but_the_last_of_a_count_never_is() -> None:
    events: list[progress.Event] = []
    with progress.sent_to(events.append):
        for done in range(1, 1001):
            progress.report("hashing", done, 1000)
    assert events[0] == progress.Event("hashing", 1, 1000)
    assert events[-1] == progress.Event("hashing", 1000, 1000)
    assert len(events) < 50


def test_a_new_text_is_never_held_back() -> None:
    events: list[progress.Event] = []
    with progress.sent_to(events.append):
        progress.report("a")
        progress.report("b")
    assert [event.text for event in events] == ["a", "b"]


@pytest.mark.parametrize(
    "line", ["hello", progress.MARK + "{", progress.MARK + '{"nonsense": 1}', progress.MARK + "[]"]
)
def test_a_line_that_is_no_report_is_an_ordinary_line(line: str) -> None:
    assert progress.parse(line) is None


def test_plain_lines_name_the_phase_and_the_log_has_every_report(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), force_terminal=False, width=200)
    with console.phase("train", tmp_path / "run.log", to=out):
        progress.report("step 1: rollouts, 12 tok/s", 1, 4)
        progress.report("step 1: rollouts, 14 tok/s", 2, 4)
        progress.report("step 1: rollouts, 15 tok/s", 4, 4)
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert "train ..." in shown
    assert "rollouts, 12 tok/s 1/4" in shown
    assert "rollouts, 14 tok/s" not in shown, "the same stem within seconds is shown once"
    assert "rollouts, 15 tok/s 4/4" in shown, "but its end always"
    assert (tmp_path / "run.log").read_text().count("tok/s") == 3


def test_on_a_terminal_there_is_a_bar(tmp_path: Path) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, width=120)
    with console.phase("convert", None, to=out):
        progress.report("hashing [/x]", 1, 2)  # text, not markup
    assert isinstance(out.file, io.StringIO)
    assert "convert" in out.file.getvalue()
    assert "1/2" in out.file.getvalue()
