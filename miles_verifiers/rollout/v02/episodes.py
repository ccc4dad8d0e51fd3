"""Backend for Verifiers 0.2.x: `vf.Environment`, episodes of n rollouts, group rewards.

Verifiers runs one rollout and captures what goes wrong in it on the trace. What concerns several is done here rather than by
`Episode.run`, because that loses every trace of a group when a group reward raises, and waits without end for a group
reward that hangs (verifiers/v1/episode.py 0.2.0): here finished traces survive both, and the deadline of the batch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import verifiers.v1 as vf
from renderers import RendererPool
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.decorators import discover_decorated

from miles_verifiers.config.settings import EnvironmentSection, RolloutSection
from miles_verifiers.errors import EnvironmentPackageError, PromptTooLong, WireError
from miles_verifiers.rollout import inline_harness
from miles_verifiers.rollout.backend import MODEL_NAME, TRAINING, GroupOptions, OnDone, Sampling, training_sampling
from miles_verifiers.rollout.clock import GroupClock, end
from miles_verifiers.rollout.renderers import RendererChoice
from miles_verifiers.rollout.shared_servers import SharedServers
from miles_verifiers.rollout.traces import Rollout, failure
from miles_verifiers.rollout.v02.build import build_environment, load_tasks, sampling
from miles_verifiers.wire.transport import MilesSGLangTransport

log = logging.getLogger(__name__)


def provider_error(error: WireError) -> Exception:
    """The error that Verifiers expects of a client, under the name of ours, which traces record as the error's type."""
    if isinstance(error, PromptTooLong):
        return vf.OverlongPromptError(str(error))
    kind = type(type(error).__name__, (vf.ProviderError,), {})
    failure: Exception = kind(str(error), status_code=error.status)
    return failure


class _PooledTrainClient(TrainClient):
    """TrainClient with a renderer made beforehand; its own makes one on the event loop, at the first request."""

    def _renderer_pool(self, model: str, *, chat_template_kwargs: Any = None) -> Any:
        return self._pool

    @classmethod
    def over(cls, transport: Any, pool: Any) -> _PooledTrainClient:
        client = cls(transport)
        client._pool = pool
        return client


