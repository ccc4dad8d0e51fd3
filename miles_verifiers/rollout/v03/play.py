"""One episode of Verifiers' Env API while it runs: its agents watched, bounded, seeded and, where asked for, run again.

Verifiers knows neither the bound on all rollouts in flight nor a group's deadline. They are put around what environments
override and call: `Env.run`, `Env.finalize` and an agent's `run`. That needs no patch: agents are made anew for every
episode, and a shallow copy of the environment shares all that its `serving` started (verifiers/v1/env.py, 0.3.1 and 0.4.0).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from miles_verifiers.rollout.backend import GroupOptions, OnDone
from miles_verifiers.rollout.clock import GroupClock
from miles_verifiers.rollout.traces import Rollout, failure
from miles_verifiers.rollout.v03.traces import scoring_problem, view_of
from miles_verifiers.wire.core import Turn

INCOMPLETE = "the group is incomplete: not every rollout of it came to its end"


@dataclass(frozen=True, slots=True)
class Setting:
    """What the episodes of a group have in common."""

    env: Any
    seats: tuple[str, ...]
    trained: Callable[[Any], bool]
    """Whether a trace is one to train on."""
    attempts_field: str | None
    """Field of the environment's config for the number of attempts; None where an episode is one rollout."""
    take: Callable[[str], list[Turn]]
    """The turns of a trace, by its id; once."""
    cancel: Callable[[str], object]
    slots: asyncio.Semaphore
    clock: GroupClock
    options: GroupOptions
    on_done: OnDone | None


@dataclass(slots=True)
class _Watched:
    """A trace and what is known of it besides."""

    trace: Any
    seed: int | None = None
    earlier: tuple[str, ...] = ()
    finished: bool = False
    turns: list[Turn] | None = None


