"""The gateway over HTTP in trouble: what engines do, back-pressure, and callers that go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import FakeEngine, cut, good_reply, slow_drip, stall, until
from gateway_caller import DEEP, PATH, ask, get, serving

ENGINE_FAULTS: dict[str, tuple[Callable[[web.Request], Any], int, str]] = {
    "abort": (lambda r: good_reply([5], finish_reason={"type": "abort"}), 502, "generation_aborted"),
    "short metadata": (lambda r: good_reply([5, 6], output_token_logprobs=...), 502, "reply_invalid"),
    "NaN": (lambda r: web.Response(text=json.dumps(good_reply([5], [float("nan")]))), 502, "reply_invalid"),
    "500": (lambda r: web.json_response({"detail": "scheduler"}, status=500), 502, "reply_invalid"),
    "busy": (lambda r: web.Response(status=503), 503, "engine_busy"),
    "half a body": (lambda r: cut(r, b'{"text": "abc"'), 502, "reply_invalid"),
    "reset": (cut, 502, "engine_unreachable"),
    "stall": (stall, 504, "deadline_exceeded"),
    "slow drip": (slow_drip, 504, "deadline_exceeded"),
    "400": (lambda r: web.json_response({"error": {"message": "top_p"}}, status=400), 400, "request_refused"),
}


class TestTrouble:
    @pytest.mark.parametrize("fault", sorted(ENGINE_FAULTS))
    async def test_what_the_engine_did_is_said(
        self, engine: FakeEngine, http: aiohttp.ClientSession, fault: str
    ) -> None:
        answer, status, code = ENGINE_FAULTS[fault]
        engine.handler = lambda request, body: answer(request)
        async with serving(engine, total=0.3 if status == 504 else 3.0) as gateway:
            said = await ask(http, gateway)
            assert (said.status, said.error["code"]) == (status, code)
            assert engine.url in said.error["message"]
            assert said.headers["x-should-retry"] == "false"
            assert ("Retry-After" in said.headers) == (status == 503)
            assert gateway.take("s1") == []

    @pytest.mark.parametrize(
        "name", [*good_reply([5])["meta_info"], "weight_versions", "output_ids", "prompt_token_ids"]
    )
    async def test_a_reply_that_is_a_thousand_deep(
        self, engine: FakeEngine, http: aiohttp.ClientSession, name: str
    ) -> None:
        meta = name not in ("output_ids", "prompt_token_ids")
        reply = good_reply([5], **({name: "DEEP"} if meta else {})) | ({} if meta else {name: "DEEP"})
        text = json.dumps(reply).replace('"DEEP"', DEEP)
        engine.handler = lambda request, body: web.Response(text=text, content_type="application/json")
        async with serving(engine) as gateway:
            answer = await ask(http, gateway)
        assert answer.status == (200 if name in ("id", "cached_tokens") else 502), answer.raw

    async def test_an_error_that_is_a_thousand_deep(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        text = f'{{"error": {{"message": {DEEP}}}}}'
        engine.handler = lambda request, body: web.Response(text=text, status=500)
        async with serving(engine) as gateway:
            assert (await ask(http, gateway)).error["code"] == "reply_invalid"

    async def test_no_engine(self, http: aiohttp.ClientSession) -> None:
        async with FakeEngine() as engine:
            pass
        async with serving(engine) as gateway:
            answer = await ask(http, gateway)
        assert (answer.status, answer.error["code"]) == (502, "engine_unreachable")

    async def test_a_deadline(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        engine.handler = lambda request, body: stall(request)
        async with serving(engine, total=0.2) as gateway:
            answer = await ask(http, gateway)
            assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
            await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])

    async def test_a_fault_of_ours_is_not_shown(
        self, engine: FakeEngine, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with serving(engine) as gateway:
            monkeypatch.setattr(gateway.wire, "generate", lambda body, session: 1 / 0)
            answer = await ask(http, gateway)
            assert (answer.status, answer.error["code"]) == (500, "internal_server_error")
            assert "division" not in answer.error["message"]
            metrics = (await get(http, gateway, "/metrics")).raw.decode()
        assert f'responses_total{{path="{PATH}",status="500"}} 1\n' in metrics

    async def test_a_caller_that_goes_away_takes_its_request_along(
        self, engine: FakeEngine, http: aiohttp.ClientSession
    ) -> None:
        engine.handler = lambda request, body: stall(request)
        async with serving(engine) as gateway:
            caller = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            caller.cancel()
            await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
            assert gateway.counters.in_flight == 0
            text = (await get(http, gateway, "/metrics")).raw.decode()
        assert "clients_gone_total 1\n" in text
        assert "requests_running 0\n" in text

    async def test_a_session_can_be_cancelled_by_name(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        engine.handler = lambda request, body: stall(request)
        async with serving(engine) as gateway:
            caller = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            assert gateway.cancel("s1") == 1
            answer = await caller
            assert (answer.status, answer.error["code"]) == (502, "generation_aborted")
            await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])


class Gate:
    """An engine's handler that answers when it is opened."""

    def __init__(self) -> None:
        self.open = asyncio.Event()

    async def __call__(self, request: web.Request, body: dict[str, Any]) -> Any:
        await self.open.wait()
        return good_reply([5, 6, 2])


