"""What the rollouts ask of a Verifiers version: one interface, one implementation per generation of Verifiers' API.

    episodes_v02   the episode API, 0.2.x: n rollouts, group rewards; through the in-process transport
    episodes_v03   the Env API, 0.3.1 and 0.4.0: an environment's own `run` and `finalize`; through a gateway on loopback

Both promise the same: `run_group` gives exactly n results, in order, and raises for nothing that a rollout, a reward or an
engine does; what is finished survives a raising or hanging group reward and the deadline; whatever is given up is aborted in
the engine.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.rollout.traces import Rollout

MODEL_NAME = "policy"
"""Under which the engine's model is known to Verifiers and renderers."""
OnDone = Callable[[bool], None]
"""Told of each rollout that ran to its end, whether it failed."""
SeedOf = Callable[[int, int], int | None]
"""Sampling seed of rollout k of a group, at attempt a (0, 1, ...); None leaves sampling to the engine's own state."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How replies are sampled; `top_k` -1 and `top_p` 1.0 leave the distribution whole."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


def training_sampling(rollout: RolloutSection) -> Sampling:
    return Sampling(
        rollout.rollout_temperature, rollout.rollout_top_p, rollout.rollout_top_k, rollout.rollout_max_response_len
    )


def eval_sampling(rollout: RolloutSection) -> Sampling:
    """As training rollouts are sampled, but for what the configuration sets for evaluations."""
    own = {
        "temperature": rollout.eval_temperature,
        "top_p": rollout.eval_top_p,
        "top_k": rollout.eval_top_k,
        "max_tokens": rollout.eval_max_response_len,
    }
    changes: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
    return replace(training_sampling(rollout), **changes)


def unseeded(_rollout: int, _attempt: int) -> int | None:
    return None


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """How a group is run, where that is not the same for all groups of a run."""

    sampling: Sampling | None = None
    """None: as training rollouts are sampled."""
    seed: SeedOf = unseeded
    retries: int = 0
    """How often a rollout that failed is run again, before the group is scored."""
    scoring_retries: int = 0
    """How often a group reward that failed is asked again; the rollouts stay."""
    timeout: float = math.inf
    """Seconds for the group, from the start of its first rollout, retries and scoring included."""


TRAINING = GroupOptions()


@runtime_checkable
class Backend(Protocol):
    """One environment and how to run groups of it. `open` before use, `close` after, on one event loop."""

    @property
    def name(self) -> str:
        """The environment's id."""
        ...

    @property
    def harness(self) -> str:
        """`inline`, or the id of the Verifiers harness that runs the rollouts."""
        ...

    @property
    def module_file(self) -> str:
        """Where the environment's code comes from; empty where that is not known."""
        ...

    @property
    def n_tasks(self) -> int: ...

    @property
    def compares(self) -> bool:
        """Whether tasks compare the rollouts of a group with each other, which takes two at least."""
        ...

    def prompt(self, position: int) -> str:
        """The task's prompt as text, for people."""
        ...

    def messages(self, position: int) -> list[dict[str, Any]]:
        """The conversation that opens the task, as it is rendered; empty where a user simulator opens it."""
        ...

    async def open(self) -> None:
        """Start what all rollouts share. Raises what their start raises."""
        ...

    async def close(self) -> None:
        """Give up what is running and free everything. May be called twice, and without `open`."""
        ...

    async def run_group(
        self,
        position: int,
        n: int,
        slots: asyncio.Semaphore,
        deadline: float,
        on_done: OnDone | None = None,
        options: GroupOptions = TRAINING,
    ) -> list[Rollout]:
        """`n` rollouts of the task at `position`, scored alone and as a group; always n, in order.

        `slots` bounds the rollouts in flight, `deadline` (the loop's clock) ends the group; `on_done(failed)` is called
        as each ends, once for each attempt. Raises only CancelledError.
        """
        ...
