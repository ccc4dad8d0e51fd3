"""A SGLang server that says what it is told to: good replies of its shape, and every fault that the wire must survive."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

Reply = dict[str, Any]
VOCAB = 1000


def good_reply(ids: list[int], logprobs: list[float] | None = None, **meta: Any) -> Reply:
    """What SGLang 0.5.23 answers to /generate with return_logprob; `meta` overrides or, with ..., removes entries."""
    values = logprobs if logprobs is not None else [-0.5 - 0.25 * i for i in range(len(ids))]
    info = {
        "id": "rid-of-the-engine",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": len(ids),
        "cached_tokens": 0,
        "weight_version": "7",
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)],
        **meta,
    }
    return {
        "text": "ignored",
        "output_ids": ids,
        "meta_info": {name: value for name, value in info.items() if value is not ...},
    }


class FakeEngine:
    """Serves on a free port while the context is open. `handler` may be replaced at any time."""

    def __init__(self, handler: Callable[[web.Request, Reply], Any] | None = None) -> None:
        self.handler = handler or (lambda request, body: good_reply([5, 6, 2]))
        self.bodies: list[Reply] = []
        self.headers: list[dict[str, str]] = []
        self.aborted: list[str] = []
        self.url = ""
        self.model_info: Reply = {"model_path": "/nowhere", "is_generation": True, "weight_version": "7"}
        self.model_card: Reply = {"id": "tiny", "object": "model", "max_model_len": 128}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.text())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        answer = self.handler(request, body)
        if asyncio.iscoroutine(answer):
            answer = await answer
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append(json.loads(await request.text())["rid"])
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.model_card]})

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.model_info)

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        # Requests of clients that went away are still being answered when a test ends.
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in code that sets no event
            await asyncio.sleep(0.005)


async def cut(request: web.Request, part: bytes = b"") -> web.StreamResponse:
    """Close the connection, after `part` of an answer that announced more."""
    assert request.transport is not None
    if part:
        request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n" + part)  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
    request.transport.close()
    return web.Response()


async def slow_drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.02)


async def stall(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()
