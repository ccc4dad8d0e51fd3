"""A job of its own, as tests of faults start, stop and look at it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import psutil

from miles_verifiers.system.temporary import sweep

MARK = "MILES_VERIFIERS_TEST_RUN"
STOP_S = 10.0
SETTINGS = (
    "--profile", "cpu",
    "--set", "model.source=tiny:qwen3",
    "--set", "rollout.rollout_max_response_len=32",
    "--set", "training.num_steps=3",
)  # fmt: skip


class Run:
    """A `miles-verifiers train` of its own, all of whose processes carry a mark in their environment."""

    def __init__(self, folder: Path, *more: str, within: tuple[str, ...] = (), **variables: str) -> None:
        """`within` is a command that starts the rest, for example in another namespace."""
        self.mark = uuid.uuid4().hex
        self._log = (
            folder / "run.log"
        )  # the console leaves out lines that follow each other closely; earlier runs wrote here
        self._log_begin = self._log.stat().st_size if self._log.exists() else 0
        argv = [
            *within,
            sys.executable,
            "-P",
            "-m",
            "miles_verifiers",
            "train",
            "--run-dir",
            str(folder),
            *SETTINGS,
            *more,
        ]
        self.process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables, MARK: self.mark},
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def _logged(self) -> str:
        return self._log.read_bytes()[self._log_begin :].decode() if self._log.exists() else ""

    def wait_for(self, text: str, timeout: float = 300) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.text and text not in self._logged():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {text!r} within {timeout} s:\n{self.text}"
            time.sleep(0.05)

    def end(self, timeout: float) -> int:
        code = self.process.wait(timeout)
        self._reader.join(5)
        return code

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self) -> None:
        """Kill it outright, wait until all that it started is gone, and remove what it could not, as the next run does."""
        self.process.kill()
        self.end(timeout=5)
        assert self.gone_within(STOP_S), [p.cmdline() for p in self.processes()]
        sweep()

    def gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def leftovers() -> set[str]:
    """What our runs put outside of the run directory and the caches while they live."""
    return {str(p) for pattern in ("mv-*", "miles-engine-*") for p in Path("/tmp").glob(pattern)} | {
        str(p) for p in Path("/dev/shm").glob("sglang_loads_*")
    }
