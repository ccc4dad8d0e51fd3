"""Client and transport against an engine that fails in every way: what is repeated, what is not, and who is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import VOCAB, FakeEngine, cut, good_reply, slow_drip, stall, until

from miles_verifiers.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineUnreachable,
    GenerationAborted,
    PromptTooLong,
    ReplyInvalid,
    RequestRefused,
    WireError,
)
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire.client import Deadlines, EngineClient
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import MilesSGLangTransport

LIMITS = Limits(vocab_size=VOCAB, max_context=100, max_response=20)
BODY = {"model": "policy", "token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 4, "stop_token_ids": [2]}}


@pytest.fixture
async def transport(engine: FakeEngine) -> AsyncIterator[MilesSGLangTransport]:
    made = MilesSGLangTransport(engine.url, limits=LIMITS, deadlines=Deadlines(connect=2, total=3, abort=1))
    yield made
    await made.close()


async def post(transport: MilesSGLangTransport, session: str | None = "s1", body: object = None) -> dict[str, Any]:
    options = {"headers": {"X-Session-ID": session}} if session else None
    response = await transport.post(
        f"{transport.base_url.removesuffix('/v1')}/inference/v1/generate", body=body or BODY, options=options
    )
    answer: dict[str, Any] = json.loads(response.content)
    return answer


def only_ids(reply: Any, where: str) -> Any:
    return reply["output_ids"]


class Script:
    """Answers one after the other; the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self, request: web.Request, body: dict[str, Any]) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(request) if callable(answer) else answer


