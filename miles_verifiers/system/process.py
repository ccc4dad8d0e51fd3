"""Child processes: started in a session of their own, watched, ended with all that they started.

Three guards together keep anything of ours from outliving us:
- the command line's process is a *subreaper* (prctl(2)): what its children leave behind becomes its own child, so that
  one walk over its descendants finds everything, whatever session it moved to;
- each of our children asks the kernel for a signal when its parent dies, which covers a parent that was killed;
- every wait has a deadline, and every way out of a wait ends the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from miles_verifiers import errors
from miles_verifiers.errors import ComponentError, Interrupted, MilesVerifiersError, ProcessFailed
from miles_verifiers.system import files, progress

PARENT_VARIABLE = "MILES_VERIFIERS_PARENT"
TAIL_LINES = 25
GRACE_S = 6.0
"""What a tree gets between SIGTERM and SIGKILL. An interrupted run must be gone within ten seconds."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave behind."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send `signum` to this process when the one that started it through this module dies.

    The kernel counts the death of the *thread* that forked, so `run` and `spawn` belong into a main thread. A parent that
    died before this call is noticed by its pid.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != int(parent):
        os.kill(os.getpid(), signum)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within the block SIGINT, SIGTERM and SIGHUP raise Interrupted, once; further ones do not disturb the cleaning up."""

    before = {each: signal.getsignal(each) for each in _HANDLED}
    arm()
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def arm() -> None:
    """Install the handlers of `interruptible`, again after a library replaced them (ray.init takes SIGTERM)."""
    for each in _HANDLED:
        signal.signal(each, _raise_interrupted)


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _raise_interrupted(signum: int, _frame: FrameType | None) -> None:
    for each in _HANDLED:
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(f"interrupted by {signal.Signals(signum).name}")


_REDIRECTING = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "UV_PYTHON", "UV_PROJECT_ENVIRONMENT")
"""What would make a child's interpreter import, or uv install, elsewhere than where it is told to."""


