"""A judge that does not answer in time, and what became of those who asked it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(slots=True)
class SilentJudge:
    """What a reward function awaits. The same for environment and test, which run in one process."""

    seconds: float = 60.0
    """Until it answers."""
    asked: int = 0
    answered: int = 0
    cancelled: int = 0
    closed: int = 0
    """Of those who asked, how many came to the end of their `finally`."""

    def reset(self, seconds: float = 60.0) -> None:
        self.seconds = seconds
        self.asked = self.answered = self.cancelled = self.closed = 0

    async def ask(self) -> None:
        self.asked += 1
        try:
            await asyncio.sleep(self.seconds)
            self.answered += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            await asyncio.sleep(0.02)  # as a connection takes a moment to close
            self.closed += 1


JUDGE = SilentJudge()
