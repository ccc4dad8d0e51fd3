"""What transport and gateway share: sessions, their bounds, and the two ways in which a request can be cancelled."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import VOCAB, FakeEngine, good_reply, until

from miles_verifiers.errors import DeadlineExceeded, GenerationAborted, PromptTooLong, RequestRefused
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.core import Wire
from miles_verifiers.wire.translate import Limits

LIMITS = Limits(vocab_size=VOCAB, max_context=100, max_response=20, max_first_prompt=3)
BODY = {"token_ids": [11, 12, 13]}


@pytest.fixture
async def wire(engine: FakeEngine) -> AsyncIterator[Wire]:
    made = Wire(engine.url, limits=LIMITS, max_sessions=3)
    yield made
    await made.close()


async def stall(request: Any, body: Any) -> None:
    await asyncio.sleep(60)


async def test_the_first_prompt_of_each_session_has_its_limit(engine: FakeEngine, wire: Wire) -> None:
    engine.handler = lambda request, body: good_reply([5, 2], prompt_tokens=len(body["input_ids"]))
    longer = {"token_ids": [11, 12, 13, 5, 2, 14]}
    with pytest.raises(PromptTooLong, match="first prompt"):
        await wire.generate(longer, "s")  # not answered: it is still the first
    with pytest.raises(PromptTooLong, match="first prompt"):
        await wire.generate(longer, "s")
    await wire.generate(BODY, "s")
    await wire.generate(longer, "s")
    with pytest.raises(PromptTooLong, match="first prompt"):
        await wire.generate(longer, "another")
    with pytest.raises(PromptTooLong, match="first prompt"):
        await wire.generate(longer)


async def test_of_too_many_sessions_the_oldest_at_rest_is_forgotten(engine: FakeEngine, wire: Wire) -> None:
    gate = asyncio.Event()

    async def wait(request: Any, body: Any) -> dict[str, Any]:
        if request.headers["X-SMG-Routing-Key"] == "runs":
            await gate.wait()
        return good_reply([5, 2])

    engine.handler = wait
    running = asyncio.create_task(wire.generate(BODY, "runs"))
    await until(lambda: bool(engine.bodies))
    for i in range(4):
        await wire.generate(BODY, f"s{i}")
    assert wire.counters.sessions_forgotten == 2
    gate.set()
    await running
    kept = {name: len(wire.take(name)) for name in ("runs", "s0", "s1", "s2", "s3")}
    assert kept == {"runs": 1, "s0": 0, "s1": 0, "s2": 1, "s3": 1}


async def test_turns_are_kept_only_for_who_takes_them(engine: FakeEngine) -> None:
    for limits, remembered in ((LIMITS, 1), (Limits(VOCAB, 100, 20), 0)):
        wire = Wire(engine.url, limits=limits, keep_turns=False)
        await wire.generate(BODY, "s")
        with pytest.raises(RequestRefused):
            await wire.generate({"token_ids": [VOCAB]}, "s")
        assert len(wire._sessions) == remembered
        assert wire.take("s") == []
        await wire.close()


async def test_cancelled_by_session_and_by_the_caller_at_once(engine: FakeEngine, wire: Wire) -> None:
    """The caller's cancellation wins: a task that was cancelled must end as such."""
    engine.handler = stall
    for by_caller in (False, True):
        before = len(engine.bodies)
        task = asyncio.create_task(wire.generate(BODY, "s"))
        await until(lambda: len(engine.bodies) > before)  # noqa: B023 - it is asked in this round of the loop
        assert wire.cancel("s") == 1
        assert wire.cancel("s") == 0  # it is given up already
        if by_caller:
            task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() == by_caller
        if not by_caller:
            assert isinstance(task.exception(), GenerationAborted)
    await until(lambda: len(engine.aborted) == len(engine.bodies) == 2)


async def test_a_task_goes_on_after_its_session_was_cancelled(engine: FakeEngine, wire: Wire) -> None:
    engine.handler = stall

    async def twice() -> bytes:
        try:
            return await wire.generate(BODY, "s")
        except GenerationAborted:
            engine.handler = lambda request, body: good_reply([5, 2])
            await asyncio.sleep(0.01)
            return await wire.generate(BODY, "s")

    task = asyncio.create_task(twice())
    await until(lambda: wire.counters.in_flight == 1)
    wire.cancel("s")
    assert json.loads(await task)["choices"][0]["token_ids"] == [5, 2]


async def test_closing_gives_up_requests_without_a_session_too(engine: FakeEngine) -> None:
    wire = Wire(engine.url, limits=LIMITS)
    engine.handler = stall
    task = asyncio.create_task(wire.generate(BODY))
    await until(lambda: bool(engine.bodies))
    await wire.close()
    with pytest.raises(GenerationAborted):
        await task
    assert engine.aborted == [engine.bodies[0]["rid"]]


async def test_a_first_byte_that_is_late(engine: FakeEngine) -> None:
    wire = Wire(engine.url, limits=LIMITS, deadlines=Deadlines(first_byte=0.1, total=5))
    engine.handler = stall
    with pytest.raises(DeadlineExceeded, match=r"no answer began within 0\.1 s"):
        await wire.generate(BODY)
    await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
    assert len(engine.bodies) == 1
    await wire.close()


async def test_many_at_once_are_each_answered_with_their_own(engine: FakeEngine) -> None:
    engine.handler = lambda request, body: good_reply(body["input_ids"], prompt_tokens=1)
    wire = Wire(engine.url, limits=LIMITS, max_connections=8)
    answers = await asyncio.gather(*(wire.generate({"token_ids": [i]}, f"s{i}") for i in range(200)))
    assert [json.loads(answer)["choices"][0]["token_ids"] for answer in answers] == [[i] for i in range(200)]
    assert [turn.token_ids for i in range(200) for turn in wire.take(f"s{i}")] == [[i] for i in range(200)]
    assert wire._sessions == {}
    # SGLang aborts by prefix.
    rids = sorted(body["rid"] for body in engine.bodies)
    assert not any(after.startswith(before) for before, after in itertools.pairwise(rids))
    await wire.close()