def redirections() -> dict[str, str]:
    """Those of these variables that the user has set; they are left out of every child."""
    own_venv = {"VIRTUAL_ENV": sys.prefix}  # an activated venv that runs us redirects nothing
    return {n: os.environ[n] for n in _REDIRECTING if os.environ.get(n) and os.environ[n] != own_venv.get(n)}


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child of another interpreter: without what would redirect its imports."""
    env = {k: v for k, v in os.environ.items() if k not in _REDIRECTING}
    # Whole libraries would be compiled anew at every start otherwise; the .pyc files go into our own venvs only.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env[PARENT_VARIABLE] = str(os.getpid())
    return env | dict(extra or {})


def spawn(
    argv: Sequence[str | Path], *, log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a long-lived child in its own session, its output appended to `log`. End it with `end_tree`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return _popen(argv, env=env, cwd=cwd, stdout=out)


def run(
    argv: Sequence[str | Path],
    *,
    what: str,
    timeout: float,
    log: Path | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    error: type[ProcessFailed] = ProcessFailed,
    next_step: str = "",
) -> list[str]:
    """Run a child to its end and return the last lines that it printed.

    `what` names it in messages ("uv venv", "conversion"). Its progress reports become ours, its other output goes to `log`
    and line by line to `on_line`. `env` replaces the default of `child_environment()`. A child of ours that ends with one
    of our errors (see `main_of_child`) raises that very error here. Raises `error` when the child fails or `timeout`
    seconds are over, with its exit code and last lines; in every case nothing of its tree is left.
    """
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    carried: list[MilesVerifiersError] = []
    deadline = time.monotonic() + timeout
    child = _popen(argv, env=env, cwd=cwd, stdout=subprocess.PIPE)
    try:
        with contextlib.ExitStack() as stack:
            out = None if log is None else stack.enter_context(_appending(log))
            for line in _lines(child, deadline):
                event = progress.parse(line)
                if event is not None:
                    progress.report(event.text, event.done, event.total)
                elif line.startswith(_ERROR_MARK):
                    carried.append(_parse_error(line))
                else:
                    tail.append(line)
                    if out is not None:
                        print(line, file=out, flush=True)
                    if on_line is not None:
                        on_line(line)
        code = child.poll()
    finally:
        end_tree(child.pid, grace=GRACE_S if child.poll() is None else 0.0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)  # killed: what still does not end hangs in the kernel, and waiting does not help
    if code == 0:
        return list(tail)
    if carried:
        raise carried[-1]
    ended = f"did not end within {timeout:.0f} s" if code is None else _exit_text(code)
    place = " ".join(str(part) for part in argv) + (f" (log: {log})" if log else "")
    raise error(f"{what} {ended}", where=place, next_step=next_step, returncode=code, tail=list(tail))


def end_tree(pid: int, grace: float = GRACE_S) -> None:
    """End process `pid` and all below it: SIGTERM to `pid`, which knows how to end its own, then SIGKILL to what is left."""
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    below = _descendants(root)
    if grace > 0:
        _signal(root, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and _alive(root):
            below |= _descendants(root)
            time.sleep(0.05)
    below |= _descendants(root)
    _kill({root, *below})


def end_descendants() -> None:
    """SIGKILL whatever is still below this process. Called last by a process that adopted orphans."""
    _kill(_descendants(psutil.Process()))


def tail_of(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a log file, [] where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


def main_of_child(body: Callable[[], None]) -> int:
    """The frame around a child's main function; returns its exit code.

    The child dies with its parent, and an error of our tree crosses to the parent's `run` as itself.
    """
    die_with_parent()
    try:
        with interruptible(), files.disk_errors_named():
            body()
    except MilesVerifiersError as error:
        if PARENT_VARIABLE in os.environ:
            print(_ERROR_MARK + _dump_error(error), flush=True)
        print(f"error: {error}", flush=True)
        return error.exit_code
    return 0


_ERROR_MARK = "@error "


def _dump_error(error: MilesVerifiersError) -> str:
    return json.dumps({"type": type(error).__name__, "state": {**error.__dict__}})


def _parse_error(line: str) -> MilesVerifiersError:
    try:
        data = json.loads(line[len(_ERROR_MARK) :])
        cls = getattr(errors, data["type"])
        error = cls(data["state"]["what"])
        error.__dict__.update(data["state"])
    except (ValueError, KeyError, AttributeError, TypeError):
        return ComponentError(f"a child process reported an error that cannot be read: {line[:300]}")
    assert isinstance(error, MilesVerifiersError)
    return error


def _popen(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None, cwd: Path | None, stdout: Any
) -> subprocess.Popen[bytes]:
    full = dict(child_environment() if env is None else env)
    full[PARENT_VARIABLE] = str(os.getpid())
    full[progress.CHILD_VARIABLE] = "1"
    try:
        return subprocess.Popen(
            [str(part) for part in argv],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env=full,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise ComponentError(f"cannot start {argv[0]}: {error.strerror}", where=str(cwd or Path.cwd())) from None


def _appending(log: Path) -> IO[str]:
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a", encoding="utf-8", errors="replace")


def _lines(child: subprocess.Popen[bytes], deadline: float) -> Iterator[str]:
    """Output lines until the child has ended, or the deadline is over.

    The pipe alone does not tell: a grandchild may hold it open after the child ended.
    """
    assert child.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector, child.stdout as pipe:
        os.set_blocking(pipe.fileno(), False)
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None
            chunk = None
            if selector.select(0.0 if ended else 0.2):
                chunk = os.read(pipe.fileno(), 65536)
            if chunk:
                # A carriage return redraws a line (progress bars of other tools); each redraw counts as one.
                *whole, pending = (pending + chunk).replace(b"\r", b"\n").split(b"\n")
                yield from (line.decode(errors="replace") for line in whole if line)
            elif ended:
                break
            elif chunk == b"":
                selector.unregister(pipe)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
                break
            if time.monotonic() > deadline:
                break
    if pending:
        yield pending.decode(errors="replace")


def _exit_text(code: int) -> str:
    if code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"failed with exit code {code}"


def _descendants(root: psutil.Process) -> set[psutil.Process]:
    try:
        return set(root.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, signum: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        _signal(process, signal.SIGKILL)
    # Not psutil.wait_procs: it reaps, and a Popen whose child was reaped elsewhere reports exit code 0.
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline and any(_alive(process) for process in processes):
        time.sleep(0.02)
