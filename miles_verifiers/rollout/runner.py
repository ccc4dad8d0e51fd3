"""Groups of one environment, run: those of a training step, and those of an evaluation.

What to run and what becomes of it is decided by pure modules (`groups`, `policies`, `tasks`); here is what waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from miles_verifiers.config.settings import EnvironmentSection, RolloutSection, RunConfig
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.backend import Backend, GroupOptions, SeedOf, eval_sampling, unseeded
from miles_verifiers.rollout.causes import cause_of, name_of
from miles_verifiers.rollout.cursor import Cursor
from miles_verifiers.rollout.groups import Batch, Collector, Group
from miles_verifiers.rollout.policies import Filter, judge
from miles_verifiers.rollout.slots import Slots
from miles_verifiers.rollout.tasks import TaskRow, sampling_seed
from miles_verifiers.rollout.traces import Origin, to_sample

log = logging.getLogger(__name__)

Watch = Callable[[str, bool], None]
"""Told of `started` and `ended` rollouts, and whether they failed."""


@dataclass(slots=True)
class Seen:
    """What happened while groups ran, also to those that nobody trains on; rollouts by name of the cause."""

    causes: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)

    def add(self, samples: Sequence[Sample], retried: Sequence[str]) -> None:
        self.causes.update(filter(None, map(cause_of, samples)))
        self.retried.update(retried)


class Runner:
    """`backend` runs the tasks of `environment`; `renderer` is the name that samples carry."""

    def __init__(
        self,
        backend: Backend,
        environment: EnvironmentSection,
        config: RunConfig,
        *,
        renderer: str,
        dynamic_filter: Filter | None = None,
        watch: Watch = lambda _what, _failed: None,
    ) -> None:
        self._backend, self._environment, self._renderer = backend, environment, renderer
        self._name = environment.label
        self._rollout = config.rollout
        self._seeded = config.engine.enable_deterministic_inference
        self._filter, self._watch = dynamic_filter, watch
        self.seen = Seen()

    async def step(self, cursor: Cursor, want: int) -> Batch:
        """`want` accepted groups from `cursor` on, numbered, or fewer and why."""
        rollout = self._rollout
        row = TaskRow(self._backend.n_tasks, rollout.rollout_seed, rollout.rollout_shuffle, rollout.num_epoch)
        collector = Collector(
            cursor,
            want=want,
            wave=_wave(want, rollout),
            surplus=rollout.surplus_groups,
            max_dropped=rollout.max_dropped_groups,
            last=row.end,
        )
        await self._collect(collector, row)
        batch = collector.batch()
        self.seen = Seen()
        # Not those that nobody needed: which of them came to their end is chance, and they are run again.
        for group in [*batch.groups, *batch.discarded]:
            self.seen.add(group.samples, group.retried)
        _number([group.samples for group in batch.groups], cursor.groups, rollout.n_samples_per_prompt)
        return batch

    async def _collect(self, collector: Collector, row: TaskRow) -> None:
        slots = Slots(self._rollout.max_concurrency)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._rollout.batch_timeout
        running: set[asyncio.Task[Group]] = set()
        try:
            while not collector.done:
                for position in collector.to_start():
                    running.add(loop.create_task(self._group(position, row.task(position), slots, deadline)))
                # Groups end themselves at the deadline; the collector must know that none may follow them.
                ended, running = await asyncio.wait(
                    running, timeout=max(0.0, deadline - loop.time()), return_when=asyncio.FIRST_COMPLETED
                )
                if loop.time() >= deadline:
                    collector.close()
                    ended |= (await asyncio.wait(running))[0] if running else set()
                    running = set()
                for task in ended:
                    collector.finish(task.result())
        finally:
            await _given_up(running)

    async def _group(self, position: int, task: int, slots: Slots, deadline: float) -> Group:
        rollout = self._rollout
        options = GroupOptions(
            seed=self._seeds(self._name, position),
            retries=rollout.rollout_retries,
            scoring_retries=rollout.scoring_retries,
            timeout=rollout.group_timeout,
        )
        samples, retried = await self._samples(task, rollout.n_samples_per_prompt, slots, deadline, options)
        verdict = judge(samples, rollout, self._filter)
        if not verdict.kept:
            log.info("group %d of task %d dropped: %s", position, task, verdict.cause)
        return Group(position, samples, verdict, retried)

    @property
    def eval_tasks(self) -> int:
        return min(self._environment.eval_tasks or self._backend.n_tasks, self._backend.n_tasks)

    @property
    def eval_samples(self) -> int:
        """Samples per task in evaluations."""
        return self._environment.n_samples_per_eval_prompt or self._rollout.n_samples_per_eval_prompt

    async def evaluate(self) -> list[Sample]:
        """Samples of every task to evaluate on, in order; whatever happens to one of them, the others are there."""
        n = self.eval_samples
        slots = Slots(self._rollout.max_concurrency)
        deadline = asyncio.get_running_loop().time() + self._rollout.eval_timeout
        results: dict[int, tuple[list[Sample], list[str]]] = {}
        tasks = iter(range(self.eval_tasks))
        # Enough groups at a time to fill all slots, not all of a large taskset at once.
        lines = min(self.eval_tasks, 1 + -(-self._rollout.max_concurrency // n))
        running = {asyncio.create_task(self._eval_groups(tasks, results, n, slots, deadline)) for _ in range(lines)}
        try:
            await asyncio.gather(*running)
        finally:
            await _given_up(running)
        groups = [results[task] for task in sorted(results)]
        _number([samples for samples, _ in groups], 0, n)
        self.seen = Seen()
        for samples, retried in groups:
            self.seen.add(samples, retried)
        return [sample for samples, _ in groups for sample in samples]

    async def _eval_groups(
        self,
        tasks: Iterator[int],
        results: dict[int, tuple[list[Sample], list[str]]],
        n: int,
        slots: Slots,
        deadline: float,
    ) -> None:
        for task in tasks:
            options = GroupOptions(
                sampling=eval_sampling(self._rollout),
                seed=self._seeds(f"evaluation of {self._name}", task),
                retries=self._rollout.rollout_retries,
                scoring_retries=self._rollout.scoring_retries,
                timeout=self._rollout.group_timeout,
            )
            results[task] = await self._samples(task, n, slots, deadline, options)

    async def _samples(
        self, task: int, n: int, slots: Slots, deadline: float, options: GroupOptions
    ) -> tuple[list[Sample], list[str]]:
        """The task's samples, not numbered yet, and why some of them were run again."""
        for _ in range(n):
            self._watch("started", False)
        rollouts = await self._backend.run_group(task, n, slots, deadline, partial(self._watch, "ended"), options)
        origin = Origin(
            group_index=-1,
            index=-1,
            task_index=task,
            environment=self._name,
            renderer=self._renderer,
            prompt=self._backend.prompt(task),
            reward_key=self._rollout.reward_key,
        )
        samples = [to_sample(rollout, origin) for rollout in rollouts]
        for sample in samples:
            if sample.error:
                log.warning("a sample of task %d %s: %s", task, sample.status, sample.error)
        return samples, [name_of(error) for rollout in rollouts for error in rollout.earlier]

    def _seeds(self, environment: str, position: int) -> SeedOf:
        if not self._seeded:
            return unseeded
        return partial(sampling_seed, self._rollout.rollout_seed, environment, position)


def _wave(want: int, rollout: RolloutSection) -> int:
    """Groups to start at a time: this environment's share of over_sampling_batch_size, rounded up."""
    whole = rollout.over_sampling_batch_size or rollout.rollout_batch_size
    return max(want, -(-whole * want // rollout.rollout_batch_size))


def _number(groups: Sequence[Sequence[Sample]], first: int, n: int) -> None:
    for number, samples in enumerate(groups, start=first):
        for k, sample in enumerate(samples):
            sample.group_index, sample.index = number, number * n + k


async def _given_up(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels what still runs and waits until it let go: rollouts abort their requests and stop their children."""
    left = [task for task in tasks if not task.done()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