class EpisodeBackend:
    """One environment and how to run groups of it. `open` before use, `close` after, on one event loop."""

    def __init__(
        self,
        environment: EnvironmentSection,
        rollout: RolloutSection,
        transport: MilesSGLangTransport,
        renderer: RendererChoice,
    ) -> None:
        self._rollout = rollout
        self._transport = transport
        self._env = build_environment(environment, rollout)
        self._tasks = load_tasks(self._env, environment)
        if (type(self._tasks[0]).tools or type(self._env.taskset).tools) and not renderer.tools:
            raise EnvironmentPackageError(
                f"the environment has tools, and the renderer {renderer.name} can render none",
                where=f"environment {self.name}",
                next_step="set environment.renderer to the model's own renderer",
            )
        self._training_sampling = training_sampling(rollout)
        self._context = vf.ModelContext(
            client=_PooledTrainClient.over(transport, RendererPool(renderer.make, size=1)),
            model=MODEL_NAME,
            sampling=sampling(self._training_sampling),
        )
        self._serving = SharedServers(self._env.serving, start=rollout.setup_timeout)

    @property
    def name(self) -> str:
        return str(self._env.config.env_id)

    @property
    def harness(self) -> str:
        return "inline" if isinstance(self._env.harness, inline_harness.InlineHarness) else self._env.harness.config.id

    @property
    def module_file(self) -> str:
        """Where the environment's code comes from."""
        return str(getattr(sys.modules.get(type(self._env.taskset).__module__), "__file__", ""))

    @property
    def n_tasks(self) -> int:
        return len(self._tasks)

    @property
    def compares(self) -> bool:
        return bool(discover_decorated(self._tasks[0], "group_reward"))

    def prompt(self, position: int) -> str:
        return str(self._tasks[position].data.prompt_text)

    def messages(self, position: int) -> list[dict[str, Any]]:
        """The conversation that opens the task, as it is rendered; empty where a user simulator opens it."""
        data = self._tasks[position].data
        return inline_harness.opening_messages(data.system_prompt, data.prompt)

    async def open(self) -> None:
        """Start what all rollouts share: interception servers, shared tool servers. Raises what their start raises."""
        await self._serving.open()

    async def close(self) -> None:
        await self._serving.close()
        await inline_harness.close_connections()

    async def run_group(
        self,
        position: int,
        n: int,
        slots: asyncio.Semaphore,
        deadline: float,
        on_done: OnDone | None = None,
        options: GroupOptions = TRAINING,
    ) -> list[Rollout]:
        """See `Backend.run_group`."""
        clock = GroupClock(deadline, options.timeout)
        done = [Rollout(None) for _ in range(n)]
        members = list(range(n))
        for attempt in range(options.retries + 1):
            try:
                # An episode of all n even for a few of them: Verifiers refuses a single rollout of a task with group rewards.
                episode = self._env.episode(self._tasks[position], self._context, n=n)
            except Exception as error:
                log.exception("task %d cannot be run", position)
                return [Rollout(None, ended=f"the task cannot be run: {type(error).__name__}: {error}")] * n
            for k in members:
                seed = options.seed(k, attempt)
                episode.rollouts[k].ctx = self._context_of(options.sampling, seed)
                done[k] = Rollout(None, seed=seed, earlier=_attempts(done[k], attempt))
            await self._run_all(
                [episode.rollouts[k] for k in members], [done[k] for k in members], slots, clock, on_done
            )
            members = [k for k in members if failure(done[k])]
            if not members or clock.is_over():
                break
        await self._score(self._tasks[position], done, clock, options.scoring_retries)
        return done

    async def _run_all(
        self,
        rollouts: list[Any],
        results: list[Rollout],
        slots: asyncio.Semaphore,
        clock: GroupClock,
        on_done: OnDone | None,
    ) -> None:
        """Run all, and fill in what came of each."""

        async def run(rollout: Any) -> None:
            async with slots:
                clock.start()
                try:
                    await rollout.run()
                finally:
                    if rollout.trace is not None:
                        self._transport.cancel(rollout.trace.id)
            if on_done is not None:
                on_done(rollout.trace.has_error)

        running = [asyncio.create_task(run(rollout)) for rollout in rollouts]
        try:
            await clock.wait(running)
        finally:
            # Cancelled rollouts still stop their runtimes, which takes a moment and is bounded by Verifiers.
            outcomes = await end(running)
        for rollout, result, outcome in zip(rollouts, results, outcomes, strict=True):
            if isinstance(outcome, Exception):
                log.error("a rollout raised instead of recording its error", exc_info=outcome)
                result.ended = f"{type(outcome).__name__}: {outcome}"
            elif outcome is not None:
                when = "before the rollout began" if rollout.trace is None else "during the rollout"
                result.ended = f"{clock.whose()} passed {when}"
            self._fill(result, rollout.trace)

    def _fill(self, result: Rollout, trace: Any) -> None:
        if trace is None:
            return
        timing = trace.timing
        result.trace = trace
        result.turns = self._transport.take(trace.id)
        result.timings = {
            "setup": timing.setup.duration,
            "generation": timing.generation.duration,
            "engine": sum(turn.seconds for turn in result.turns),
            "scoring": timing.scoring.duration,
            "total": max(0.0, max(timing.scoring.end, timing.generation.end) - timing.start),
        }

    async def _score(self, task: Any, results: list[Rollout], clock: GroupClock, retries: int) -> None:
        """Apply the group rewards; why that failed is put down with each. They see failed rollouts too, as in Verifiers."""
        if not discover_decorated(task, "group_reward"):
            return
        error = ""
        if any(result.ended for result in results):
            error = "the group is incomplete: not every rollout of it came to its end"
        else:
            for _ in range(retries + 1):
                error = await self._score_once(task, [result.trace for result in results], clock)
                if not error or clock.is_over():
                    break
        for result in results:
            result.scoring_error = error

    async def _score_once(self, task: Any, traces: list[Any], clock: GroupClock) -> str:
        limit = self._rollout.scoring_timeout
        try:
            async with asyncio.timeout(min(limit, clock.left())):
                await task.score_group(traces)
        except TimeoutError:
            whole = f"{clock.whose()} passed during group rewards"
            return whole if clock.is_over() else f"group rewards took more than {limit:g} s"
        except Exception as error:
            log.warning("group scoring failed", exc_info=True)
            return f"{type(error).__name__}: {error}"
        return ""

    def _context_of(self, how: Sampling | None, seed: int | None) -> Any:
        if how is None and seed is None:
            return self._context
        return vf.ModelContext(
            client=self._context.client, model=MODEL_NAME, sampling=sampling(how or self._training_sampling, seed)
        )


def _attempts(before: Rollout, attempt: int) -> tuple[str, ...]:
    return (*before.earlier, failure(before)) if attempt else ()
