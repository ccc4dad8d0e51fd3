"""A gateway in front of a fake engine, and somebody who calls it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fake_engine import VOCAB, FakeEngine

from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits

LIMITS = Limits(vocab_size=VOCAB, max_context=100, max_response=20)
BODY = {"model": "policy", "token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 4, "stop_token_ids": [2]}}
PATH = "/inference/v1/generate"


@asynccontextmanager
async def serving(
    engine: FakeEngine, limits: Limits = LIMITS, total: float = 3.0, **how: Any
) -> AsyncIterator[Gateway]:
    deadlines = Deadlines(connect=2, total=total, abort=1)
    async with Gateway(engine.url, limits=limits, deadlines=deadlines, serving=Serving(**how)) as gateway:
        yield gateway


DEEP = "[" * 1000 + "]" * 1000
"""JSON for which Python 3.11 has no repr."""


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