@dataclass(slots=True)
class Play:
    """One episode that is to give `size` rollouts, numbers `first` and following of their group."""

    setting: Setting
    first: int
    size: int
    attempt: int = 0
    earlier: tuple[str, ...] = ()
    watched: dict[str, _Watched] = field(default_factory=dict)
    """Traces by id, in the order in which they began; without those that were run again."""
    error: str = ""
    """Why the episode as a whole failed."""
    scoring_error: str = ""
    finalized: bool = False
    limit: asyncio.Timeout | None = None
    agents: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks in which an agent runs now."""
    begun: int = 0

    async def perform(self, task: Any, context: Any) -> None:
        """Run the episode. What goes wrong is in the results."""
        alone = self.setting.attempts_field is None
        if alone:
            await self.setting.slots.acquire()
            self.setting.clock.start()
        try:
            made = await self._view().run_episode(
                task, context, on_trace=self._on_trace, on_discard=lambda trace: self.watched.pop(trace.id, None)
            )
        finally:
            if alone:
                self.setting.slots.release()
            for name in self.watched:
                self.setting.cancel(name)
        for trace in made.traces:
            if trace.id in self.watched:
                self.watched[trace.id].finished = True
        if made.last_error is not None and not self.setting.clock.is_over():
            self.error = f"{made.last_error.type}: {made.last_error.message}"
        if alone and self.setting.on_done is not None:
            self.setting.on_done(bool(self.error) or any(failure(result) for result in self.results()))

    def end(self) -> None:
        """The deadline has passed: `run` ends with what is finished. Unfinished rollouts are cancelled."""
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())

    def cancel_agents(self) -> None:
        """Cancel whatever agent still runs. A task group cancels its tasks only once, which may be lost: see `clock.end`."""
        for task in self.agents:
            task.cancel()

    def results(self) -> list[Rollout]:
        """`size` rollouts, once the episode is over."""
        trained = [watched for watched in self.watched.values() if self.setting.trained(watched.trace)]
        for watched in self.watched.values():
            self._take(watched)
        if len(trained) > self.size:
            seats = ", ".join(sorted({watched.trace.agent.name for watched in trained}))
            why = (
                f"the episode has {len(trained)} rollouts to train on, {self.size} were asked for (seats: {seats}): "
                "set environment.train_seat or environment.attempts_field"
            )
            return [Rollout(None, ended=why) for _ in range(self.size)]
        complete = len(trained) == self.size and all(watched.finished for watched in trained)
        why = self.error or f"{self.setting.clock.whose()} passed before the rollout began"
        missing = [Rollout(None, ended=why, earlier=self.earlier) for _ in range(self.size - len(trained))]
        return [self._result(watched, complete) for watched in trained] + missing

    def _result(self, watched: _Watched, complete: bool) -> Rollout:
        trace, timing = watched.trace, watched.trace.timing
        return Rollout(
            trace=view_of(trace),
            turns=self._take(watched),
            ended="" if watched.finished else f"{self.setting.clock.whose()} passed during the rollout",
            scoring_error=scoring_problem(trace) or self._unscored(complete),
            seed=watched.seed,
            earlier=watched.earlier,
            timings={
                "setup": timing.setup.duration,
                "generation": timing.agent.duration,
                "engine": sum(turn.seconds for turn in self._take(watched)),
                "scoring": timing.scoring.duration,
                "total": max(0.0, max(timing.scoring.end, timing.agent.end) - timing.start),
            },
        )

    def _unscored(self, complete: bool) -> str:
        """Why the episode's rollouts were not scored together, where they should have been."""
        if self.finalized:
            return ""
        if complete:
            late = f"{self.setting.clock.whose()} passed before the episode was scored"
            return self.scoring_error or self.error or late
        return INCOMPLETE if _compares(self.setting.env) else ""

    def _view(self) -> Any:
        """The environment as this episode sees it: of the right size, its hooks under the group's deadline."""
        view = copy.copy(self.setting.env)
        timeout = view.config.timeout
        update: dict[str, Any] = {"timeout": timeout.model_copy(update={"finalize": None})}
        if self.setting.attempts_field is not None:
            update[self.setting.attempts_field] = self.size
        view.config = view.config.model_copy(update=update)
        run, finalize = view.run, view.finalize

        async def bounded_run(task: Any, agents: Any) -> None:
            for seat in self.setting.seats:
                self._watch(getattr(agents, seat))
            try:
                async with asyncio.timeout(None) as self.limit:
                    if self.setting.clock.is_over():
                        self.end()
                    await run(task, agents)
            finally:
                self.limit = None

        async def bounded_finalize(task: Any, episode: Any) -> None:
            episode.traces[:] = [trace for trace in episode.traces if trace.id in self.watched]
            await self._finalize(lambda: finalize(task, episode), timeout.finalize)
            self.finalized = True

        view.run, view.finalize = bounded_run, bounded_finalize
        return view

    async def _finalize(self, finalize: Callable[[], Any], limit: float) -> None:
        """Finalize, again where it raises and the options ask for it; `scoring_error` says why it failed in the end."""
        clock = self.setting.clock
        for attempts_left in range(self.setting.options.scoring_retries, -1, -1):
            try:
                async with asyncio.timeout(min(limit, clock.left())):
                    await finalize()
                return
            except TimeoutError:
                whole = f"{clock.whose()} passed during group rewards"
                self.scoring_error = whole if clock.is_over() else f"group rewards took more than {limit:g} s"
                error: Exception = TimeoutError(self.scoring_error)
            except Exception as raised:
                self.scoring_error, error = f"{type(raised).__name__}: {raised}", raised
            if not attempts_left or clock.is_over():
                raise error

    def _watch(self, agent: Any) -> None:
        """Let `agent` take a slot for each rollout where an episode has several, and run again what failed."""
        agent_run = agent.run

        async def run(*arguments: Any, **options: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self.agents.add(task)
            try:
                return await agent_run(*arguments, **options)
            finally:
                self.agents.discard(task)

        async def alone(*arguments: Any, **options: Any) -> Any:
            trace = await run(*arguments, **options)
            self.watched[trace.id].finished = True
            return trace

        async def one_of_several(*arguments: Any, **options: Any) -> Any:
            number, self.begun = self.first + self.begun, self.begun + 1
            earlier: tuple[str, ...] = ()
            context = agent.ctx
            for attempt in range(self.setting.options.retries + 1):
                seed = self.setting.options.seed(number, attempt)
                async with self.setting.slots:
                    self.setting.clock.start()
                    # Read before the first await of `run`: agent.py `_rollout_params`, 0.3.1 and 0.4.0.
                    agent.ctx = seeded(context, seed)
                    trace = await run(*arguments, **options)
                watched = self.watched[trace.id]
                watched.finished, watched.seed, watched.earlier = True, seed, earlier
                failed = failure(Rollout(view_of(trace), self._take(watched)))
                if self.setting.on_done is not None:
                    self.setting.on_done(bool(failed))
                if not failed or attempt == self.setting.options.retries or self.setting.clock.is_over():
                    return trace
                earlier = (*earlier, failed)
                del self.watched[trace.id]
            raise AssertionError("unreachable: the last attempt returns")

        agent.run = alone if self.setting.attempts_field is None else one_of_several

    def _on_trace(self, trace: Any) -> None:
        seed = self.setting.options.seed(self.first, self.attempt) if self.setting.attempts_field is None else None
        self.watched[trace.id] = _Watched(trace, seed, self.earlier)

    def _take(self, watched: _Watched) -> list[Turn]:
        if watched.turns is None:
            watched.turns = self.setting.take(watched.trace.id)
        return watched.turns


def seeded(context: Any, seed: int | None) -> Any:
    """A `vf.ModelContext` with a sampling seed; sampling passes keys that it does not know on to the client."""
    if seed is None:
        return context
    return dataclasses.replace(context, sampling=context.sampling.model_copy(update={"sampling_seed": seed}))


def _compares(env: Any) -> bool:
    from verifiers.v1 import Env

    return type(env).finalize is not Env.finalize
