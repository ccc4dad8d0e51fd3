"""The deadlines over a group: which comes first, from when it counts, and what it ends."""

from __future__ import annotations

import asyncio
import time

import pytest

from miles_verifiers.rollout.clock import BATCH, GROUP, GroupClock


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
