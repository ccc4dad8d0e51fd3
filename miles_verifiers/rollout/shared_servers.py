"""What all rollouts of an environment share (interception servers, tool servers, a gateway): started once, ended in time."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from miles_verifiers.errors import RolloutError

log = logging.getLogger(__name__)

END_S = 30.0
"""Until servers that do not end are given up."""


class SharedServers:
    """`enter` makes the context in which rollouts run. `open` and `close` it on one event loop.

    It is entered and left in one task of its own: shared tool servers hold cancel scopes, which must be left where they were
    entered (anyio, under verifiers/v1 0.2.0 to 0.4.0).
    """

    def __init__(
        self, enter: Callable[[], AbstractAsyncContextManager[Any]], *, start: float, end: float = END_S
    ) -> None:
        self._enter, self._start_s, self._end_s = enter, start, end
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Raises what the start raises, and RolloutError after `start` seconds."""
        up = asyncio.Event()
        self._task = asyncio.create_task(self._serve(up))
        started = asyncio.create_task(up.wait())
        await asyncio.wait({self._task, started}, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if self._task.done():
            await self._task
        elif not up.is_set():
            self._task.cancel()
            await self.close()
            raise RolloutError(
                f"what the environment's rollouts share did not start within {self._start_s:g} s",
                next_step="raise rollout.setup_timeout, or see what its tool servers wait for",
            )

    async def close(self) -> None:
        """May be called twice, and without `open`."""
        task, self._task = self._task, None
        if task is None:
            return
        self._over.set()
        done, _ = await asyncio.wait({task}, timeout=self._end_s)
        if not done:
            log.warning("the environment's servers did not end within %g s and are given up", self._end_s)
            task.cancel()
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def _serve(self, up: asyncio.Event) -> None:
        async with self._enter():
            up.set()
            await self._over.wait()
