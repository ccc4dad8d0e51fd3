"""Runs model-written programs under limits, one at a time per call, from an event loop. Linux.

    outcome = await run_confined("print(6 * 7)")     # Outcome(ending="exit", code=0, stdout="42\\n", ...)
    await confinement()                              # {"network": "namespace", "files": "own root", ...}

What always holds: wall-clock and CPU time, memory, size of output and files, open files, an environment of four harmless
variables, stdin at its end, an interpreter without site-packages, everything ended and removed afterwards. What depends on the
host (see jail.py) is found out once per process by running a small program with it; what is refused is left out and said.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from . import jail

Ending = Literal["exit", "signal", "time", "output", "abandoned", "setup", "empty"]

# Isolated and without site-packages, both for safety and because it starts in 15 ms; so it must be told where we are.
# By its own package's name, and by the path without following links: two packages share this file.
_BOOT = f"import sys; sys.path.append(sys.argv[1]); from {__package__}.confine import main; main()"
_PACKAGES = str(Path(__file__).absolute().parent.parent)
_GRACE_SECONDS = 10.0
"""What the supervisor may need beyond the program's own time, on a machine that is busy."""


class SandboxError(RuntimeError):
    """A program could not be run as asked. Says nothing about the program: its rollout has an error, not a zero."""


@dataclass(frozen=True, slots=True)
class Limits:
    wall_seconds: float = 3.0
    """From the interpreter's start; a program that prints a number needs 0.02."""
    cpu_seconds: int = 2
    memory_bytes: int = 256 << 20
    """Address space; the interpreter itself takes about 20 MiB."""
    output_bytes: int = 64 << 10
    """Standard output and standard error together."""
    file_bytes: int = 1 << 20
    """Of one file; with a root of its own, four times that for all."""
    files: int = 32
    """Files and folders, with a root of its own."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one program.

    `ending`: "exit" (by itself), "signal" (by a signal, such as the CPU limit's), "time" or "output" (ended for exceeding that
    limit), "empty" (there was none). `code` is the exit code, or the signal's number. `seconds` is wall-clock time
    from the interpreter's start to the program's end.
    """

    ending: Ending
    code: int = -1
    stdout: str = ""
    stderr: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.ending == "exit" and self.code == 0


async def run_confined(source: str, limits: Limits = LIMITS, features: Sequence[str] | None = None) -> Outcome:
    """Run one Python program. Cancelling ends the program; no process and no file of it is left.

    Args:
        source: the program. Blank: nothing is started.
        limits: what it may use.
        features: of jail.py; None takes all that the host allows.

    Raises:
        SandboxError: a feature was refused, or the supervisor failed.
    """
    if not source.strip():
        return Outcome("empty")
    if features is None:
        features = await asyncio.to_thread(features_of_host)
    if unknown := set(features) - set(jail.FEATURES):
        raise SandboxError(f"unknown features: {', '.join(sorted(unknown))}; there are {', '.join(jail.FEATURES)}")
    async with _slots():
        return await _supervised(source, limits, features)


async def confinement() -> dict[str, str]:
    """What holds on this host, in words."""
    return describe(await asyncio.to_thread(features_of_host))


def describe(features: Sequence[str]) -> dict[str, str]:
    def first(*choices: tuple[str, str], otherwise: str) -> str:
        return next((words for feature, words in choices if feature in features), otherwise)

    return {
        "network": first(("network", "namespace"), ("calls", "sockets refused"), otherwise="open"),
        "files": first(("files", "own root"), ("paths", "landlock"), otherwise="as the user's"),
        "processes": first(("processes", "namespace"), ("calls", "refused"), otherwise="swept"),
        "identity": first(("identity", "nobody"), ("users", "user namespace"), otherwise="same user"),
        "calls": first(("calls", "filtered"), otherwise="all"),
        "resources": "limited",
    }


@functools.cache
def _probed() -> tuple[str, ...]:
    return asyncio.run(_probe())


_probing = threading.Lock()


def features_of_host() -> tuple[str, ...]:
    """The features of jail.py that this host allows; found out by the first call in a process."""
    with _probing:  # the first rollouts come all at once
        return _probed()


async def _probe() -> tuple[str, ...]:
    """All at once where that works; otherwise one after another, each tried on top of those that work."""
    if os.geteuid() == 0:
        ways = [["network"], ["processes"], ["files"], ["identity"], ["calls"], ["paths"]]
    else:
        ways = [["users", "network"], ["users", "processes"], ["users", "files"], ["calls"], ["paths"]]
    allowed: list[str] = []
    if await _works(everything := _union(ways)):
        return tuple(everything)
    for way in ways:
        if await _works(tried := _union([allowed, way])):
            allowed = tried
    if not allowed:
        await _supervised("print(42)", LIMITS, [])  # raises, and says why not even the bare minimum works
    return tuple(allowed)


def _union(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in lists for name in names))


async def _works(features: Sequence[str]) -> bool:
    try:
        outcome = await _supervised("print(6 * 7)", Limits(wall_seconds=_GRACE_SECONDS), features)
    except SandboxError:
        return False
    return outcome.ok and outcome.stdout == "42\n"


async def _supervised(source: str, limits: Limits, features: Sequence[str]) -> Outcome:
    folder = tempfile.mkdtemp(prefix="code-golf-")
    try:
        request = {"source": source, "folder": folder, "features": list(features), "limits": asdict(limits)}
        answer = await _ask(json.dumps(request).encode() + b"\n", limits.wall_seconds + _GRACE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if answer["ending"] == "setup":
        raise SandboxError(f"the host refused a limit (of {', '.join(features) or 'none'}): {answer['stderr']}")
    return Outcome(**answer)


async def _ask(request: bytes, seconds: float) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", *(["-B"] if sys.dont_write_bytecode else []), "-c", _BOOT, _PACKAGES),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"LC_ALL": "C.UTF-8"},
        start_new_session=True,  # Ctrl-C in the terminal is for the caller, who ends this in order
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(seconds):
            process.stdin.write(request)
            await process.stdin.drain()
            answer = await process.stdout.read()  # bounded: the supervisor bounds what the program prints
            if not answer:
                complaint = (await process.stderr.read()).decode(errors="replace")
                raise SandboxError(f"the supervisor of a program failed: {complaint[-1000:]}")
            outcome: dict[str, Any] = json.loads(answer)
            return outcome
    except TimeoutError:
        raise SandboxError(f"no answer about a program within {seconds:.0f} s") from None
    except ConnectionError:
        raise SandboxError("the supervisor of a program ended before it had read the request") from None
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Closing stdin makes the supervisor end its program and itself; killing it is for when it does not."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(2):
            await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()


_slots_by_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _slots() -> asyncio.Semaphore:
    """How many programs may run at once: few, since their times are compared, but enough that sleepers do not block."""
    loop = asyncio.get_running_loop()
    if loop not in _slots_by_loop:
        _slots_by_loop[loop] = asyncio.Semaphore(max(4, len(os.sched_getaffinity(0))))
    return _slots_by_loop[loop]
