"""One SGLang server: start, wait, watch, give it new weights, stop with everything that it made.

    engine = EngineServer(config.engine, python=stack, model=folder, dtype="float32", context_length=1024, port=port, log=log)
    engine.start()
    engine.wait_ready()
    ... requests to engine.url ...
    engine.update_weights_from_disk(folder, "1", timeout=120)
    engine.stop()

Importable without SGLang: the server runs in the interpreter `python`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import calls, leftovers
from miles_verifiers.engine.arguments import HOST, server_argv, server_environment
from miles_verifiers.errors import EngineError, HostError, ModelError
from miles_verifiers.system import process, progress

_LONGEST_SOCKET_FOLDER = 60
"""Characters. A Unix socket's path has at most 107 (unix(7)); SGLang's names within the folder take some forty."""

_LOWEST_PORT = 20_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that outgoing connections get (ip(7))."""

_LOG_TAIL_BYTES = 64 * 1024

_RATE = re.compile(
    r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]\n]*\] Decode batch.*gen throughput \(token/s\): ([\d.]+)", re.MULTILINE
)
_RATE_VALID_S = 15.0
"""Seconds. A line comes every --decode-log-interval steps, on a slow CPU every few seconds."""

_STAGES = (
    ("The server is fired up", "answers its first request"),
    ("KV Cache is allocated", "KV cache is ready"),
    ("Load weight end", "allocates its KV cache"),
    ("Load weight begin", "loads weights"),
    ("Init parallel begin", "starts its scheduler"),
    ("server_args=", "starts its processes"),
)
"""(line of SGLang's log, what it means), the latest first; 0.5.23."""


def free_port() -> int:
    """A TCP port on the loopback that nothing uses now, and that the kernel gives to no outgoing connection.

    A server binds its port only when it has imported everything, half a minute later. Among Ray's connections one had taken
    such a port by then.
    """
    last = _first_ephemeral_port() - 1
    candidates = random.sample(range(_LOWEST_PORT, last), 100) if last > _LOWEST_PORT + 100 else []
    for port in [*candidates, 0]:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            found: int = probe.getsockname()[1]
            return found
    raise HostError("no TCP port is free", where=HOST, next_step="stop what holds them, or name one in engine.port")


def _first_ephemeral_port() -> int:
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 32768  # Linux's default


