"""The deadlines over one group: its own, which starts with its first rollout, and that of the batch that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from miles_verifiers.errors import RolloutError

GROUP = "the group's deadline"
BATCH = "the step's deadline"
AGAIN_S = 1.0
"""After which a rollout that was cancelled and goes on is cancelled again."""
LONGEST_END_S = 120.0
"""After which it is given up, in seconds: runtimes may take a moment to stop, not minutes."""


class GroupClock:
    """`deadline` is that of the batch, on the running loop's clock; `timeout` the seconds that the group itself has."""

    def __init__(self, deadline: float, timeout: float) -> None:
        self._batch, self._timeout = deadline, timeout
        self._own = math.inf
        self._limits: set[asyncio.Timeout] = set()

    def start(self) -> None:
        """The first rollout of the group has begun. Waiting for a free slot is not the group's time."""
        if math.isinf(self._own):
            self._own = asyncio.get_running_loop().time() + self._timeout
            for limit in self._limits:
                if not limit.expired():
                    limit.reschedule(self.end)

    @property
    def end(self) -> float:
        """On the loop's clock; earlier once the group has started."""
        return min(self._own, self._batch)

    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self.end - asyncio.get_running_loop().time())

    def is_over(self) -> bool:
        return self.left() <= 0.0

    def whose(self) -> str:
        """The deadline that comes first, in words."""
        return GROUP if self._own < self._batch else BATCH

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Cancels the block at the deadline and raises TimeoutError, also where the group starts within the block."""
        async with asyncio.timeout_at(self.end) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def wait(self, running: Sequence[asyncio.Task[Any]]) -> None:
        """Returns when all are done or a deadline has passed; ends none of them."""
        with contextlib.suppress(TimeoutError):
            async with self.limit():
                await asyncio.wait(running)


async def end(
    running: Sequence[asyncio.Task[Any]], again: Callable[[], None] | None = None, *, longest: float = LONGEST_END_S
) -> list[Any]:
    """Cancel all until all are over; what came of each, as `asyncio.gather` gives it with its exceptions.

    `again` is called besides, every time but the first: for tasks of their tasks, which a task group cancels only once. What is
    not over after `longest` seconds is left behind, with a RolloutError in its place.

    Once is not always enough. `asyncio.wait_for` of Python 3.11 loses a cancellation that comes in the moment in which what it
    waits for ends, and Verifiers 0.2.0 to 0.3.1 has it around a rollout's hooks (verifiers/v1/rollout.py): the rollout would
    go on to be scored. Its teardown is shielded from any number of cancellations (utils/aio.py `run_shielded`).
    """
    loop = asyncio.get_running_loop()
    pending, given_up = {task for task in running if not task.done()}, loop.time() + longest
    while pending and (left := given_up - loop.time()) > 0:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=min(AGAIN_S, left))
        if again is not None and pending:
            again()
    return [_outcome(task, longest) for task in running]


def _outcome(task: asyncio.Task[Any], longest: float) -> Any:
    if not task.done():
        return RolloutError(f"it went on for {longest:g} s after it was cancelled, and is left behind")
    if task.cancelled():
        return asyncio.CancelledError()
    error = task.exception()
    return error if error is not None else task.result()
