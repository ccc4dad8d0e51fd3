"""The processes that `bench.wire` measures: python -m bench.wire_process ROLE URL [uncompiled].

    raw        aiohttp + orjson, no translation, up to the parsed reply of the engine: the limit
    transport  MilesSGLangTransport, up to the bytes that renderers parses
    client     aiohttp + orjson in front of the gateway, up to the same bytes
    gateway    Gateway; prints its URL

A line of JSON on standard input is an order, a line on standard output its answer; the end of the input is the end.
Clients take {"requests", "in_flight"}; everyone takes {}, and says its CPU seconds and its memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop

from bench.stub_engine import VOCAB
from miles_verifiers.wire import columns, scan, token_ids
from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import GENERATE_PATH, SESSION_HEADER, MilesSGLangTransport

PROMPT, COMPLETION = 1024, 512
LIMITS = Limits(vocab_size=VOCAB, max_context=4096, max_response=COMPLETION)
PROMPT_IDS = [random.Random(1).randrange(VOCAB) for _ in range(PROMPT)]
SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_tokens": COMPLETION,
    "stop_token_ids": [2],
    "logprobs": 1,
}
Ask = Callable[[int], Awaitable[None]]


def renderers_body() -> dict[str, Any]:
    """A new one for each request, as renderers makes it."""
    return {"model": "policy", "token_ids": PROMPT_IDS[:], "sampling_params": dict(SAMPLING)}


def sglang_body() -> dict[str, Any]:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": COMPLETION, "stop_token_ids": [2]}
    return {"input_ids": PROMPT_IDS[:], "sampling_params": sampling, "return_logprob": True}


def raw_client(url: str, body: Callable[[], dict[str, Any]], check: Callable[[bytes], bool]) -> tuple[Ask, Any]:
    """Post `body()` to `url`; `check` looks at the reply, so that no error goes unseen."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar())

    async def ask(number: int) -> None:
        headers = {"Content-Type": "application/json", SESSION_HEADER: f"session-{number}"}
        async with session.post(url, data=orjson.dumps(body()), headers=headers) as response:
            assert check(await response.read())

    return ask, session


def transport_client(url: str) -> tuple[Ask, Any]:
    transport = MilesSGLangTransport(url, limits=LIMITS)
    endpoint = url + GENERATE_PATH

    async def ask(number: int) -> None:
        session = f"session-{number}"
        await transport.post(endpoint, body=renderers_body(), options={"headers": {SESSION_HEADER: session}})
        (turn,) = transport.take(session)
        assert len(turn.token_ids) == COMPLETION

    return ask, transport


async def run(ask: Ask, requests: int, in_flight: int) -> float:
    """Seconds for `requests`, of which `in_flight` run at once."""
    numbers = iter(range(requests))

    async def worker() -> None:
        for number in numbers:
            await ask(number)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as workers:
        for _ in range(in_flight):
            workers.create_task(worker())
    return time.perf_counter() - started


def state() -> dict[str, float]:
    return {"cpu": time.process_time(), "rss": psutil.Process().memory_info().rss}


async def orders(answer: Callable[[dict[str, int]], Awaitable[dict[str, float]]]) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(await answer(json.loads(line))), flush=True)


def _is_whole(reply: bytes) -> bool:
    return len(orjson.loads(reply)["output_ids"]) == COMPLETION


async def client(role: str, url: str) -> None:
    if role == "raw":
        ask, closing = raw_client(f"{url}/generate", sglang_body, _is_whole)
    elif role == "client":
        ask, closing = raw_client(
            url + GENERATE_PATH, renderers_body, lambda reply: b'"finish_reason":"length"' in reply
        )
    else:
        ask, closing = transport_client(url)

    async def answer(order: dict[str, int]) -> dict[str, float]:
        seconds = await run(ask, order["requests"], order["in_flight"]) if order else 0.0
        return {"seconds": seconds, **state()}

    await orders(answer)
    await closing.close()


async def gateway(url: str) -> None:
    # As the command runs it: on uvloop, and whoever trains is another process, so turns are not kept.
    async with Gateway(url, limits=LIMITS, serving=Serving(max_running=2048), keep_turns=False) as serving:
        print(serving.url, flush=True)

        async def answer(order: dict[str, int]) -> dict[str, float]:
            return state()

        await orders(answer)


if __name__ == "__main__":
    role, url, *uncompiled = sys.argv[1:]
    if uncompiled:
        columns.rows, token_ids.integers = scan.rows_in_python, scan.integers_in_python
    uvloop.run(gateway(url)) if role == "gateway" else asyncio.run(client(role, url))