class EngineServer:
    """A server process and its HTTP control surface. Every method that waits has a deadline.

    `gpu_ids` are those of CUDA_VISIBLE_DEVICES, empty on CPU. `weight_version` labels the weights of `model`.
    """

    def __init__(
        self,
        config: EngineSection,
        *,
        python: Path,
        model: Path,
        dtype: str,
        context_length: int,
        port: int,
        log: Path,
        gpu_ids: Sequence[int] = (),
        weight_version: str = "0",
        random_seed: int = 0,
    ) -> None:
        self.config = config
        self.port = port
        self.log = log
        self.url = f"http://{HOST}:{port}"
        self.gpu_ids = tuple(gpu_ids)
        self.argv = server_argv(
            config,
            python=python,
            model=model,
            dtype=dtype,
            context_length=context_length,
            port=port,
            weight_version=weight_version,
            random_seed=random_seed,
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: Path | None = None
        self._shared: set[Path] = set()
        self._started = 0.0
        self._log_start = 0

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process; `wait_ready` says when it answers. Raises HostError where the port is taken."""
        assert self._process is None, "an EngineServer starts once"
        _demand_free_port(self.port)
        self._temporary = _temporary_folder()
        env = server_environment(
            process.child_environment(), self.config, temporary=self._temporary, gpu_ids=self.gpu_ids
        )
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        self._started = time.monotonic()
        self._process = process.spawn(self.argv, log=self.log, env=env)

    def wait_ready(self) -> None:
        """Return as soon as the server generated a token. Raises EngineError when it dies or `start_timeout` is over."""
        deadline = self._started + self.config.start_timeout
        while not self._healthy():
            self.check()
            waited = time.monotonic() - self._started
            progress.report(f"engine on port {self.port}: {self._stage()}", int(waited))
            if time.monotonic() > deadline:
                raise self._error(
                    f"the engine did not answer within {self.config.start_timeout:.0f} s",
                    next_step="raise engine.start_timeout if the log shows that it was still at work",
                )
            time.sleep(0.2)
        assert self._process is not None
        self._shared = leftovers.shared_memory(self._process.pid)

    def check(self) -> None:
        """Raise EngineError, with exit code and last log lines, if the server's process is gone."""
        if self._process is None:
            raise self._error("the engine was not started")
        if (code := self._process.poll()) is not None:
            raise self._error(f"the engine {_ended(code)}", returncode=code)

    def throughput(self) -> float | None:
        """Generated tokens per second as the server logs them: 0.0 while it is idle, None before the first figure.

        Read from the log, which costs the server nothing. Over HTTP, /v1/loads has the figure only with metrics switched on
        (metrics_reporter.py, 0.5.23), and /server_info waits for the scheduler's next step.
        """
        found = _RATE.findall(self._output())
        if not found:
            return None
        at, rate = found[-1]
        age = (datetime.now() - datetime.strptime(at, "%Y-%m-%d %H:%M:%S")).total_seconds()
        return float(rate) if age < _RATE_VALID_S else 0.0

    def model_info(self, timeout: float = 10.0) -> dict[str, Any]:
        """The server's /model_info: `model_path`, `weight_version` and more."""
        return self._asked("/model_info", None, timeout)

    def update_weights_from_disk(self, folder: Path, version: str, timeout: float) -> None:
        """Load the safetensors of `folder`, and label what they generate with `version`.

        Running requests finish on the old weights first. Raises ModelError where the folder is missing, EngineError where
        the server refuses, does not answer within `timeout` seconds, dies, or does not show `version` afterwards.
        """
        if not folder.is_dir():
            # SGLang would take the path for the name of a repository.
            raise ModelError(f"there are no weights to load: {folder} does not exist", where=self.url)
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        reply = self._asked("/update_weights_from_disk", body, timeout)
        if not reply.get("success"):
            raise self._error(f"the engine did not take the weights of {folder}: {reply.get('message', reply)}")
        shown = self.model_info().get("weight_version")
        if shown != version:
            raise self._error(f"the engine took the weights of {folder} but shows version {shown!r}, not {version!r}")

    def stop(self, grace: float = 0.0) -> None:
        """End the server, its children, its temporary folder and its shared memory. Harmless when repeated.

        The default kills at once: on SIGTERM SGLang first waits for running requests, looking every five seconds
        (sigterm_watchdog in sglang/srt/managers/tokenizer_manager.py, 0.5.23).
        """
        if self._process is not None:
            self._shared |= leftovers.shared_memory(self._process.pid)
            process.end_tree(self._process.pid, grace)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
        leftovers.remove(self._shared, self._temporary)
        self._shared, self._temporary = set(), None

    def _healthy(self) -> bool:
        try:
            status, _ = calls.call(f"{self.url}/health", timeout=5.0)
        except calls.NoAnswer:
            return False
        return status == 200

    def _asked(self, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        """The reply to one control request, whatever its status. An engine that died meanwhile is reported as that."""
        self.check()
        try:
            status, reply = calls.call(self.url + path, body, timeout=timeout)
        except calls.NoAnswer as silence:
            self._wait_for_its_end()
            self.check()
            raise self._error(f"the engine did not answer {path} within {timeout:.0f} s: {silence}") from None
        if not isinstance(reply, dict):
            raise self._error(f"the engine answered {path} with HTTP {status}: {str(reply)[:300]}")
        return reply

    def _wait_for_its_end(self) -> None:
        """A broken connection comes seconds before the process's end (seen: up to six), and its exit code says more."""
        deadline = time.monotonic() + 8.0
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            if self._healthy():
                return
            time.sleep(0.2)

    def _stage(self) -> str:
        text = self._output()
        return next((meaning for line, meaning in _STAGES if line in text), "imports SGLang")

    def _output(self) -> str:
        """What this server logged; the file may hold more, of servers before it."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, file.tell() - _LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _error(self, what: str, *, next_step: str = "", returncode: int | None = None) -> EngineError:
        tail = self._output().splitlines()[-process.TAIL_LINES :]
        return EngineError(what, where=f"log: {self.log}", next_step=next_step, returncode=returncode, tail=tail)


def _demand_free_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server itself will do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise HostError(
                f"port {port} cannot be used: {error.strerror}",
                where=f"{HOST}:{port}",
                next_step="stop what listens there, or set engine.port to another one (leave it out for a free one)",
            ) from None


def _temporary_folder() -> Path:
    base = tempfile.gettempdir()
    short = base if len(base) <= _LONGEST_SOCKET_FOLDER else "/tmp"  # noqa: S108 - mkdtemp makes a private folder in it
    return Path(tempfile.mkdtemp(prefix="miles-engine-", dir=short))


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
