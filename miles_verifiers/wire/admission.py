"""How many requests run at once, how many wait for their turn, and what the others are told. Pure asyncio, no HTTP."""

from __future__ import annotations

import asyncio

from miles_verifiers.errors import EngineBusy, QueueFull

_SHORTEST_WAIT, _LONGEST_WAIT = 1, 60
"""Seconds that Retry-After names at least and at most."""


class Admission:
    """Lets `max_running` requests in; `max_waiting` more wait, first come first served, for `max_wait` seconds at most.

        await admission.enter()
        try: ...
        finally: admission.leave(seconds)

    Use it on one event loop.
    """

    def __init__(self, max_running: int, max_waiting: int, max_wait: float) -> None:
        self.max_running, self.max_waiting, self.max_wait = max_running, max_waiting, max_wait
        self.running = 0
        self.waiting = 0
        self.draining = False
        self._slots = asyncio.Semaphore(max_running)
        self._mean_seconds = 0.0

    async def enter(self) -> None:
        """Wait for a turn. Raises QueueFull (429) at once, EngineBusy (503) when draining or after `max_wait`."""
        self.check()
        if self._slots.locked():
            await self._wait()
        else:
            await self._slots.acquire()  # never waits here
        self.running += 1

    def leave(self, seconds: float) -> None:
        """End of a request that took `seconds`."""
        self.running -= 1
        self._mean_seconds += (seconds - self._mean_seconds) / 16.0
        self._slots.release()

    def check(self) -> None:
        """Raise what `enter` would raise at once: for refusing a request before its body is read."""
        if self.draining:
            raise EngineBusy("the gateway is shutting down", next_step="ask another one")
        if self.waiting >= self.max_waiting and self._slots.locked():
            raise QueueFull(
                f"{self.running} requests are running and {self.waiting} are waiting",
                next_step="ask again after the seconds that Retry-After names",
            )

    def retry_after(self) -> int:
        """Whole seconds after which a turn is likely: the queue's length times the recent mean, over the width."""
        expected = (self.waiting + 1) * self._mean_seconds / self.max_running
        return max(_SHORTEST_WAIT, min(round(expected), _LONGEST_WAIT))

    async def _wait(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(self.max_wait):
                await self._slots.acquire()
        except TimeoutError:
            raise EngineBusy(
                f"no turn came within {self.max_wait:g} s", next_step="send fewer requests at once, or add an engine"
            ) from None
        finally:
            self.waiting -= 1
