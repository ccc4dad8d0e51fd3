"""RolloutWorker: the rollouts of a run, for whoever trains on them. Lives in the environment's interpreter, on one event loop.

A plain class with async methods, so that it serves as a Ray actor and in a test alike. What crosses its border is plain data.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from miles_verifiers.config.settings import EnvironmentSection, RunConfig
from miles_verifiers.errors import EnvironmentPackageError, RolloutError
from miles_verifiers.record.samples import as_row
from miles_verifiers.rollout import interpreter
from miles_verifiers.rollout.cursor import Cursor
from miles_verifiers.rollout.filters import load_filter
from miles_verifiers.rollout.lag import LagWatch
from miles_verifiers.rollout.load import Loaded, load_backend, settle
from miles_verifiers.rollout.runner import Runner
from miles_verifiers.system.progress import report
from miles_verifiers.wire.translate import checked_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a worker is made of once it is open. Evaluations share what they can with training."""

    training: Loaded
    evaluation: Loaded
    runner: Runner
    eval_runner: Runner

    @property
    def loaded(self) -> list[Loaded]:
        return [self.training] if self.evaluation is self.training else [self.training, self.evaluation]

    @property
    def tokens(self) -> int:
        """Sampled so far."""
        return sum(loaded.wire.counters.tokens for loaded in self.loaded)

    @property
    def in_flight(self) -> int:
        return sum(loaded.wire.counters.in_flight for loaded in self.loaded)


