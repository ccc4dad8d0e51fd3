"""How long the event loop stands still: somebody blocks it, an environment's synchronous code mostly, and slows all down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

log = logging.getLogger(__name__)

_INTERVAL_S = 0.5
_WARNING_S = 1.0


class LagWatch:
    """`worst` is the longest standstill seen, seconds; set it to 0.0 to begin anew."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(_INTERVAL_S)
            lag = time.monotonic() - before - _INTERVAL_S
            self.worst = max(self.worst, lag)
            if lag > _WARNING_S:
                log.warning("the event loop stood still for %.1f s", lag)
