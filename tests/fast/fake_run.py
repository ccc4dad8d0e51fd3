"""A run without torch, Ray or Verifiers: the real loop, worker, dump and metrics, around an engine and a trainer of hashes.

Weights are a hash of everything that was trained on; a reply is a hash of weights, task and sampling seed. So two runs agree
in their replies only if they agreed in every group before. Rollouts take random times, fail, and have equal rewards.

As a program it reads lines `SECONDS RUN_DIR` from stdin, and for each forks a child that runs the loop there, and is killed
after so many seconds; it prints `ready`, and `ended STATUS` for each. Forking saves the seconds that the imports take.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.record.rundir import RunDir
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.rollout.backend import TRAINING, GroupOptions, OnDone
from miles_verifiers.rollout.load import Loaded
from miles_verifiers.rollout.traces import Rollout
from miles_verifiers.rollout.worker import RolloutWorker
from miles_verifiers.system import files
from miles_verifiers.training.loop import TRACKER, Loop
from miles_verifiers.training.steps import merged
from miles_verifiers.wire.transport import Turn


def digest(*parts: Any) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6])


class Weights:
    """What engine and trainer hold: the same object would hide a lost weight update."""

    def __init__(self, value: str = "initial", version: str = "") -> None:
        self.value, self.version = value, version


class FakeBackend:
    """Each reply is two tokens. A sixth of all attempts fail; rewards are 0 or 1, so groups of two often have equal ones."""

    name, harness, module_file, compares = "fake", "none", "", False

    def __init__(self, weights: Weights, n_tasks: int, pace: float) -> None:
        self.n_tasks, self._weights, self._pace = n_tasks, weights, pace

    def prompt(self, position: int) -> str:
        return f"task {position}"

    def messages(self, position: int) -> list[dict[str, Any]]:
        return []

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def run_group(
        self,
        position: int,
        n: int,
        slots: asyncio.Semaphore,
        deadline: float,
        on_done: OnDone | None = None,
        options: GroupOptions = TRAINING,
    ) -> list[Rollout]:
        return list(await asyncio.gather(*(self._rollout(position, k, slots, options) for k in range(n))))

    async def _rollout(self, position: int, k: int, slots: asyncio.Semaphore, options: GroupOptions) -> Rollout:
        earlier: list[str] = []
        for attempt in range(options.retries + 1):
            async with slots:
                seed = options.seed(k, attempt)
                await asyncio.sleep(random.random() * self._pace)
            number = digest(self._weights.value, position, seed, options.sampling)
            if number % 6:
                break
            earlier.append("HarnessError: it broke")
        return Rollout(self._trace(number), self._turns(number), seed=seed, earlier=tuple(earlier[:attempt]))

    def _ids(self, number: int) -> list[int]:
        return [10 + number % 80, 2]

    def _replies(self, number: int) -> list[list[int]]:
        """Of the rollout's branches; two thirds of the rollouts have two."""
        forks = number // 42 % 3 > 0
        return [[90, 91, 2], self._ids(number)] if forks else [self._ids(number)]

    def _turns(self, number: int) -> list[Turn]:
        return [
            Turn(ids, [WeightSpan(self._weights.version, len(ids))], prompt_tokens=2, seconds=0.0)
            for ids in self._replies(number)
        ]

    def _trace(self, number: int) -> Any:
        asked = SimpleNamespace(token_ids=[5, 6], mask=[False, False], logprobs=[])
        said = [
            SimpleNamespace(token_ids=ids, mask=[True] * len(ids), logprobs=[-0.5, -0.1, -0.2][: len(ids)])
            for ids in self._replies(number)
        ]
        failed = SimpleNamespace(type="HarnessError", message="it broke")
        return SimpleNamespace(
            nodes=[asked, *said],
            branches=[SimpleNamespace(nodes=[asked, reply]) for reply in said],
            rewards={"right": float(number // 7 % 2)},
            metrics={"passed": float(number // 7 % 2)},
            error=None if number % 6 else failed,
            stop_condition="done",
            is_truncated=False,
            last_reply="a reply",
        )


class FakeWorker(RolloutWorker):
    """The real worker on the fake backend."""

    def __init__(self, config: RunConfig, folder: Path, weights: Weights, pace: float) -> None:
        super().__init__(config.model_dump(), str(folder), [], 100, str(folder / "logs" / "rollout.log"))
        self._fake = FakeBackend(weights, n_tasks=7, pace=pace)

    def _backend_of(self, environment: Any) -> Any:
        async def closed() -> None:
            return

        renderer = SimpleNamespace(name="fake", line=lambda: "renderer fake")
        wire = SimpleNamespace(counters=SimpleNamespace(tokens=0, in_flight=0), close=closed)
        return Loaded(self._fake, renderer, wire)  # type: ignore[arg-type]


class FakeRollouts:
    def __init__(self, config: RunConfig, folder: Path, weights: Weights, pace: float) -> None:
        self._config = config
        self._events = asyncio.new_event_loop()
        self._worker = FakeWorker(config, folder, weights, pace)

    def wait_ready(self, on_tick: Any) -> None:
        return

    def sample(self, step: int, cursors: dict[str, Any], on_tick: Any) -> Any:
        label = self._config.environment.label
        answer = self._events.run_until_complete(self._worker.generate(step, cursors.get(label)))
        return merged([0] * self._config.rollout.rollout_batch_size, {0: answer}, [label], cursors)

    def evaluate(self, step: int, on_tick: Any) -> Any:
        from miles_verifiers.record.samples import from_row

        answer = self._events.run_until_complete(self._worker.evaluate(step))
        return {self._config.environment.label: [from_row(row) for row in answer["rows"]]}, answer["causes"]

    def progress(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._events.run_until_complete(self._worker.close())
        self._events.close()


class FakeEngines:
    def __init__(self) -> None:
        self.weights = Weights()

    def wait_ready(self) -> None:
        return

    def check(self) -> None:
        return

    def throughput(self) -> float:
        return 0.0

    def update_weights(self, folder: Path, version: int, timeout: float) -> None:
        self.weights.value = (folder / "model.safetensors").read_text()
        self.weights.version = str(version)


class FakeTrainers:
    """Saves as the real one: aside, renamed, then the tracker."""

    def __init__(self, root: Path) -> None:
        self._weights, self._note = "initial", {}
        tracker = root / TRACKER
        if tracker.exists():
            state = json.loads((root / f"iter_{int(tracker.read_text()):07d}" / "state.json").read_text())
            self._weights, self._note = state["weights"], state["extra"]

    def wait_loaded(self, on_tick: Any) -> dict[str, Any]:
        return self._note

    def train(self, rows: list[dict[str, Any]], iteration: int, on_tick: Any) -> dict[str, Any]:
        learned = [(row["index"], row["tokens"], row["advantage"]) for row in rows]
        self._weights = f"{digest(self._weights, iteration, learned)}"
        figures = ("loss", "grad_norm", "clip_fraction", "mismatch_mean", "mismatch_max", "mismatch_k3", "weight_delta")
        return {
            **dict.fromkeys(figures, 0.0),
            "optimizer_steps": 1,
            "seconds": {},
            "train_log_probs": {
                row["index"]: [own["rollout_log_probs"] for own in (row, *row["forks"])] for row in rows
            },
        }

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files.write_text(folder / "model.safetensors", self._weights)

    def save(self, root: Path, iteration: int, extra: dict[str, Any]) -> None:
        state = json.dumps({"weights": self._weights, "extra": extra}, allow_nan=False)
        files.write_text(root / f"iter_{iteration:07d}" / "state.json", state)
        files.write_text(root / TRACKER, str(iteration))

    def annotate(self, root: Path, iteration: int, extra: dict[str, Any]) -> None:
        self.save(root, iteration, extra)


def run(folder: Path, pace: float = 0.003) -> dict[str, Any]:
    """All steps that are still to do in the run directory `folder`, which holds a config.toml."""
    directory = RunDir(folder)
    config = loading.read(directory.config)
    engines = FakeEngines()
    rollouts = FakeRollouts(config, folder, engines.weights, pace)
    try:
        return Loop(config, directory, engines, FakeTrainers(directory.checkpoints), rollouts).run()  # type: ignore[arg-type]
    finally:
        rollouts.close()


def serve() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, _, folder = line.strip().partition(" ")
        child = os.fork()
        if child == 0:
            try:
                run(Path(folder))
                os._exit(0)
            finally:
                os._exit(1)
        print("ended", _killed_after(child, float(seconds)), flush=True)


def _killed_after(child: int, seconds: float) -> int:
    """The exit code of `child`, which is not waited for before: its pid cannot be another's."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    serve()