async def test_a_turn(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    answer = await post(transport)
    assert answer["choices"][0]["token_ids"] == [5, 6, 2]
    (sent,) = engine.bodies
    assert sent.pop("rid")
    assert sent == {
        "input_ids": [11, 12, 13],
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 4,
            "stop_token_ids": [2],
            "n": 1,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
    }
    assert engine.headers[0]["X-SMG-Routing-Key"] == "s1"
    assert (transport.counters.requests, transport.counters.tokens, transport.counters.failed) == (1, 3, 0)


async def test_the_models_list_carries_the_context_length(transport: MilesSGLangTransport) -> None:
    assert (await transport.get("/models", cast_to=dict))["data"] == [{"id": "policy", "max_model_len": 100}]
    with pytest.raises(RequestRefused):
        await transport.get("/files")


async def test_sessions_keep_their_turns_apart(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    await post(transport, "s1")
    spans = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]
    engine.handler = lambda request, body: good_reply([8, 2], weight_versions=spans)
    await post(transport, "s1")
    await post(transport, "s2")
    first, second = transport.take("s1")
    assert (first.token_ids, first.weight_versions, first.prompt_tokens) == ([5, 6, 2], [WeightSpan("7", 3)], 3)
    assert (second.token_ids, second.weight_versions) == ([8, 2], [WeightSpan("7", 1), WeightSpan("8", 1)])
    assert first.seconds > 0
    assert transport.take("s1") == []
    assert len(transport.take("s2")) == 1


async def test_a_session_stays_with_its_engine() -> None:
    async with FakeEngine() as one, FakeEngine() as two:
        transport = MilesSGLangTransport([one.url, two.url], limits=LIMITS)
        for i in range(16):
            await post(transport, f"s{i}")
            await post(transport, f"s{i}")
        await transport.close()
        homes = [{headers["X-SMG-Routing-Key"] for headers in engine.headers} for engine in (one, two)]
    assert homes[0]
    assert homes[1]
    assert not homes[0] & homes[1]


async def test_an_engine_that_is_gone_is_stood_in_for() -> None:
    async with FakeEngine() as gone:
        pass
    async with FakeEngine() as alive:
        transport = MilesSGLangTransport([gone.url, alive.url], limits=LIMITS)
        for i in range(8):
            await post(transport, f"s{i}")
        assert len(alive.bodies) == 8
        assert 0 < transport.client.traffic.repeats < 8  # some sessions are at home there
        await transport.close()


@pytest.mark.parametrize("times", [1, 2])
async def test_a_reset_before_any_answer_is_repeated(
    engine: FakeEngine, transport: MilesSGLangTransport, times: int
) -> None:
    engine.handler = Script(*[cut] * times, good_reply([5, 2]))
    assert (await post(transport))["choices"][0]["token_ids"] == [5, 2]
    rids = [body["rid"] for body in engine.bodies]
    assert len(rids) == len(set(rids)) == times + 1


async def test_resets_without_end_are_given_up(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    engine.handler = Script(cut)
    with pytest.raises(EngineUnreachable, match="did not answer") as caught:
        await post(transport)
    assert len(engine.bodies) == 4
    assert engine.url in caught.value.where
    assert "attempt 4 of 4" in caught.value.where


async def test_nobody_listens() -> None:
    async with FakeEngine() as engine:
        gone = engine.url
    transport = MilesSGLangTransport(gone, limits=LIMITS)
    with pytest.raises(EngineUnreachable):
        await post(transport)
    await transport.close()


async def test_busy_is_repeated_then_reported(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    def busy(request: web.Request) -> web.Response:
        return web.Response(status=503, headers={"Retry-After": "0"}, text="later")

    engine.handler = Script(busy, good_reply([5, 2]))
    await post(transport)
    engine.handler = Script(busy)
    with pytest.raises(EngineBusy, match="later") as caught:
        await post(transport)
    assert caught.value.status == 503


# As FastAPI has it.
UNPROCESSABLE = {"detail": [{"type": "float_type", "loc": ["body", "sampling_params", "top_p"], "msg": "not a float"}]}

FAULTS: dict[str, tuple[Any, type[WireError], str]] = {
    "half a body": (lambda r: cut(r, b'{"text": "abc"'), ReplyInvalid, "broke off"),
    "not JSON": (lambda r: web.Response(text="<html>"), ReplyInvalid, "not JSON"),
    "NaN": (lambda r: web.Response(text=json.dumps(good_reply([5], [float("nan")]))), ReplyInvalid, "not JSON"),
    "a list": (lambda r: web.json_response([good_reply([5])]), ReplyInvalid, "no meta_info"),
    "500": (lambda r: web.json_response({"detail": "scheduler"}, status=500), ReplyInvalid, "500: scheduler"),
    "500, as text": (
        lambda r: web.json_response("x" * 99 + " scheduler", status=500),
        ReplyInvalid,
        "500: x+ scheduler",
    ),
    "422": (lambda r: web.json_response(UNPROCESSABLE, status=422), RequestRefused, "sampling_params.*not a float"),
    "abort": (good_reply([5], finish_reason={"type": "abort"}), GenerationAborted, "aborted"),
    "short metadata": (good_reply([5, 6], output_token_logprobs=...), ReplyInvalid, "output_token_logprobs"),
    "wrong counts": (good_reply([5, 6], completion_tokens=3), ReplyInvalid, "completion_tokens"),
    "None": (good_reply([5], [None]), ReplyInvalid, "log-prob None"),  # type: ignore[list-item]
    "-9999": (good_reply([5], [-9999.0]), ReplyInvalid, "-9999"),
    "id": (good_reply([VOCAB]), ReplyInvalid, "vocabulary"),
    "no version": (good_reply([5], weight_version=...), ReplyInvalid, "weight_version"),
    "400": (lambda r: web.json_response({"error": {"message": "top_p"}}, status=400), RequestRefused, "top_p"),
    "too long": (
        lambda r: web.json_response({"error": {"message": "longer than the model's context length"}}, status=400),
        PromptTooLong,
        "context length",
    ),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
async def test_faults_are_named_and_never_repeated(
    engine: FakeEngine, transport: MilesSGLangTransport, fault: str
) -> None:
    answer, kind, said = FAULTS[fault]
    engine.handler = Script(answer)
    with pytest.raises(kind, match=said) as caught:
        await post(transport)
    assert type(caught.value) is kind
    assert caught.value.where
    if kind is not PromptTooLong:
        assert engine.url in str(caught.value)
    assert len(engine.bodies) == 1
    assert transport.take("s1") == []
    assert (transport.counters.failed, transport.counters.in_flight, transport.counters.tokens) == (1, 0, 0)


@pytest.mark.parametrize("answer", [stall, slow_drip])
async def test_a_deadline_ends_the_request_and_tells_the_engine(engine: FakeEngine, answer: Any) -> None:
    transport = MilesSGLangTransport(engine.url, limits=LIMITS, deadlines=Deadlines(total=0.2, abort=1))
    engine.handler = Script(answer)
    with pytest.raises(DeadlineExceeded, match=r"0\.2 s") as caught:
        await post(transport)
    assert caught.value.status == 504
    await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
    await transport.close()


async def test_a_cancelled_caller_aborts_in_the_engine(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    engine.handler = Script(stall)
    caller = asyncio.create_task(post(transport))
    await until(lambda: bool(engine.bodies))
    assert (transport.counters.in_flight, transport.counters.prompt_tokens_in_flight) == (1, 3)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
    assert (transport.counters.in_flight, transport.counters.prompt_tokens_in_flight) == (0, 0)


async def test_a_session_can_be_cancelled_by_name(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    engine.handler = Script(stall)
    mine, other = (asyncio.create_task(post(transport, name)) for name in ("mine", "other"))
    await until(lambda: len(engine.bodies) == 2)
    assert transport.cancel("mine") == 1
    with pytest.raises(GenerationAborted, match="rollout ended"):
        await mine
    rid = next(b["rid"] for b, h in zip(engine.bodies, engine.headers, strict=True) if h["X-SMG-Routing-Key"] == "mine")
    await until(lambda: engine.aborted == [rid])
    assert not other.done()
    assert transport.cancel("nobody") == 0
    other.cancel()
    await asyncio.wait([other])


async def test_closing_ends_and_aborts_what_runs(engine: FakeEngine) -> None:
    transport = MilesSGLangTransport(engine.url, limits=LIMITS)
    engine.handler = Script(stall)
    caller = asyncio.create_task(post(transport))
    await until(lambda: bool(engine.bodies))
    await transport.close()
    with pytest.raises(GenerationAborted):
        await caller
    assert engine.aborted == [engine.bodies[0]["rid"]]
    with pytest.raises(EngineUnreachable, match="closed"):
        await post(transport)


async def test_refusals_never_reach_the_engine(engine: FakeEngine, transport: MilesSGLangTransport) -> None:
    with pytest.raises(RequestRefused, match="token_ids"):
        await post(transport, body={"token_ids": [VOCAB]})
    with pytest.raises(RequestRefused, match="not known"):
        await transport.post(f"{transport.base_url}/chat/completions", body=BODY)
    assert engine.bodies == []


async def test_errors_take_the_form_that_the_caller_wants(engine: FakeEngine) -> None:
    class Theirs(Exception):
        pass

    transport = MilesSGLangTransport(engine.url, limits=LIMITS, on_error=lambda e: Theirs(f"{e.status} {e.what}"))
    engine.handler = Script(good_reply([5], finish_reason={"type": "abort"}))
    with pytest.raises(Theirs, match="502 the engine aborted"):
        await post(transport)
    await transport.close()


async def test_an_engine_that_restarts_in_mid_flight_is_found_again() -> None:
    async with FakeEngine(Script(cut)) as first:
        port = first.url.rsplit(":", 1)[1]
        client = EngineClient([first.url], deadlines=Deadlines(total=5), attempts=30)
        waiting = asyncio.create_task(client.generate({"input_ids": [1]}, only_ids, session="s"))
        await until(lambda: len(first.bodies) >= 1)
    second = web.Application()

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(good_reply([5, 2]))

    second.router.add_post("/generate", generate)
    runner = web.AppRunner(second, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port), reuse_address=True).start()
    assert await waiting == [5, 2]
    await client.close()
    await runner.cleanup()


async def test_nothing_waits_for_an_engine_that_cannot_be_told(engine: FakeEngine) -> None:
    client = EngineClient([engine.url], deadlines=Deadlines(abort=0.2))
    engine.handler = Script(stall)
    waiting = asyncio.create_task(client.generate({"input_ids": [1]}, only_ids))
    await until(lambda: bool(engine.bodies))
    await engine.__aexit__()
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(2):
        await client.close()


def test_the_stub_really_resets() -> None:
    """Control: without the client's care, a reset is an error."""

    async def ask() -> None:
        async with FakeEngine(Script(cut)) as engine, aiohttp.ClientSession() as session:
            await session.post(f"{engine.url}/generate", json={"input_ids": [1]})

    with pytest.raises(aiohttp.ServerDisconnectedError):
        asyncio.run(ask())