class TestBackPressure:
    async def test_a_full_queue_is_429_and_the_others_are_served_in_turn(
        self, engine: FakeEngine, http: aiohttp.ClientSession
    ) -> None:
        gate = Gate()
        engine.handler = gate
        async with serving(engine, max_running=2, max_waiting=3) as gateway:
            asked = [asyncio.create_task(ask(http, gateway, session=f"s{i}")) for i in range(2)]
            await until(lambda: len(engine.bodies) == 2)
            asked += [asyncio.create_task(ask(http, gateway, session=f"s{i}")) for i in range(2, 5)]
            await until(lambda: gateway._admission.waiting == 3)
            refused = await ask(http, gateway)
            assert (refused.status, refused.error["code"], refused.error["type"]) == (
                429,
                "queue_full",
                "rate_limit_error",
            )
            assert int(refused.headers["Retry-After"]) >= 1
            assert refused.headers["x-should-retry"] == "true"
            assert len(engine.bodies) == 2
            gate.open.set()
            assert [answer.status for answer in await asyncio.gather(*asked)] == [200] * 5
            assert (await ask(http, gateway)).status == 200

    async def test_who_waits_too_long_is_503(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        gate = Gate()
        engine.handler = gate
        async with serving(engine, max_running=1, max_wait=0.1) as gateway:
            first = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            answer = await ask(http, gateway, session="s2")
            assert (answer.status, answer.error["code"]) == (503, "engine_busy")
            assert int(answer.headers["Retry-After"]) >= 1
            gate.open.set()
            assert (await first).status == 200
            assert (await ask(http, gateway)).status == 200

    async def test_a_caller_that_goes_away_leaves_the_queue(
        self, engine: FakeEngine, http: aiohttp.ClientSession
    ) -> None:
        gate = Gate()
        engine.handler = gate
        async with serving(engine, max_running=1, max_waiting=1) as gateway:
            first = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            second = asyncio.create_task(ask(http, gateway, session="s2"))
            await until(lambda: gateway._admission.waiting == 1)
            second.cancel()
            await until(lambda: gateway._admission.waiting == 0)
            third = asyncio.create_task(ask(http, gateway, session="s3"))
            await until(lambda: gateway._admission.waiting == 1)
            gate.open.set()
            assert [(await first).status, (await third).status] == [200, 200]
        assert [headers["X-SMG-Routing-Key"] for headers in engine.headers] == ["s1", "s3"]

    async def test_draining_ends_what_runs_and_refuses_the_rest(
        self, engine: FakeEngine, http: aiohttp.ClientSession
    ) -> None:
        gate = Gate()
        engine.handler = gate
        async with serving(engine) as gateway:
            first = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            draining = asyncio.create_task(gateway.drain(5))
            await asyncio.sleep(0)
            late = await ask(http, gateway)
            assert (late.status, "Retry-After" in late.headers) == (503, True)
            health = await get(http, gateway, "/health")
            assert (health.status, health.body) == (503, {"status": "draining"})
            gate.open.set()
            assert (await first).status == 200
            assert await draining

    async def test_draining_has_an_end(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        engine.handler = lambda request, body: stall(request)
        async with serving(engine) as gateway:
            first = asyncio.create_task(ask(http, gateway))
            await until(lambda: bool(engine.bodies))
            assert not await gateway.drain(0.1)
        answer = await first
        assert (answer.status, answer.error["code"]) == (502, "generation_aborted")
        assert engine.aborted == [engine.bodies[0]["rid"]]
