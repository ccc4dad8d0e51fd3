"""Slots bound rollouts, let them begin one after the other, and lose none."""

from __future__ import annotations

import asyncio

import pytest

from miles_verifiers.rollout.slots import Slots


async def turns_of(slots: asyncio.Semaphore, count: int) -> list[int]:
    """The turn of the event loop in which each of `count` rollouts began."""
    turn = 0
    begun: list[int] = []

    async def counting() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def rollout() -> None:
        async with slots:
            begun.append(turn)
            await asyncio.sleep(0)

    counter = asyncio.create_task(counting())
    await asyncio.gather(*(rollout() for _ in range(count)))
    counter.cancel()
    return begun


async def test_one_begins_per_turn() -> None:
    begun = await turns_of(Slots(50), 50)
    assert len(set(begun)) == len(begun) == 50
    # The control: with a plain semaphore they begin in the same turn.
    assert len(set(await turns_of(asyncio.Semaphore(50), 50))) < 3


async def test_no_more_are_in_flight_than_may_be() -> None:
    slots, inside, most = Slots(3), 0, 0

    async def rollout() -> None:
        nonlocal inside, most
        async with slots:
            inside += 1
            most = max(most, inside)
            for _ in range(20):
                await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(rollout() for _ in range(12)))
    assert most == 3


@pytest.mark.parametrize("turns", [0, 1, 2, 5])
async def test_who_is_cancelled_while_waiting_keeps_no_slot(turns: int) -> None:
    slots = Slots(2)
    waiting = [asyncio.create_task(slots.acquire()) for _ in range(5)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for outcome in outcomes:
        if outcome is True:
            slots.release()
    await asyncio.wait_for(slots.acquire(), 1)
    await asyncio.wait_for(slots.acquire(), 1)
    assert slots.locked()
