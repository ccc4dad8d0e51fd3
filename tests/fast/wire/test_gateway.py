"""The gateway over HTTP: the whole answer, and every refusal in the API's shape."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest
from aiohttp import web
from fake_engine import VOCAB, FakeEngine, good_reply
from gateway_caller import BODY, DEEP, LIMITS, PATH, ask, get, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles_verifiers.errors import HostError, InputError
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire.gateway import Gateway, Serving


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
