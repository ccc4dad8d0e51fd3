"""The deadlines over a group: which comes first, from when it counts, and what it ends."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from miles_verifiers.errors import RolloutError
from miles_verifiers.rollout import clock as clock_module
from miles_verifiers.rollout.clock import BATCH, GROUP, GroupClock, end


def clock(batch: float, group: float) -> GroupClock:
    return GroupClock(asyncio.get_running_loop().time() + batch, group)


async def forever() -> None:
    await asyncio.sleep(60)


async def test_the_groups_time_begins_with_its_first_rollout() -> None:
    waiting = clock(batch=30, group=0.05)
    task = asyncio.create_task(forever())
    waiter = asyncio.create_task(waiting.wait([task]))
    await asyncio.sleep(0.1)
    assert not waiter.done()  # nothing has begun: the group waits for a slot
    waiting.start()
    began = time.monotonic()
    await waiter
    assert 0.02 < time.monotonic() - began < 5
    assert (waiting.is_over(), waiting.whose()) == (True, GROUP)
    assert not task.done()
    task.cancel()


async def test_a_second_start_changes_nothing() -> None:
    started = clock(batch=30, group=10)
    started.start()
    end = started.end
    await asyncio.sleep(0.02)
    started.start()
    assert started.end == end


async def test_the_batch_may_end_first() -> None:
    batch = clock(batch=0.05, group=30)
    batch.start()
    task = asyncio.create_task(forever())
    await batch.wait([task])
    assert (batch.is_over(), batch.whose(), batch.left()) == (True, BATCH, 0.0)
    task.cancel()


async def test_it_waits_no_longer_than_the_work_takes() -> None:
    quick = clock(batch=30, group=30)
    began = time.monotonic()
    await quick.wait([asyncio.create_task(asyncio.sleep(0.01))])
    assert time.monotonic() - began < 5
    assert not quick.is_over()


async def test_a_block_is_cancelled_when_the_group_starts_within_it() -> None:
    async def starts_and_hangs(limited: GroupClock) -> None:
        async with limited.limit():
            limited.start()
            await forever()

    with pytest.raises(TimeoutError):
        await starts_and_hangs(clock(batch=30, group=0.02))
    async with clock(batch=30, group=30).limit():  # control
        await asyncio.sleep(0)


async def deaf(times: int) -> str:
    """Hears only the cancellation after so many."""
    for _ in range(times):
        with contextlib.suppress(asyncio.CancelledError):
            await forever()
    await forever()
    return "never"


async def test_what_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "AGAIN_S", 0.02)
    told: list[None] = []
    running = [asyncio.create_task(deaf(times)) for times in (0, 2)]
    await asyncio.sleep(0)
    outcomes = await asyncio.wait_for(end(running, lambda: told.append(None)), 5)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
    assert all(task.cancelled() for task in running)
    assert len(told) == 2, "not with the first cancellation, which may be heard"


async def test_what_never_ends_is_left_behind_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock_module, "AGAIN_S", 0.02)
    running = [asyncio.create_task(deaf(1000)), asyncio.create_task(forever())]
    await asyncio.sleep(0)
    left, ended = await asyncio.wait_for(end(running, longest=0.1), 5)
    assert isinstance(left, RolloutError)
    assert "after it was cancelled" in left.what
    assert isinstance(ended, asyncio.CancelledError)
    assert not running[0].done()
    monkeypatch.undo()
    while not running[0].done():
        running[0].cancel()
        await asyncio.sleep(0)


async def test_what_is_over_already_keeps_its_outcome() -> None:
    async def fails() -> None:
        raise ZeroDivisionError

    async def works() -> int:
        return 7

    running = [asyncio.create_task(fails()), asyncio.create_task(works())]
    await asyncio.wait(running)
    failed, worked = await end(running)
    assert isinstance(failed, ZeroDivisionError)
    assert worked == 7
