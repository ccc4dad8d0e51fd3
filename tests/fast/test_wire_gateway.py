"""The gateway over HTTP: the whole answer, every refusal in the API's shape, back-pressure, and callers that go away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import VOCAB, FakeEngine, cut, good_reply, slow_drip, stall, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_verifiers.errors import HostError, InputError
from miles_verifiers.samples import WeightSpan
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits

LIMITS = Limits(vocab_size=VOCAB, max_context=100, max_response=20)
BODY = {"model": "policy", "token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 4, "stop_token_ids": [2]}}
PATH = "/inference/v1/generate"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine() as running:
        yield running


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@asynccontextmanager
async def serving(
    engine: FakeEngine, limits: Limits = LIMITS, total: float = 3.0, **how: Any
) -> AsyncIterator[Gateway]:
    deadlines = Deadlines(connect=2, total=total, abort=1)
    async with Gateway(engine.url, limits=limits, deadlines=deadlines, serving=Serving(**how)) as gateway:
        yield gateway


DEEP = "[" * 1000 + "]" * 1000


class Answer:
    def __init__(self, status: int, headers: Any, raw: bytes) -> None:
        self.status, self.headers, self.raw = status, headers, raw

    @property
    def body(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """The error, after a look at its shape."""
        assert self.headers["Content-Type"].startswith("application/json")
        error: dict[str, Any] = self.body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return error


async def ask(
    http: aiohttp.ClientSession, gateway: Gateway, body: object = BODY, session: str | None = "s1", **headers: str
) -> Answer:
    data = body if isinstance(body, bytes) else json.dumps(body)
    if session is not None:
        headers["X-Session-ID"] = session
    async with http.post(gateway.url + PATH, data=data, headers=headers) as response:
        return Answer(response.status, response.headers, await response.read())


async def get(http: aiohttp.ClientSession, gateway: Gateway, path: str, **headers: str) -> Answer:
    async with http.get(gateway.url + path, headers=headers) as response:
        return Answer(response.status, response.headers, await response.read())


class TestAnswers:
    async def test_a_turn(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        engine.handler = lambda request, body: good_reply([5, 6, 2], [-0.5, -0.75, 0.0])
        async with serving(engine) as gateway:
            answer = await ask(http, gateway)
            assert (answer.status, answer.body["choices"]) == (
                200,
                [
                    {
                        "token_ids": [5, 6, 2],
                        "logprobs": {
                            "content": [
                                {"token": "token_id:5", "logprob": -0.5},
                                {"token": "token_id:6", "logprob": -0.75},
                                {"token": "token_id:2", "logprob": 0.0},
                            ]
                        },
                        "finish_reason": "stop",
                    }
                ],
            )
            assert engine.bodies[0]["input_ids"] == [11, 12, 13]
            assert engine.headers[0]["X-SMG-Routing-Key"] == "s1"
            (turn,) = gateway.take("s1")
            assert (turn.token_ids, turn.weight_versions) == ([5, 6, 2], [WeightSpan("7", 3)])
            assert gateway.take("s1") == []
            assert (gateway.counters.requests, gateway.counters.tokens, gateway.counters.failed) == (1, 3, 0)

    async def test_models_and_health(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        async with serving(engine) as gateway:
            models = (await get(http, gateway, "/v1/models")).body
            assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("policy", 100)]
            assert (await get(http, gateway, "/health")).body == {"status": "ok"}
            assert gateway.base_url == f"{gateway.url}/v1"
            assert gateway.url.startswith("http://127.0.0.1:")

    async def test_sessions_go_to_their_engines(self, http: aiohttp.ClientSession) -> None:
        async with FakeEngine() as one, FakeEngine() as two:
            async with Gateway([one.url, two.url], limits=LIMITS) as gateway:
                for i in range(16):
                    await ask(http, gateway, session=f"s{i}")
                    await ask(http, gateway, session=f"s{i}")
            homes = [{headers["X-SMG-Routing-Key"] for headers in engine.headers} for engine in (one, two)]
        assert homes[0] | homes[1] == {f"s{i}" for i in range(16)}
        assert homes[0]
        assert homes[1]
        assert not homes[0] & homes[1]

    async def test_metrics_count_what_happened(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        async with serving(engine) as gateway:
            await ask(http, gateway)
            await ask(http, gateway, b"{")
            await get(http, gateway, "/nowhere")
            text = (await get(http, gateway, "/metrics")).raw.decode()
        values = dict(re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE))
        name = "miles_verifiers_gateway_"
        assert values[f'{name}responses_total{{path="{PATH}",status="200"}}'] == "1"
        assert values[f'{name}responses_total{{path="{PATH}",status="400"}}'] == "1"
        assert values[f'{name}responses_total{{path="other",status="404"}}'] == "1"
        assert values[f"{name}sampled_tokens_total"] == "3"
        assert values[f"{name}prompt_tokens_total"] == "3"
        assert values[f"{name}engine_requests_total"] == "1"
        assert values[f'{name}generate_seconds_bucket{{le="+Inf"}}'] == values[f"{name}generate_seconds_count"] == "1"
        assert all(re.match(r"# (HELP|TYPE) |\w+(\{.*\})? \S+$", line) for line in text.splitlines())


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "status", "code", "said"),
        [
            (b"", 400, "request_refused", "not JSON"),
            (b'{"token_ids": [1,', 400, "request_refused", "not JSON"),
            (b'{"token_ids": [NaN]}', 400, "request_refused", "not JSON"),
            (b"\xff\xfe", 400, "request_refused", "not JSON"),
            (b"[" * 100_000, 400, "request_refused", "not JSON"),
            ([1, 2], 400, "request_refused", "not an object"),
            ({}, 400, "request_refused", "token_ids"),
            ({"token_ids": []}, 400, "request_refused", "empty"),
            ({"token_ids": "12"}, 400, "request_refused", "token_ids"),
            ({"token_ids": [VOCAB]}, 400, "request_refused", "vocabulary"),
            ({"token_ids": [2**80]}, 400, "request_refused", "token_ids"),
            ({"token_ids": [1], "features": {}}, 400, "request_refused", "features"),
            ({"token_ids": [1], "messages": []}, 400, "request_refused", "messages"),
            ({"token_ids": [1], "sampling_params": {"n": 2}}, 400, "request_refused", "sampling_params.n"),
            ({"token_ids": [1] * 100}, 400, "context_length_exceeded", "100"),
            ({"token_ids": [1], "model": "gpt"}, 404, "model_not_found", "'gpt' does not exist"),
            ({"token_ids": [1], "model": 5}, 404, "model_not_found", "5"),
            *(
                pytest.param(f'{{"token_ids": [1], "{name}": {DEEP}}}'.encode(), status, code, name, id=f"deep {name}")
                for name, status, code in (
                    ("token_ids", 400, "request_refused"),
                    ("priority", 400, "request_refused"),
                    ("sampling_params", 400, "request_refused"),
                    ("model", 404, "model_not_found"),
                )
            ),
        ],
    )
    async def test_bad_requests(
        self, engine: FakeEngine, http: aiohttp.ClientSession, body: object, status: int, code: str, said: str
    ) -> None:
        async with serving(engine) as gateway:
            answer = await ask(http, gateway, body)
        assert (answer.status, answer.error["code"], answer.error["type"]) == (status, code, "invalid_request_error")
        assert said in answer.error["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert engine.bodies == []

    async def test_http_itself(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        async with serving(engine, max_body=1000) as gateway:
            assert (await get(http, gateway, "/v1/files")).error["code"] == "not_found"
            wrong_method = await get(http, gateway, PATH)
            assert (wrong_method.status, wrong_method.headers["Allow"]) == (405, "POST")
            assert wrong_method.error["code"] == "method_not_allowed"
            large = await ask(http, gateway, {"token_ids": [1] * 500})
            assert (large.status, large.error["message"]) == (413, "the request body is over the limit of 1000 bytes")
            unreadable = await get(http, gateway, "/%ff")
            assert unreadable.error["code"] == "not_found"
            long = await ask(http, gateway, session="x" * 257)
            assert (long.status, "X-Session-ID" in long.error["message"]) == (400, True)
        assert engine.bodies == []

    async def test_bytes_that_are_no_text_in_a_header(self, engine: FakeEngine) -> None:
        engine.handler = lambda request, body: web.Response(status=500)
        async with serving(engine) as gateway:
            port = int(gateway.url.rsplit(":", 1)[1])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            data = json.dumps(BODY).encode()
            head = b"POST %s HTTP/1.1\r\nHost: x\r\nX-Session-ID: a\xff\xfeb\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (PATH.encode(), len(data)) + data)
            status = await asyncio.wait_for(reader.readline(), 5)
            writer.close()
        assert b" 502 " in status

    async def test_what_is_no_request_at_all(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        async with serving(engine) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
            writer.write(b"GARBLED\r\n\r\n")
            head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
            writer.close()
            metrics = (await get(http, gateway, "/metrics")).raw.decode()
        assert b" 400 " in head.splitlines()[0]
        assert json.loads(body)["error"]["code"] == "bad_request"
        assert 'responses_total{path="other",status="400"} 1\n' in metrics

    async def test_a_body_that_never_comes(self, engine: FakeEngine) -> None:
        async with serving(engine, read_timeout=0.1) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
            writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{" % PATH.encode())
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
            writer.close()
        assert b" 408 " in answer.splitlines()[0]
        assert b"request_timeout" in answer

    async def test_a_caller_that_asks_before_it_sends(self, engine: FakeEngine) -> None:
        async with serving(engine) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rsplit(":", 1)[1]))
            data = json.dumps(BODY).encode()
            head = b"POST %s HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (PATH.encode(), len(data)))
            assert b" 100 " in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 2)
            writer.write(data)
            assert b" 200 " in await asyncio.wait_for(reader.readline(), 2)
            writer.close()

    async def test_the_token(self, engine: FakeEngine, http: aiohttp.ClientSession) -> None:
        async with serving(engine, token="secret-token") as gateway:
            for wrong in ({}, {"Authorization": "Bearer secret-toke"}, {"Authorization": "secret-token"}):
                answer = await ask(http, gateway, **wrong)
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
                assert answer.headers["WWW-Authenticate"] == "Bearer"
                assert "secret-token" not in answer.raw.decode()
            assert (await get(http, gateway, "/metrics")).status == 401
            assert (await get(http, gateway, "/health")).status == 200
            assert engine.bodies == []
            assert (await ask(http, gateway, Authorization="Bearer secret-token")).status == 200

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "gateway.example", ""])
    def test_nothing_but_the_loopback_without_a_token(self, host: str) -> None:
        with pytest.raises(InputError, match="for everyone"):
            Gateway("http://127.0.0.1:1", limits=LIMITS, serving=Serving(host=host))
        Gateway("http://127.0.0.1:1", limits=LIMITS, serving=Serving(host=host, token="t"))

    @pytest.mark.parametrize("token", ["", "two\nlines", "ü"])
    def test_tokens_that_no_header_can_carry(self, token: str) -> None:
        with pytest.raises(InputError, match="token"):
            Gateway("http://127.0.0.1:1", limits=LIMITS, serving=Serving(token=token))

    async def test_a_port_in_use(self, engine: FakeEngine) -> None:
        async with serving(engine) as gateway:
            port = int(gateway.url.rsplit(":", 1)[1])
            with pytest.raises(HostError, match="cannot listen") as caught:
                async with serving(engine, port=port):
                    pass
        assert caught.value.where == f"127.0.0.1:{port}"

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    )

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.binary(max_size=40) | json_values.map(lambda value: json.dumps(value).encode()))
    def test_no_body_makes_it_fail(self, raw: bytes) -> None:
        async def status() -> int:
            async with FakeEngine() as engine, serving(engine) as gateway, aiohttp.ClientSession() as http:
                answer = await ask(http, gateway, raw)
                assert answer.error["message"]
                return answer.status

        assert 400 <= asyncio.run(status()) < 500


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
