"""An engine that answers every POST with the same prebuilt reply, at next to no cost.

    python -m bench.stub_engine PROMPT_TOKENS REPLY_TOKENS

Speaks as much HTTP/1.1 as aiohttp's client needs. Prints its URL, and ends when its standard input closes.
"""

from __future__ import annotations

import asyncio
import random
import sys

import orjson

VOCAB = 150_000


def reply(prompt_tokens: int, completion_tokens: int) -> bytes:
    """SGLang's reply to a prompt of `prompt_tokens`: as many digits per log-prob as SGLang sends."""
    draw = random.Random(0)
    ids = [draw.randrange(VOCAB) for _ in range(completion_tokens)]
    body = {
        "text": "x" * 4 * completion_tokens,
        "output_ids": ids,
        "meta_info": {
            "id": "0" * 32,
            "finish_reason": {"type": "length", "length": completion_tokens},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "cached_tokens": 0,
            "weight_version": "1",
            "e2e_latency": 1.5,
            "output_token_logprobs": [[-draw.expovariate(2.0), token, None] for token in ids],
        },
    }
    return orjson.dumps(body)


class Answering(asyncio.Protocol):
    """One connection. Requests on it come one after the other."""

    answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._head = b""
        self._missing = 0

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            head = self._head[:end].lower()
            length = int(head.split(b"content-length:", 1)[1].split(b"\r\n", 1)[0])
            self._missing = length - (len(self._head) - end - 4)
            self._head = b""
        else:
            self._missing -= len(data)
        if self._missing == 0:
            self._transport.write(self.answer)  # type: ignore[attr-defined]


async def serve(prompt_tokens: int, completion_tokens: int) -> None:
    body = reply(prompt_tokens, completion_tokens)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    Answering.answer = head + body
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answering, "127.0.0.1", 0, backlog=2048)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
