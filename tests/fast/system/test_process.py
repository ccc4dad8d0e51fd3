"""Children: their output, failures, deadlines, and that nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_verifiers.errors import ComponentError, EngineError, ModelError, ProcessFailed
from miles_verifiers.system import process, progress

PYTHON = [sys.executable, "-c"]
GRANDCHILD = (
    "import subprocess, sys, time\n"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
    "open(sys.argv[1], 'w').write(str(p.pid))\n"
)


def gone(pid: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_output_goes_to_the_log_and_the_last_lines_come_back(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "child.log"
    lines = process.run([*PYTHON, "print('a'); print('b', end='')"], what="child", timeout=20, log=log)
    assert lines == ["a", "b"]
    assert log.read_text() == "a\nb\n"


def test_progress_of_a_child_is_passed_on_and_kept_out_of_the_log(tmp_path: Path) -> None:
    events: list[progress.Event] = []
    code = "from miles_verifiers.system.progress import report; report('half', 1, 2); print('text')"
    with progress.sent_to(events.append):
        process.run([*PYTHON, code], what="child", timeout=20, log=tmp_path / "log")
    assert events == [progress.Event("half", 1, 2)]
    assert (tmp_path / "log").read_text() == "text\n"


def test_a_failure_shows_exit_code_and_last_lines() -> None:
    with pytest.raises(EngineError) as caught:
        process.run([*PYTHON, "print('why'); raise SystemExit(7)"], what="engine", timeout=20, error=EngineError)
    assert caught.value.returncode == 7
    assert caught.value.tail == ["why"]
    assert "engine failed with exit code 7" in str(caught.value)
    assert "why" in str(caught.value)


def test_a_child_killed_by_a_signal_is_named_so() -> None:
    with pytest.raises(ProcessFailed, match="killed by SIGKILL"):
        process.run([*PYTHON, "import os; os.kill(os.getpid(), 9)"], what="child", timeout=20)


def test_the_deadline_ends_the_child_and_its_detached_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begun = time.monotonic()
    with pytest.raises(ProcessFailed, match="did not end within 1 s"):
        process.run([*PYTHON, GRANDCHILD + "time.sleep(60)", pid_file], what="child", timeout=1)
    assert time.monotonic() - begun < 10
    assert gone(int(pid_file.read_text()))


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = process.spawn([*PYTHON, code], log=tmp_path / "log")
    deadline = time.monotonic() + 10
    while process.tail_of(tmp_path / "log") != ["up"] and time.monotonic() < deadline:
        time.sleep(0.02)
    process.end_tree(child.pid, grace=0.3)
    assert child.wait(5) == -signal.SIGKILL


def test_a_pipe_held_open_by_a_grandchild_does_not_hold_us(tmp_path: Path) -> None:
    begun = time.monotonic()
    process.run([*PYTHON, GRANDCHILD, tmp_path / "pid"], what="child", timeout=30)
    assert time.monotonic() - begun < 10


def test_an_error_of_ours_crosses_from_the_child_as_itself() -> None:
    code = (
        "import sys; from miles_verifiers.errors import ModelError; from miles_verifiers.system.process import main_of_child\n"
        "def body(): raise ModelError('no tokenizer', where='models/x', next_step='add tokenizer.json')\n"
        "sys.exit(main_of_child(body))"
    )
    with pytest.raises(ModelError) as caught:
        process.run([*PYTHON, code], what="child", timeout=20)
    assert (caught.value.where, caught.value.next_step) == ("models/x", "add tokenizer.json")


def test_a_broken_error_line_still_says_something() -> None:
    with pytest.raises(ComponentError, match="cannot be read"):
        process.run([*PYTHON, "print('@error {}'); raise SystemExit(3)"], what="child", timeout=20)


def test_a_missing_program_is_named() -> None:
    with pytest.raises(ComponentError, match="cannot start /nowhere/python"):
        process.run(["/nowhere/python"], what="child", timeout=5)


PARENT = (
    "import sys, time; from pathlib import Path; from miles_verifiers.system import process\n"
    "child = process.spawn([sys.executable, '-c', sys.argv[2]], log=Path(sys.argv[1]))\n"
    "print(child.pid, flush=True); time.sleep(60)"
)
UNLEASHED = "print('up', flush=True); import time; time.sleep(60)"
LEASHED = f"from miles_verifiers.system.process import die_with_parent as d; d(); {UNLEASHED}"


@pytest.mark.parametrize(("code", "dies"), [(LEASHED, True), (UNLEASHED, False)])
def test_a_child_on_the_leash_dies_with_a_killed_parent(tmp_path: Path, code: str, dies: bool) -> None:
    parent = subprocess.Popen([*PYTHON, PARENT, str(tmp_path / "log"), code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        deadline = time.monotonic() + 20
        while process.tail_of(tmp_path / "log") != ["up"] and time.monotonic() < deadline:
            time.sleep(0.02)
        parent.kill()
        parent.wait()
        assert gone(pid, within=3.0 if dies else 0.5) is dies
    finally:
        parent.stdout.close()
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)


def test_interrupted_once_then_left_to_clean_up() -> None:
    code = (
        "import os, signal; from miles_verifiers.errors import Interrupted\n"
        "from miles_verifiers.system.process import interruptible\n"
        "try:\n"
        "  with interruptible():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    finally: os.kill(os.getpid(), signal.SIGTERM); print('cleaned')\n"
        "except Interrupted as error: print(error)\n"
    )
    assert process.run([*PYTHON, code], what="child", timeout=20) == ["cleaned", "interrupted by SIGINT"]


def test_the_childs_environment_carries_nothing_that_redirects_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("KEPT", "1")
    env = process.child_environment({"ADDED": "2"})
    assert "PYTHONPATH" not in env
    assert (env["KEPT"], env["ADDED"]) == ("1", "2")
