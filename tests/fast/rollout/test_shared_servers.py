"""What rollouts share starts, ends, and hangs without holding anybody up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from miles_verifiers.errors import RolloutError
from miles_verifiers.rollout.shared_servers import SharedServers


def shared(
    seen: list[str], *, start: float = 0.0, end: float = 0.0, error: Exception | None = None
) -> Callable[[], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def enter() -> AsyncIterator[None]:
        if error is not None:
            raise error
        await asyncio.sleep(start)
        seen.append("up")
        yield
        await asyncio.sleep(end)
        seen.append("down")

    return enter


async def test_it_is_up_after_open_and_down_after_close() -> None:
    seen: list[str] = []
    serving = SharedServers(shared(seen, start=0.01, end=0.01), start=5)
    await serving.open()
    assert seen == ["up"]
    await serving.close()
    assert seen == ["up", "down"]
    await serving.close()


async def test_close_without_open_does_nothing() -> None:
    await SharedServers(shared([]), start=5).close()


async def test_what_the_start_raises_comes_out() -> None:
    with pytest.raises(ValueError, match="no port"):
        await SharedServers(shared([], error=ValueError("no port")), start=5).open()


async def test_a_start_that_hangs_is_given_up() -> None:
    seen: list[str] = []
    async with asyncio.timeout(5):
        with pytest.raises(RolloutError, match=r"did not start within 0\.05 s"):
            await SharedServers(shared(seen, start=60), start=0.05, end=0.05).open()
    assert seen == []


async def test_an_end_that_hangs_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    serving = SharedServers(shared(seen, end=60), start=5, end=0.05)
    await serving.open()
    async with asyncio.timeout(5):
        await serving.close()
    assert seen == ["up"]
    assert "given up" in caplog.text
