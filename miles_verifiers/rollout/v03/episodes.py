"""Backend for Verifiers' Env API (0.3.1, 0.4.0): `vf.Env`, episodes of an environment's own making, scored in `finalize`.

There are no group rewards in this API. An environment that compares attempts makes them in its `run` and scores them in
its `finalize`: its episode is a whole group. Of any other environment a group is as many episodes. Either way Verifiers runs
the episode and keeps what is finished when `run` or `finalize` raises or takes too long (verifiers/v1/env.py 0.4.0); what it
does not know are the bound on all rollouts in flight and the step's deadline, which are put around its agents here.

The engine is reached over HTTP, through a gateway on loopback: a ModelContext of this API names an endpoint, no client.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from miles_verifiers.config.settings import EnvironmentSection, RolloutSection
from miles_verifiers.rollout import inline_harness
from miles_verifiers.rollout.backend import MODEL_NAME, TRAINING, GroupOptions, OnDone, training_sampling
from miles_verifiers.rollout.clock import AGAIN_S, GroupClock, end
from miles_verifiers.rollout.renderers import RendererChoice
from miles_verifiers.rollout.shared_servers import SharedServers
from miles_verifiers.rollout.traces import Rollout, failure
from miles_verifiers.rollout.v03 import build
from miles_verifiers.rollout.v03.play import Play, Setting, seeded
from miles_verifiers.wire.gateway import Gateway

log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""For an episode to end after its deadline and that of its scoring, before it is cancelled as a whole."""


class EnvBackend:
    """One environment and how to run groups of it (see backend.Backend)."""

    def __init__(
        self,
        environment: EnvironmentSection,
        rollout: RolloutSection,
        gateway: Gateway,
        renderer: RendererChoice,
        model: Path,
    ) -> None:
        self._rollout = rollout
        self._gateway = gateway
        self._train_seat = environment.train_seat
        self._env = build.build_environment(environment, rollout)
        self._tasks = build.load_tasks(self._env, environment)
        build.check_tools(self._env, self._tasks, renderer)
        self._attempts = build.attempts_field(self._env, environment.attempts_field)
        self._seats = tuple(build.seats_of(self._env.config))
        self._renderer = renderer
        self._model = model
        self._client: Any = None
        self._training_sampling = training_sampling(rollout)
        self._serving = SharedServers(self._shared, start=rollout.setup_timeout)

    @property
    def name(self) -> str:
        return str(self._env.config.env_id)

    @property
    def harness(self) -> str:
        ids = {self._env._agent_harness(spec).id for spec in build.seats_of(self._env.config).values()}
        return ", ".join(sorted("inline" if name == inline_harness.PLUGIN_ID else name for name in ids))

    @property
    def module_file(self) -> str:
        return str(getattr(sys.modules.get(type(self._env.taskset).__module__), "__file__", ""))

    @property
    def n_tasks(self) -> int:
        return len(self._tasks)

    def prompt(self, position: int) -> str:
        return str(self._tasks[position].data.prompt_text)

    def messages(self, position: int) -> list[dict[str, Any]]:
        data = self._tasks[position].data
        return inline_harness.opening_messages(data.system_prompt, data.prompt)

    @property
    def compares(self) -> bool:
        return self._attempts is not None

    async def open(self) -> None:
        await self._serving.open()

    async def close(self) -> None:
        await self._serving.close()
        await inline_harness.close_connections()

    @asynccontextmanager
    async def _shared(self) -> AsyncIterator[None]:
        async with self._gateway, self._env.serving():
            self._client = build.client_config(self._gateway.base_url, self._model, self._renderer)
            yield

    async def run_group(
        self,
        position: int,
        n: int,
        slots: asyncio.Semaphore,
        deadline: float,
        on_done: OnDone | None = None,
        options: GroupOptions = TRAINING,
    ) -> list[Rollout]:
        """See `Backend.run_group`: one episode of n attempts, or n episodes, those that failed run again."""
        clock = GroupClock(deadline, options.timeout)
        setting = Setting(
            env=self._env,
            seats=self._seats,
            trained=self._is_trained,
            attempts_field=self._attempts,
            take=self._gateway.take,
            cancel=self._gateway.cancel,
            slots=slots,
            clock=clock,
            options=options,
            on_done=on_done,
        )
        if self._attempts is not None:
            play = Play(setting, first=0, size=n)
            await self._perform([play], position, clock, options)
            return play.results()
        plays = {k: Play(setting, first=k, size=1) for k in range(n)}
        done = [Rollout(None)] * n
        for attempt in range(options.retries + 1):
            await self._perform(list(plays.values()), position, clock, options)
            for k, play in plays.items():
                (done[k],) = play.results()
            failed = {k: failure(done[k]) for k in plays if failure(done[k])}
            if not failed or clock.is_over():
                break
            plays = {
                k: Play(setting, first=k, size=1, attempt=attempt + 1, earlier=(*done[k].earlier, why))
                for k, why in failed.items()
            }
        return done

    async def _perform(self, plays: list[Play], position: int, clock: GroupClock, options: GroupOptions) -> None:
        """Run all; returns when they are over, which the deadline makes them be."""
        task = self._tasks[position]
        running = [
            asyncio.create_task(play.perform(task, self._context_of(options, play, self._attempts is None)))
            for play in plays
        ]

        def cancel_agents() -> None:
            for play in plays:
                play.cancel_agents()

        try:
            await clock.wait(running)
            for play, performance in zip(plays, running, strict=True):
                if performance.done():
                    continue
                if play.watched or self._attempts is not None:
                    play.end()
                else:
                    performance.cancel()  # it waits for a slot
            await self._see_out(running, cancel_agents)
        finally:
            # Cancelled rollouts still stop their runtimes, which takes a moment and is bounded by Verifiers.
            outcomes = await end(running, cancel_agents)
        for play, outcome in zip(plays, outcomes, strict=True):
            if isinstance(outcome, Exception):
                log.error("an episode raised instead of recording its error", exc_info=outcome)
                play.error = f"{type(outcome).__name__}: {outcome}"

    async def _see_out(self, running: list[asyncio.Task[None]], cancel_agents: Callable[[], None]) -> None:
        """Give episodes that were told to end the time for it; agents that go on all the same are cancelled again."""
        left, pending = self._rollout.scoring_timeout + _GRACE_S, {task for task in running if not task.done()}
        while pending and left > 0:
            _, pending = await asyncio.wait(pending, timeout=AGAIN_S)
            left -= AGAIN_S
            cancel_agents()

    def _context_of(self, options: GroupOptions, play: Play, alone: bool) -> Any:
        sampling = build.sampling(options.sampling or self._training_sampling)
        context = vf.ModelContext(model=MODEL_NAME, client=self._client, sampling=sampling)
        return seeded(context, options.seed(play.first, play.attempt)) if alone else context

    def _is_trained(self, trace: Any) -> bool:
        if self._train_seat is None:
            return bool(trace.agent.trainable)
        return bool(trace.agent.name == self._train_seat)
