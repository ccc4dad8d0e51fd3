"""Backend for Verifiers' Env API (0.3.1, 0.4.0): `vf.Env`, episodes of an environment's own making, scored in `finalize`.

There are no group rewards in this API. An environment that compares attempts makes them in its `run` and scores them in
its `finalize`: its episode is a whole group. Of any other environment a group is as many episodes. Either way Verifiers runs
the episode and keeps what is finished when `run` or `finalize` raises or takes too long (verifiers/v1/env.py 0.4.0); what it
does not know are the bound on all rollouts in flight and the step's deadline, which are put around its agents here.

The engine is reached over HTTP, through a gateway on loopback: a ModelContext of this API names an endpoint, no client.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

from miles_verifiers.config import EnvironmentSection, RolloutSection
from miles_verifiers.rollout import build_v03, inline_harness
from miles_verifiers.rollout.backend import TRAINING, GroupOptions, OnDone, Sampling, training_sampling
from miles_verifiers.rollout.clock import GroupClock
from miles_verifiers.rollout.renderers import RendererChoice
from miles_verifiers.rollout.traces import Rollout, failure
from miles_verifiers.rollout.traces_v03 import scoring_problem, view_of
from miles_verifiers.wire.gateway import Gateway

log = logging.getLogger(__name__)

_GRACE_S = 10.0
"""For an episode to end after its deadline and that of its scoring, before it is cancelled as a whole."""


@dataclass(slots=True)
class _Episode:
    """One episode while it runs, and what is left of it."""

    slots: asyncio.Semaphore
    clock: GroupClock
    on_done: OnDone | None
    context: Any
    seeds: list[int | None]
    """Of the rollouts that it is to give, in the order in which they begin."""
    begun: int = 0
    traces: list[Any] = field(default_factory=list)
    """In the order in which they began."""
    finished: set[str] = field(default_factory=set)
    """Ids of traces that came to their end."""
    error: str = ""
    """Why the episode as a whole failed: its `run` or `finalize`, or the deadline."""
    finalized: bool = False
    cut_off: bool = False
    """Whether a deadline of the group ended its `run`."""

    @property
    def size(self) -> int:
        """Rollouts that it is to give."""
        return len(self.seeds)


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
        self._renderer = renderer
        self._model = model
        self._train_seat = environment.train_seat
        self._env = build_v03.build_environment(environment, rollout)
        self._tasks = build_v03.load_tasks(self._env)
        build_v03.check_tools(self._env, self._tasks, renderer)
        self._attempts = build_v03.attempts_field(self._env, environment.attempts_field)
        self._compares = type(self._env).finalize is not vf.Env.finalize
        self._seats = tuple(build_v03.seats_of(self._env.config))
        self._context: Any = None
        self._serving: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def name(self) -> str:
        return str(self._env.config.env_id)

    @property
    def harness(self) -> str:
        ids = {self._env._agent_harness(spec).id for spec in build_v03.seats_of(self._env.config).values()}
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

    async def open(self) -> None:
        up = asyncio.Event()
        self._serving = asyncio.get_running_loop().create_task(self._serve(up))
        first = asyncio.get_running_loop().create_task(up.wait())
        await asyncio.wait({self._serving, first}, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._serving.done():
            await self._serving

    async def close(self) -> None:
        self._over.set()
        if self._serving is not None:
            await self._serving
            self._serving = None
        await inline_harness.close_connections()

    async def _serve(self, up: asyncio.Event) -> None:
        """Enter and leave in one task: shared tool servers hold cancel scopes, which must be left where they were entered."""
        async with self._gateway, self._env.serving():
            self._context = self._context_of(training_sampling(self._rollout))
            up.set()
            await self._over.wait()

    @property
    def compares(self) -> bool:
        return self._compares

    async def run_group(
        self,
        position: int,
        n: int,
        slots: asyncio.Semaphore,
        deadline: float,
        on_done: OnDone | None = None,
        options: GroupOptions = TRAINING,
    ) -> list[Rollout]:
        """`n` rollouts of the task at `position` (see backend.Backend): one episode of n attempts, or n episodes.

        What is run again is an episode: with attempts that are compared, all of the group. `scoring_retries` has no effect,
        since `finalize` belongs to the episode.
        """
        clock = GroupClock(deadline, options.timeout)
        context = self._context if options.sampling is None else self._context_of(options.sampling)
        done: list[Rollout] = [Rollout(None) for _ in range(n)]
        units = [list(range(n))] if self._attempts else [[k] for k in range(n)]
        for attempt in range(options.retries + 1):
            episodes = [
                _Episode(slots, clock, on_done, context, [options.seed(k, attempt) for k in unit]) for unit in units
            ]
            await self._run_all(self._tasks[position], episodes, clock)
            for unit, episode in zip(units, episodes, strict=True):
                for k, rollout in zip(unit, self._outcomes(episode), strict=True):
                    rollout.earlier = (*done[k].earlier, failure(done[k])) if attempt else ()
                    done[k] = rollout
            units = [unit for unit in units if any(failure(done[k]) for k in unit)]
            if not units or clock.is_over():
                break
        return done

    async def _run_all(self, task: Any, episodes: list[_Episode], clock: GroupClock) -> None:
        running = [asyncio.create_task(self._run(task, episode)) for episode in episodes]
        try:
            await clock.wait(running)
            # Those that the deadline has ended are still finalized.
            await asyncio.wait(running, timeout=self._rollout.scoring_timeout + _GRACE_S)
        finally:
            for attempt in running:
                attempt.cancel()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for episode, outcome in zip(episodes, outcomes, strict=True):
            if isinstance(outcome, Exception):
                log.error("an episode raised instead of recording its error", exc_info=outcome)
                episode.error = f"{type(outcome).__name__}: {outcome}"

    def _context_of(self, how: Sampling) -> Any:
        return build_v03.model_context(self._gateway.base_url, self._model, self._renderer, how)

    async def _run(self, task: Any, episode: _Episode) -> None:
        env = self._view(episode)
        if self._attempts:
            await self._run_episode(env, task, episode)
            return
        try:
            async with episode.clock.limit():
                await episode.slots.acquire()
        except TimeoutError:
            return
        episode.clock.start()
        try:
            await self._run_episode(env, task, episode)
        finally:
            episode.slots.release()
        if episode.on_done is not None:
            episode.on_done(bool(episode.error) or any(not trace.ok for trace in self._trained(episode)))

    async def _run_episode(self, env: Any, task: Any, episode: _Episode) -> None:
        try:
            made = await env.run_episode(
                task, episode.context, on_trace=episode.traces.append, on_discard=episode.traces.remove
            )
        finally:
            for trace in episode.traces:
                self._gateway.cancel(trace.id)
        episode.finished.update(trace.id for trace in made.traces)
        episode.finalized = not made.errors
        if made.last_error is not None and not episode.cut_off:
            episode.error = f"{made.last_error.type}: {made.last_error.message}"

    def _view(self, episode: _Episode) -> Any:
        """The environment as one episode sees it: of the right size, under its deadline, its agents bounded.

        A shallow copy shares all that `serving` started. `run` and an agent's `run` are what environments override and
        call, and agents are made anew for every episode.
        """
        view = copy.copy(self._env)
        if self._attempts:
            view.config = self._env.config.model_copy(update={self._attempts: episode.size})
        run = view.run

        async def bounded(task: Any, agents: Any) -> None:
            for seat in self._seats:
                _watch(getattr(agents, seat), episode, one_slot_each=self._attempts is not None)
            try:
                async with episode.clock.limit():
                    await run(task, agents)
            except TimeoutError:
                episode.cut_off = episode.clock.is_over()
                raise

        view.run = bounded
        return view

    def _trained(self, episode: _Episode) -> list[Any]:
        return [
            trace
            for trace in episode.traces
            if (trace.agent.trainable if self._train_seat is None else trace.agent.name == self._train_seat)
        ]

    def _outcomes(self, episode: _Episode) -> list[Rollout]:
        """As many rollouts as the episode was to give. Takes the turns of all its traces from the wire."""
        turns = {trace.id: self._gateway.take(trace.id) for trace in episode.traces}
        trained = self._trained(episode)
        if len(trained) > episode.size:
            seats = ", ".join(sorted({trace.agent.name for trace in trained}))
            why = (
                f"the episode has {len(trained)} rollouts to train on, {episode.size} were asked for (seats: {seats}): "
                "set environment.train_seat or environment.attempts_field"
            )
            return [Rollout(None, ended=why) for _ in range(episode.size)]
        complete = len(trained) == episode.size and all(trace.id in episode.finished for trace in trained)
        outcomes = [self._outcome(episode, trace, turns[trace.id], complete) for trace in trained]
        for outcome, seed in zip(outcomes, episode.seeds, strict=False):
            outcome.seed = seed
        why = episode.error or f"{episode.clock.whose()} passed before the rollout began"
        return outcomes + [Rollout(None, ended=why) for _ in range(episode.size - len(trained))]

    def _outcome(self, episode: _Episode, trace: Any, turns: list[Any], complete: bool) -> Rollout:
        timing = trace.timing
        scoring_error = scoring_problem(trace)
        if self._compares and not episode.finalized:
            incomplete = "the group is incomplete: not every rollout of it came to its end"
            scoring_error = scoring_error or (episode.error or incomplete if complete else incomplete)
        return Rollout(
            trace=view_of(trace),
            turns=turns,
            ended="" if trace.id in episode.finished else f"{episode.clock.whose()} passed during the rollout",
            scoring_error=scoring_error,
            timings={
                "setup": timing.setup.duration,
                "generation": timing.agent.duration,
                "engine": sum(turn.seconds for turn in turns),
                "scoring": timing.scoring.duration,
                "total": max(0.0, max(timing.scoring.end, timing.agent.end) - timing.start),
            },
        )


def _watch(agent: Any, episode: _Episode, *, one_slot_each: bool) -> None:
    """Note which rollouts of `agent` come to their end, and seed them; with `one_slot_each`, each takes one of the slots."""
    run = agent.run

    async def noted(*arguments: Any, **options: Any) -> Any:
        if not one_slot_each:
            trace = await _seeded_run(agent, run, episode)(*arguments, **options)
            episode.finished.add(trace.id)
            return trace
        async with episode.slots:
            episode.clock.start()
            trace = await _seeded_run(agent, run, episode)(*arguments, **options)
        episode.finished.add(trace.id)
        if episode.on_done is not None:
            episode.on_done(not trace.ok)
        return trace

    agent.run = noted


def _seeded_run(agent: Any, run: Any, episode: _Episode) -> Any:
    """`run`, on a copy of the agent whose sampling has the next seed of the episode; `run` itself where there is none."""
    number, episode.begun = episode.begun, episode.begun + 1
    seed = episode.seeds[number % episode.size]
    if seed is None:
        return run
    # A shallow copy: the context is all that a rollout takes from the agent by value (verifiers/v1/agent.py 0.3.1, 0.4.0).
    other = copy.copy(agent)
    other.ctx = build_v03.seeded(agent.ctx, seed + number // episode.size)
    return run.__func__.__get__(other)
