"""The engines of a run, as one: started, watched, given new weights, stopped together."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.engine.server import EngineServer, free_port
from miles_verifiers.errors import HostError
from miles_verifiers.record.rundir import RunDir


class Engines:
    def __init__(self, servers: list[EngineServer]) -> None:
        self._servers = servers

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

    def start(self) -> None:
        for server in self._servers:
            server.start()

    def wait_ready(self) -> None:
        for server in self._servers:
            server.wait_ready()

    def check(self) -> None:
        """Raises EngineError, with exit code and last log lines, when one has died."""
        for server in self._servers:
            server.check()

    def throughput(self) -> float:
        """Generated tokens per second, all engines together, as they say."""
        return sum(server.throughput() or 0.0 for server in self._servers)

    def update_weights(self, folder: Path, version: int, timeout: float) -> None:
        """Load the safetensors of `folder` into every engine as weight version `version`."""
        deadline = time.monotonic() + timeout
        for server in self._servers:
            server.update_weights_from_disk(folder, str(version), timeout=max(1.0, deadline - time.monotonic()))

    def stop(self) -> None:
        for server in self._servers:
            server.stop()


@contextmanager
def engines_of(config: RunConfig, run: RunDir) -> Iterator[Engines]:
    """Engines of a configuration, not started yet; stopped when the block ends, however it ends."""
    servers = [
        EngineServer(
            config.engine,
            python=run.python("stack"),
            model=run.model(config.model.source),
            dtype=config.model.dtype,
            context_length=config.rollout.rollout_max_context_len,
            port=port,
            log=run.logs / f"engine-{number}.log",
            gpu_ids=_gpu_ids(config, number),
        )
        for number, port in enumerate(_ports(config))
    ]
    engines = Engines(servers)
    try:
        yield engines
    finally:
        engines.stop()


def _ports(config: RunConfig) -> list[int]:
    count, first = config.engine.num_engines, config.engine.port
    if first is None:
        return [free_port() for _ in range(count)]
    if first + count - 1 > 65535:
        raise HostError(f"{count} engines do not fit above port {first}", next_step="lower engine.port")
    return list(range(first, first + count))


def _gpu_ids(config: RunConfig, number: int) -> list[int]:
    if config.engine.device == "cpu":
        return []
    # Not colocated: the trainer has the first GPUs, the engines those behind them.
    first = 0 if config.training.colocate else config.training.num_gpus
    each = config.engine.gpus_per_engine
    return [first + number * each + i for i in range(each)]
