"""MilesSGLangTransport: what renderers takes for its OpenAI client, in front of SGLang's native API, in process.

Verifiers 0.2.x hands its TrainClient an "openai" object of which renderers uses four things (renderers/client.py 0.1.8 to
0.1.10): `.base_url`, `.get("/models")` for the context length, `.post(url, body=..., options={"headers": ...})` whose result
has `.content`, and `.close()`. The transport is that object. An HTTP gateway would be a server around the same three
steps of `_generate`: translate, ask, translate back.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_verifiers.errors import GenerationAborted, RequestRefused, WireError
from miles_verifiers.samples import WeightSpan
from miles_verifiers.wire.client import Deadlines, EngineClient
from miles_verifiers.wire.reply import Generation, checked_reply
from miles_verifiers.wire.translate import Limits, response_json, to_sglang

GENERATE_PATH = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"
"""Verifiers sends the trace's id under it (verifiers/v1/clients/client.py 0.2.0)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answered request of a session."""

    token_ids: list[int]
    """[N] sampled"""
    weight_versions: list[WeightSpan]
    """Counts sum to N."""
    prompt_tokens: int
    seconds: float


@dataclass(slots=True)
class Counters:
    """Since the transport was made; `in_flight` and `prompt_tokens_in_flight` are of now."""

    requests: int = 0
    failed: int = 0
    in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    tokens: int = 0
    """Sampled tokens of good replies."""


@dataclass(frozen=True, slots=True)
class WireResponse:
    """The part of an HTTP response that renderers reads."""

    content: bytes
    status_code: int = 200


@dataclass(slots=True)
class _Session:
    turns: list[Turn] = field(default_factory=list)
    running: set[asyncio.Task[Generation]] = field(default_factory=set)


class MilesSGLangTransport:
    """See the module. `on_error` turns our error into the one that the caller's framework expects."""

    def __init__(
        self,
        engine_urls: str | Sequence[str],
        *,
        limits: Limits,
        model: str = "policy",
        deadlines: Deadlines | None = None,
        max_connections: int = 1024,
        on_error: Callable[[WireError], Exception] | None = None,
    ) -> None:
        urls = [engine_urls] if isinstance(engine_urls, str) else list(engine_urls)
        self.client = EngineClient(urls, deadlines=deadlines, max_connections=max_connections)
        self.limits = limits
        self.model = model
        self.counters = Counters()
        self.base_url = f"{self.client.urls[0]}/v1"
        self._on_error = on_error
        self._sessions: defaultdict[str, _Session] = defaultdict(_Session)

    async def get(self, path: str, *, cast_to: object = None, **_: object) -> dict[str, Any]:
        """The list of models, with the context length that prompts must keep to."""
        if path != "/models":
            raise self._failure(RequestRefused(f"GET {path} is not known", next_step="GET /models is"))
        return {"object": "list", "data": [{"id": self.model, "max_model_len": self.limits.max_context}]}

    async def post(
        self,
        endpoint: str,
        *,
        cast_to: object = None,
        body: object = None,
        options: Mapping[str, Any] | None = None,
        **_: object,
    ) -> WireResponse:
        """Answer renderers' generate request. Raises what `on_error` makes of a WireError."""
        headers = (options or {}).get("headers") or {}
        session = headers.get(SESSION_HEADER)
        self.counters.requests += 1
        try:
            if not endpoint.endswith(GENERATE_PATH):
                raise RequestRefused(f"POST {endpoint} is not known", next_step=f"POST {GENERATE_PATH} is")
            return WireResponse(await self._generate(body, session))
        except WireError as error:
            self.counters.failed += 1
            failure = self._failure(error.at(f"session {session}" if session else ""))
            if failure is error:
                raise
            raise failure from error

    def take(self, session: str) -> list[Turn]:
        """The turns of `session`, once: they are forgotten, as a run has no end of sessions."""
        record = self._sessions.pop(session, None)
        return record.turns if record is not None else []

    def cancel(self, session: str) -> int:
        """Give up the requests of `session` that are running, and tell the engine. Returns how many there were.

        For whoever ends a rollout: the server between harness and transport (verifiers/v1/interception/server.py 0.2.0)
        does not notice when its client goes away, and would let the engine sample on for nobody.
        """
        running = list(self._sessions[session].running) if session in self._sessions else []
        for task in running:
            task.cancel()
        return len(running)

    async def close(self) -> None:
        """Give up all running requests and close the connections."""
        running = [task for record in self._sessions.values() for task in record.running]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=1.0)
        await self.client.close()

    async def _generate(self, body: object, session: str | None) -> bytes:
        record = self._sessions[session] if session is not None else _Session()
        payload = to_sglang(body, self.limits, first=not record.turns)
        started = time.perf_counter()
        generation = await self._ask(payload, session, record)
        seconds = time.perf_counter() - started
        record.turns.append(Turn(generation.token_ids, generation.weight_versions, generation.prompt_tokens, seconds))
        self.counters.tokens += len(generation.token_ids)
        return response_json(generation)

    async def _ask(self, payload: Mapping[str, Any], session: str | None, record: _Session) -> Generation:
        """The engine's answer, from a task of its own, so that `cancel` can end it without ending whoever waits."""
        prompt_ids: list[int] = payload["input_ids"]

        def read(reply: object, where: str) -> Generation:
            return checked_reply(reply, prompt_ids=prompt_ids, vocab_size=self.limits.vocab_size, where=where)

        task = asyncio.get_running_loop().create_task(self.client.generate(payload, read, session=session))
        record.running.add(task)
        self.counters.in_flight += 1
        self.counters.prompt_tokens_in_flight += len(prompt_ids)
        try:
            return await task
        except asyncio.CancelledError:
            waiter = asyncio.current_task()
            if waiter is not None and waiter.cancelling():
                raise
            raise GenerationAborted("the rollout ended before the engine answered") from None
        finally:
            record.running.discard(task)
            self.counters.in_flight -= 1
            self.counters.prompt_tokens_in_flight -= len(prompt_ids)

    def _failure(self, error: WireError) -> Exception:
        return error if self._on_error is None else self._on_error(error)
