"""The trainer's Ray actors, one per GPU or one on the CPU, driven as one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.engine.server import free_port
from miles_verifiers.errors import TrainerError
from miles_verifiers.record.rundir import RunDir
from miles_verifiers.training import cluster

Tick = Callable[[float], None]

_ON_CPU = {
    "OMP_WAIT_POLICY": "passive",  # as in the engine: a spinning thread waits in vain for one that has no core
    # glibc gives every large tensor back to the kernel and asks for zeroed pages again: a third of a training step on the
    # CPU was page faults. Kept in the process, the same step took 22 s instead of 35. (The engine gains nothing from it.)
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "MALLOC_TOP_PAD_": str(2**28),
}


class TrainerActor:
    """One rank. Megatron-core is imported in the actor's process only."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from miles_verifiers.training.megatron.trainer import MegatronTrainer

        self._trainer = MegatronTrainer(**arguments)

    def loaded(self) -> dict[str, Any]:
        """What the checkpoint carried besides weights; returns once everything is loaded."""
        return dict(self._trainer.loaded_extra)

    def train(self, rows: list[dict[str, Any]], iteration: int) -> dict[str, Any]:
        return asdict(self._trainer.train(rows, iteration))

    def export_hf(self, folder: str) -> None:
        self._trainer.export_hf(Path(folder))

    def save(self, root: str, iteration: int, extra: dict[str, Any]) -> None:
        self._trainer.save(Path(root), iteration, extra)

    def annotate(self, root: str, iteration: int, extra: dict[str, Any]) -> None:
        self._trainer.annotate(Path(root), iteration, extra)


class Trainers:
    """All ranks. Every method calls all of them, since each is a collective, and returns rank 0's answer."""

    def __init__(self, config: RunConfig, run: RunDir, checkpoint: Path) -> None:
        self._config = config
        world_size = max(1, config.training.num_gpus)
        # Ray gives an actor without CPUs a single OpenMP thread; the trainer has the machine to itself while it steps.
        env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world_size))}
        if not config.training.num_gpus:
            env |= _ON_CPU
        init_method = f"tcp://127.0.0.1:{free_port()}"
        self._actors = [
            cluster.start_actor(
                TrainerActor,
                {
                    "model": run.model(config.model.source),
                    "checkpoint": checkpoint,
                    "config": config.training,
                    "dtype": config.model.dtype,
                    "rank": rank,
                    "world_size": world_size,
                    "init_method": init_method,
                    "temperature": config.rollout.rollout_temperature,
                },
                python=run.python("stack"),
                env=env,
                num_gpus=1 if config.training.num_gpus else 0,
            )
            for rank in range(world_size)
        ]

    def wait_loaded(self, on_tick: Tick) -> dict[str, Any]:
        answer: dict[str, Any] = self._all(
            "loaded", what="loading the trainer", timeout=self._config.training.load_timeout, on_tick=on_tick
        )
        return answer

    def train(self, rows: list[dict[str, Any]], iteration: int, on_tick: Tick) -> dict[str, Any]:
        """One training step on a step's rows (`samples.as_row`); returns StepResult's fields."""
        answer: dict[str, Any] = self._all(
            "train",
            rows,
            iteration,
            what=f"training step {iteration}",
            timeout=self._config.training.step_timeout,
            on_tick=on_tick,
        )
        return answer

    def export_hf(self, folder: Path) -> None:
        self._all("export_hf", str(folder), what="exporting weights", timeout=self._config.training.sync_timeout)

    def save(self, root: Path, iteration: int, extra: dict[str, Any]) -> None:
        self._all(
            "save", str(root), iteration, extra, what="saving a checkpoint", timeout=self._config.training.load_timeout
        )

    def annotate(self, root: Path, iteration: int, extra: dict[str, Any]) -> None:
        """Replace the `extra` of a checkpoint that is there."""
        self._all("annotate", str(root), iteration, extra, what="noting the place in the tasks", timeout=60)

    def _all(self, method: str, *arguments: Any, what: str, timeout: float, on_tick: Tick = lambda _: None) -> Any:
        refs = [getattr(actor, method).remote(*arguments) for actor in self._actors]
        return cluster.wait(refs, what=what, timeout=timeout, error=TrainerError, on_tick=on_tick)[0]
