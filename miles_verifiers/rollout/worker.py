"""RolloutWorker: the rollouts of a run, for whoever trains on them. Lives in the environment's interpreter, on one event loop.

A plain class with async methods, so that it serves as a Ray actor and in a test alike. What crosses its border is plain data.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_verifiers.config import RunConfig
from miles_verifiers.errors import EnvironmentPackageError, RolloutError
from miles_verifiers.progress import report
from miles_verifiers.rollout import interpreter
from miles_verifiers.rollout.lag import LagWatch
from miles_verifiers.rollout.tasks import tasks_for_step
from miles_verifiers.rollout.traces import Origin, Rollout, to_sample
from miles_verifiers.samples import Sample, as_row
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.translate import Limits, checked_ids
from miles_verifiers.wire.transport import MilesSGLangTransport

if TYPE_CHECKING:
    from miles_verifiers.rollout.episodes_v02 import EpisodeBackend
    from miles_verifiers.rollout.renderers import RendererChoice

log = logging.getLogger(__name__)


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
        self._backend: EpisodeBackend | None = None
        self._transport: MilesSGLangTransport | None = None
        self._renderer: RendererChoice | None = None
        self._lag = LagWatch()
        self._handler: logging.Handler | None = None
        self._progress: dict[str, float] = {"done": 0, "total": 0, "failed": 0}
        self._started = (time.monotonic(), 0)

    async def preflight(self) -> dict[str, Any]:
        """What this interpreter really holds and does, before anything waits for it.

        Versions and origins of the modules that matter, the number of tasks, the renderer, and one prompt rendered and
        checked against the vocabulary. Raises EnvironmentPackageError, ConfigError or ModelError.
        """
        backend, renderer = await self._open()
        messages = backend.messages(0)
        ids: list[int] = []
        if messages:
            ids = await asyncio.to_thread(renderer.pool.render_ids, messages, add_generation_prompt=True)
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

    async def generate(self, step: int) -> list[dict[str, Any]]:
        """All samples of step `step` as rows (samples.as_row), in order of group and sample, whatever became of them.

        Raises RolloutError only where the worker itself is misused; a rollout that goes wrong is a failed sample.
        """
        if self._busy.locked():
            raise RolloutError("a step is being generated already", where=f"step {step}")
        async with self._busy:
            backend, renderer = await self._open()
            rollout = self._config.rollout
            n = rollout.n_samples_per_prompt
            positions = tasks_for_step(
                backend.n_tasks, step, rollout.rollout_batch_size, rollout.rollout_seed, rollout.rollout_shuffle
            )
            self._begin(len(positions) * n)
            groups = await self._run_groups(backend, positions)
            samples = []
            for i, (position, group) in enumerate(zip(positions, groups, strict=True)):
                group_index = step * len(positions) + i
                samples += [
                    self._sample(backend, renderer, result, position, group_index, group_index * n + k)
                    for k, result in enumerate(group)
                ]
            self._note(step, samples)
            return [as_row(sample) for sample in samples]

    async def progress(self) -> dict[str, float]:
        """Of the step in work, or the last one: rollouts done, total and failed; tokens sampled, and per second."""
        counters = self._transport.counters if self._transport is not None else None
        began, tokens_before = self._started
        tokens = (counters.tokens if counters else 0) - tokens_before
        seconds = max(time.monotonic() - began, 1e-3)
        return {
            **self._progress,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "requests_in_flight": counters.in_flight if counters else 0,
            "event_loop_lag": self._lag.worst,
        }

    async def close(self) -> None:
        """Give up what is running and free everything; may be called twice."""
        await self._lag.stop()
        if self._transport is not None:
            await self._transport.close()
        if self._backend is not None:
            await self._backend.close()
        self._backend = self._transport = None
        if self._handler is not None:
            logging.getLogger().removeHandler(self._handler)
            self._handler.close()
            self._handler = None

    async def _open(self) -> tuple[EpisodeBackend, RendererChoice]:
        async with self._ready:
            if self._backend is None or self._renderer is None:
                self._start_logging()
                interpreter.go_offline()
                report("loading the environment and the renderer")
                renderer, transport, backend = await asyncio.to_thread(self._load)
                await backend.open()
                self._renderer, self._transport, self._backend = renderer, transport, backend
                self._lag.start()
                log.info("%s; harness %s; %d tasks", renderer.line(), backend.harness, backend.n_tasks)
            return self._backend, self._renderer

    def _load(self) -> tuple[RendererChoice, MilesSGLangTransport, EpisodeBackend]:
        """Imports and files, for a thread: verifiers, transformers and an environment take seconds."""
        interpreter.check_verifiers(self._config.environment.verifiers)
        from miles_verifiers.rollout.episodes_v02 import MODEL_NAME, EpisodeBackend, provider_error
        from miles_verifiers.rollout.renderers import choose_renderer

        rollout = self._config.rollout
        renderer = choose_renderer(self._config.environment.renderer, self._model)
        transport = MilesSGLangTransport(
            self._engine_urls,
            limits=Limits(self._vocab_size, rollout.rollout_max_context_len, rollout.rollout_max_response_len),
            model=MODEL_NAME,
            deadlines=Deadlines(total=rollout.request_timeout),
            on_error=provider_error,
        )
        return renderer, transport, EpisodeBackend(self._config.environment, rollout, transport, renderer)

    async def _run_groups(self, backend: EpisodeBackend, positions: list[int]) -> list[list[Rollout]]:
        rollout = self._config.rollout
        slots = asyncio.Semaphore(rollout.max_concurrency)
        deadline = asyncio.get_running_loop().time() + rollout.batch_timeout
        async with asyncio.TaskGroup() as tasks:
            groups = [
                tasks.create_task(
                    backend.run_group(position, rollout.n_samples_per_prompt, slots, deadline, self._count)
                )
                for position in positions
            ]
        return [group.result() for group in groups]

    def _sample(
        self,
        backend: EpisodeBackend,
        renderer: RendererChoice,
        result: Rollout,
        position: int,
        group_index: int,
        index: int,
    ) -> Sample:
        origin = Origin(
            group_index=group_index,
            index=index,
            task_index=position,
            environment=backend.name,
            renderer=renderer.name,
            prompt=backend.prompt(position),
            reward_key=self._config.rollout.reward_key,
        )
        return to_sample(result, origin)

    def _begin(self, total: int) -> None:
        assert self._transport is not None
        self._progress = {"done": 0, "total": total, "failed": 0}
        self._started = (time.monotonic(), self._transport.counters.tokens)
        self._lag.worst = 0.0

    def _count(self, failed: bool) -> None:
        self._progress["done"] += 1
        self._progress["failed"] += failed
        report("rollouts", int(self._progress["done"]), int(self._progress["total"]))

    def _note(self, step: int, samples: list[Sample]) -> None:
        bad = [sample for sample in samples if sample.error]
        self._progress.update(done=len(samples), failed=len(bad))
        log.info("step %d: %d samples, %d with an error", step, len(samples), len(bad))
        for sample in bad:
            log.warning("sample %d of task %d %s: %s", sample.index, sample.task_index, sample.status, sample.error)

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