class RolloutWorker:
    """`config` is a RunConfig as plain data, `model` a checkpoint folder, `log` the file for what happens in here.

    Nothing slow happens before the first method is awaited.
    """

    def __init__(self, config: dict[str, Any], model: str, engine_urls: list[str], vocab_size: int, log: str) -> None:
        self._config = RunConfig.model_validate(config)
        self._model = Path(model)
        self._engine_urls = list(engine_urls)
        self._vocab_size = vocab_size
        self._log_file = Path(log)
        self._ready = asyncio.Lock()
        self._busy = asyncio.Lock()
        self._parts: _Parts | None = None
        self._lag = LagWatch()
        self._handler: logging.Handler | None = None
        self._progress: dict[str, float] = {"done": 0, "total": 0, "failed": 0}
        self._started = (time.monotonic(), 0)

    async def preflight(self) -> dict[str, Any]:
        """What this interpreter really holds and does, before anything waits for it.

        Versions and origins of the modules that matter, the number of tasks, the renderer, and one prompt rendered and
        checked against the vocabulary. Raises EnvironmentPackageError, ConfigError or ModelError.
        """
        parts = await self._open()
        backend, renderer = parts.training.backend, parts.training.renderer
        self._check_evaluation(parts)
        messages = backend.messages(0)
        ids: list[int] = []
        if messages:
            ids = await asyncio.to_thread(renderer.render_ids, messages)
            checked_ids(ids, self._vocab_size, f"the rendered prompt of task 0 of {backend.name}")
            self._check_room(len(ids))
        return {
            "executable": sys.executable,
            "sys_path": list(sys.path),
            "python": sys.version.split()[0],
            "stdlib": interpreter.stdlib(),
            "packages": interpreter.origins(),
            "environment": {"id": backend.name, "origin": backend.module_file, "n_tasks": backend.n_tasks},
            "harness": backend.harness,
            "renderer": renderer.name,
            "renderer_line": renderer.line(),
            "prompt_tokens": len(ids),
            "prompt": backend.prompt(0),
        }

    async def generate(
        self, step: int, cursor: dict[str, Any] | None = None, want: int | None = None
    ) -> dict[str, Any]:
        """The groups that step `step` trains on, from the place in the row of tasks that `cursor` (Cursor.as_json) names.

        Without a cursor the step begins where it would had no group ever been dropped. `want` is the number of groups, by
        default rollout_batch_size. Returns plain values:

            rows      samples.as_row of all samples, in order of group and sample, failed ones of kept groups included
            cursor    for the next step
            ending    groups.Ending: `full`, or why there are fewer
            dropped   groups by cause
            causes    rollouts by what went wrong with them, those of dropped groups included
            retried   rollouts by why they were run again

        Raises RolloutError where the worker is misused or the dynamic filter raises; a rollout that goes wrong is a failed
        sample.
        """
        rollout = self._config.rollout
        want = rollout.rollout_batch_size if want is None else want
        begin = Cursor(step * want, step * want) if cursor is None else Cursor.from_json(cursor)
        async with self._at_work(f"step {step}"):
            runner = (await self._open()).runner
            batch = await runner.step(begin, want)
        samples = [sample for group in batch.groups for sample in group.samples]
        failed = sum(sample.status in ("failed", "aborted") for sample in samples)
        log.info("step %d: %s, %d samples, %d failed", step, batch.ending, len(samples), failed)
        return {
            "rows": [as_row(sample) for sample in samples],
            "cursor": batch.cursor.as_json(),
            "ending": batch.ending,
            "dropped": dict(batch.dropped),
            "causes": dict(runner.seen.causes),
            "retried": dict(runner.seen.retried),
        }

    async def evaluate(self, step: int) -> dict[str, Any]:
        """Samples of every task to evaluate on, before step `step`: `rows` and `causes` as of `generate`.

        No task ends it: where a rollout, a reward or the deadline went wrong, a failed sample says so.
        """
        async with self._at_work(f"the evaluation before step {step}"):
            runner = (await self._open()).eval_runner
            samples = await runner.evaluate()
        log.info("evaluation before step %d: %d samples", step, len(samples))
        return {"rows": [as_row(sample) for sample in samples], "causes": dict(runner.seen.causes)}

    async def progress(self) -> dict[str, float]:
        """Of the step in work, or the last one: rollouts done, total and failed; tokens sampled, and per second."""
        began, tokens_before = self._started
        tokens = (self._parts.tokens if self._parts else 0) - tokens_before
        seconds = max(time.monotonic() - began, 1e-3)
        return {
            **self._progress,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "requests_in_flight": self._parts.in_flight if self._parts else 0,
            "event_loop_lag": self._lag.worst,
        }

    async def close(self) -> None:
        """Give up what is running and free everything; may be called twice."""
        await self._lag.stop()
        parts, self._parts = self._parts, None
        if parts is not None:
            for loaded in parts.loaded:
                await loaded.wire.close()
                await loaded.backend.close()
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None

    @asynccontextmanager
    async def _at_work(self, what: str) -> AsyncIterator[None]:
        if self._busy.locked():
            raise RolloutError("the worker is generating already", where=what)
        async with self._busy:
            parts = await self._open()
            self._progress = {"done": 0, "total": 0, "failed": 0}
            self._started = (time.monotonic(), parts.tokens)
            self._lag.worst = 0.0
            yield

    async def _open(self) -> _Parts:
        async with self._ready:
            if self._parts is None:
                self._start_logging()
                interpreter.go_offline()
                report("loading the environment and the renderer")
                parts = await asyncio.to_thread(self._load)
                for loaded in parts.loaded:
                    await loaded.backend.open()
                settle()
                self._parts = parts
                self._lag.start()
                backend = parts.training.backend
                log.info(
                    "verifiers %s; %s; harness %s; %d tasks",
                    self._config.environment.verifiers,
                    parts.training.renderer.line(),
                    backend.harness,
                    backend.n_tasks,
                )
            return self._parts

    def _load(self) -> _Parts:
        """For a thread: imports and files take seconds."""
        environment = self._config.environment
        training = evaluation = self._backend_of(environment)
        if environment.eval_taskset and self._config.rollout.eval_interval is not None:
            taskset = {**environment.taskset, **environment.eval_taskset}
            evaluation = self._backend_of(environment.model_copy(update={"taskset": taskset}))
        make = partial(
            Runner, environment=environment, config=self._config, renderer=training.renderer.name, watch=self._watch
        )
        dynamic_filter = load_filter(self._config.rollout)
        return _Parts(
            training, evaluation, make(training.backend, dynamic_filter=dynamic_filter), make(evaluation.backend)
        )

    def _backend_of(self, environment: EnvironmentSection) -> Loaded:
        config = self._config.model_copy(update={"environment": environment})
        return load_backend(config, self._model, self._engine_urls, self._vocab_size)

    def _watch(self, what: str, failed: bool) -> None:
        if what == "started":
            self._progress["total"] += 1
            return
        # A rollout that is run again ends twice.
        self._progress["done"] = min(self._progress["done"] + 1, self._progress["total"])
        self._progress["failed"] += failed
        report("rollouts", int(self._progress["done"]), int(self._progress["total"]))

    def _check_evaluation(self, parts: _Parts) -> None:
        if self._config.rollout.eval_interval is None:
            return
        if parts.evaluation.backend.compares and parts.eval_runner.eval_samples < 2:
            raise EnvironmentPackageError(
                "the environment compares the rollouts of a task, and evaluations have one of each",
                where=f"environment {parts.evaluation.backend.name}",
                next_step="set rollout.n_samples_per_eval_prompt to 2 or more",
            )

    def _check_room(self, prompt_tokens: int) -> None:
        limit = self._config.rollout.rollout_max_context_len
        if prompt_tokens >= limit:
            raise EnvironmentPackageError(
                f"the first prompt has {prompt_tokens} tokens, the context length is {limit}",
                where="rollout.rollout_max_context_len",
                next_step="raise it above the longest prompt plus rollout_max_response_len",
            )

    def _start_logging(self) -> None:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        self._handler = logging.FileHandler(self._log_file, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root = logging.getLogger()
        root.addHandler(self._handler)
        root.setLevel(min(root.level or logging.INFO, logging.INFO))
        logging.getLogger("aiohttp.access").setLevel(logging.WARNING)  # a line for every turn of every rollout
