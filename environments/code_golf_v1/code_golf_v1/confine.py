"""The supervisor of one program: makes its namespaces, times it, bounds its output, ends it, says what came of it.

sandbox.py starts it anew for every program, in a bare interpreter (`python -I -S`). Three processes:

    caller      writes one line of JSON to stdin and keeps stdin open: when it closes, everything here ends
    supervisor  this module; answers with one line of JSON on stdout
    program     a fresh interpreter behind every limit (jail.py); the kernel ends it when the supervisor ends

Request: {"source", "folder", "features", "limits"}; the limits are sandbox.Limits.
Answer:  {"ending", "code", "stdout", "stderr", "seconds"}; sandbox.Outcome describes them.

Linux, standard library only. Loaded anew for every program, so it imports as little as it can.
"""

# Importing pathlib would take longer than all that happens here.
# ruff: noqa: PTH123, PTH208
from __future__ import annotations

import json
import os
import select
import signal
import time
from contextlib import suppress

from . import jail
from . import kernel as k

TYPE_CHECKING = False  # importing typing would cost more than a namespace does
if TYPE_CHECKING:
    from typing import Any, NoReturn

STDIN = 0
SWEEP_SECONDS = 1.0


def main() -> None:
    answer = supervise(json.loads(read_line(STDIN)))
    with suppress(BrokenPipeError):  # the caller has gone: nobody wants the answer
        print(json.dumps(answer), flush=True)


def supervise(request: dict[str, Any]) -> dict[str, Any]:
    """The request's program, run to its end. Whatever the program does is an answer, not an exception."""
    limits = request["limits"]
    trouble, trouble_end = os.pipe()  # closed on exec: what could not be set up, or end of file once the program runs
    out, out_end = os.pipe()
    err, err_end = os.pipe()
    try:
        readable = prepare(request)
        pid = os.fork()
    except OSError as error:
        return said("setup", stderr=str(error))
    if pid == 0:
        become_program(request, readable, trouble_end, out_end, err_end)
    for fd in (trouble_end, out_end, err_end):
        os.close(fd)
    if message := read_all(trouble):
        os.waitpid(pid, 0)
        return said("setup", stderr=message.decode(errors="replace"))
    started = time.perf_counter()
    ending, output = watch(pid, out, err, limits["wall_seconds"], limits["output_bytes"])
    seconds = time.perf_counter() - started
    status = end(pid)
    if ending == "exit" and os.WIFSIGNALED(status):
        ending = "signal"
    code = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    stdout, stderr = (output[fd][: limits["output_bytes"]].decode(errors="replace") for fd in (out, err))
    return said(ending, code, stdout, stderr, seconds)


def said(ending: str, code: int = -1, stdout: str = "", stderr: str = "", seconds: float = 0.0) -> dict[str, Any]:
    return {"ending": ending, "code": code, "stdout": stdout, "stderr": stderr, "seconds": seconds}


def prepare(request: dict[str, Any]) -> list[str]:
    """Put the program into its folder and leave the host's namespaces; the paths that the program may read."""
    folder, features = request["folder"], request["features"]
    with open(f"{folder}/{jail.PROGRAM}", "w", encoding="utf-8", errors="replace") as file:
        file.write(request["source"])
    if "identity" in features:
        os.chown(folder, jail.NOBODY, jail.NOBODY)
    readable = jail.readable_paths()
    k.call("prctl", k.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of the program become ours, for `sweep`
    jail.enter_namespaces(features)
    k.call("prctl", k.PR_SET_DUMPABLE, 0, 0, 0, 0)  # a program of the same user must not look into this process
    return readable


def become_program(request: dict[str, Any], readable: list[str], trouble: int, out: int, err: int) -> NoReturn:
    try:
        jail.become(request["folder"], request["features"], request["limits"], readable, out, err)
    except BaseException as error:  # this is the forked child: nothing may return into the supervisor's code
        os.write(trouble, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(127)


def watch(pid: int, out: int, err: int, wall_seconds: float, output_bytes: int) -> tuple[str, dict[int, bytearray]]:
    """Wait until the program ends or must be ended: how that came, and what it printed, by file descriptor."""
    output = {out: bytearray(), err: bytearray()}
    exited = os.pidfd_open(pid)
    poll = select.poll()
    for fd in (out, err, exited, STDIN):
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + wall_seconds
    while (left := deadline - time.monotonic()) > 0:
        ready = [fd for fd, _ in poll.poll(left * 1000 + 1)]
        for fd in output:
            if fd in ready and not take(fd, output[fd]):
                poll.unregister(fd)
        if exited in ready:
            for fd in output:
                take_what_is_there(fd, output[fd], output_bytes)
        if sum(len(part) for part in output.values()) > output_bytes:
            return "output", output
        if exited in ready:
            return "exit", output
        if STDIN in ready:
            return "abandoned", output
    return "time", output


def take(fd: int, collected: bytearray) -> bool:
    """Add what can be read; False at the end of the file."""
    chunk = os.read(fd, 65536)
    collected += chunk
    return bool(chunk)


def take_what_is_there(fd: int, collected: bytearray, bound: int) -> None:
    """Without waiting for the end of the file: a process that outlived the program may hold the pipe open."""
    os.set_blocking(fd, False)
    with suppress(BlockingIOError):
        while len(collected) <= bound and take(fd, collected):
            pass


def end(pid: int) -> int:
    """End the program and all that it started; its status, as os.waitpid gives it."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    sweep()
    return status


def sweep() -> None:
    """End orphans. Without a process namespace they come to us, one generation after another."""
    deadline = time.monotonic() + SWEEP_SECONDS
    while time.monotonic() < deadline:
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        for child in children():
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)


def children() -> list[int]:
    own = str(os.getpid())
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError), open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[1] == own:  # state, parent, ...
                    found.append(int(entry))
    return found


def read_line(fd: int) -> bytes:
    """Up to a newline, unbuffered: what comes after it is the caller's sign to end."""
    line = bytearray()
    while not line.endswith(b"\n") and take(fd, line):
        pass
    return bytes(line)


def read_all(fd: int) -> bytes:
    collected = bytearray()
    while take(fd, collected):
        pass
    return bytes(collected)
