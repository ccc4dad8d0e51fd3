"""The deadlines over one group: its own, which starts with its first rollout, and that of the batch that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from typing import Any

GROUP = "the group's deadline"
BATCH = "the step's deadline"


class GroupClock:
    """`deadline` is that of the batch, on the running loop's clock; `timeout` the seconds that the group itself has."""

    def __init__(self, deadline: float, timeout: float) -> None:
        self._batch, self._timeout = deadline, timeout
        self._own = math.inf
        self._limit: asyncio.Timeout | None = None

    def start(self) -> None:
        """The first rollout of the group has begun. Waiting for a free slot is not the group's time."""
        if math.isinf(self._own):
            self._own = asyncio.get_running_loop().time() + self._timeout
            if self._limit is not None and not self._limit.expired():
                self._limit.reschedule(self._end())

    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._end() - asyncio.get_running_loop().time())

    def is_over(self) -> bool:
        return self.left() <= 0.0

    def whose(self) -> str:
        """The deadline that comes first, in words."""
        return GROUP if self._own < self._batch else BATCH

    async def wait(self, running: Sequence[asyncio.Task[Any]]) -> None:
        """Returns when all are done or a deadline has passed; ends none of them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._end()) as self._limit:
                await asyncio.wait(running)
        self._limit = None

    def _end(self) -> float:
        return min(self._own, self._batch)
