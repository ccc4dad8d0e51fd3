"""Slots: how many rollouts may be in flight, and how many may begin at once."""

from __future__ import annotations

import asyncio
from typing import Literal


class Slots(asyncio.Semaphore):
    """A semaphore whose holders begin one per turn of the event loop.

    Five hundred rollouts that begin in one turn, with milliseconds of setup each, are seconds in which no reply is read and no
    deadline kept; and they then stay abreast, from one stampede to the next.
    """

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self._gate = asyncio.Lock()

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        try:
            async with self._gate:
                await asyncio.sleep(0)
        except BaseException:
            self.release()
            raise
        return True
