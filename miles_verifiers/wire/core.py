"""Wire: one of renderers' requests answered by an engine, and what is kept of it for whoever trains.

The steps are always the same: translate, ask, check, translate back. MilesSGLangTransport does them in process, Gateway
over HTTP; both are this object.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_verifiers.errors import GenerationAborted
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire.client import Deadlines, EngineClient
from miles_verifiers.wire.reply import Generation, checked_reply
from miles_verifiers.wire.token_ids import TokenIds
from miles_verifiers.wire.translate import Limits, response_json, to_sglang


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
    """Since the wire was made; `in_flight` and `prompt_tokens_in_flight` are of now."""

    requests: int = 0
    failed: int = 0
    in_flight: int = 0
    prompt_tokens_in_flight: int = 0
    tokens: int = 0
    """Sampled tokens of good replies."""
    prompt_tokens: int = 0
    """Prompt tokens of good replies."""
    sessions_forgotten: int = 0
    """Sessions that nobody took before there were too many."""


class _Running:
    """One request that waits for the engine, as `cancel` sees it."""

    __slots__ = ("given_up", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.task = task
        self.given_up = False


@dataclass(slots=True)
class _Session:
    answered: int = 0
    turns: list[Turn] = field(default_factory=list)
    running: set[_Running] = field(default_factory=set)


class Wire:
    """Requests of renderers' form in front of the SGLang servers `engine_urls`. Use it on one event loop, and close it there.

    `keep_turns` is for whoever trains in this process and takes each session's turns; without it nothing of a session is kept
    but, where first prompts have a limit, that it began. Of more than `max_sessions` sessions the oldest are forgotten.
    """

    def __init__(
        self,
        engine_urls: str | Sequence[str],
        *,
        limits: Limits,
        deadlines: Deadlines | None = None,
        max_connections: int = 1024,
        keep_turns: bool = True,
        max_sessions: int = 65_536,
    ) -> None:
        urls = [engine_urls] if isinstance(engine_urls, str) else list(engine_urls)
        self.client = EngineClient(urls, deadlines=deadlines, max_connections=max_connections)
        self.limits = limits
        self.counters = Counters()
        self._keep_turns = keep_turns
        self._remembers = keep_turns or limits.max_first_prompt is not None
        self._max_sessions = max_sessions
        self._sessions: dict[str, _Session] = {}
        self._nameless = _Session()

    async def generate(self, body: object, session: str | None = None) -> bytes:
        """renderers' response, as JSON, to its request `body`, which belongs to `session`.

        Raises WireError: RequestRefused and PromptTooLong before the engine is asked, GenerationAborted also when the session
        was cancelled, and what EngineClient.generate raises.
        """
        counters = self.counters
        counters.requests += 1
        record = self._session(session) if session is not None else self._nameless
        try:
            payload = to_sglang(body, self.limits, first=session is None or not record.answered)
            started = time.perf_counter()
            generation = await self._ask(payload, session, record)
        except BaseException:
            counters.failed += 1
            raise
        finally:
            if not self._remembers and session is not None and not record.running:
                self._sessions.pop(session, None)
        record.answered += 1
        if self._keep_turns and session is not None:
            seconds = time.perf_counter() - started
            turn = Turn(generation.ids.as_list(), generation.weight_versions, generation.prompt_tokens, seconds)
            record.turns.append(turn)
        counters.tokens += len(generation.ids)
        counters.prompt_tokens += generation.prompt_tokens
        return response_json(generation)

    def take(self, session: str) -> list[Turn]:
        """The turns of `session`, once: they are forgotten, as a run has no end of sessions."""
        record = self._sessions.pop(session, None)
        return record.turns if record is not None else []

    def cancel(self, session: str) -> int:
        """Give up the requests of `session` that are running, and tell the engine. Returns how many there were.

        For whoever ends a rollout: the server between harness and wire (verifiers/v1/interception/server.py 0.2.0) does not
        notice when its client goes away, and would let the engine sample on for nobody.
        """
        record = self._sessions.get(session)
        return self._give_up([record]) if record is not None else 0

    async def close(self) -> None:
        """Give up all running requests and close the connections."""
        if self._give_up([self._nameless, *self._sessions.values()]):
            await asyncio.sleep(0)  # each of them tells its engine in the next round of the loop
        await self.client.close()

    def _give_up(self, records: list[_Session]) -> int:
        running = [request for record in records for request in record.running if not request.given_up]
        for request in running:
            request.given_up = True
            request.task.cancel()
        return len(running)

    def _session(self, name: str) -> _Session:
        record = self._sessions.get(name)
        if record is None:
            if len(self._sessions) >= self._max_sessions:
                self._forget_one()
            record = self._sessions[name] = _Session()
        return record

    def _forget_one(self) -> None:
        """The oldest session at rest; they lie in the order in which they began."""
        oldest = next((name for name, record in self._sessions.items() if not record.running), None)
        if oldest is not None:
            del self._sessions[oldest]
            self.counters.sessions_forgotten += 1

    async def _ask(self, payload: dict[str, Any], session: str | None, record: _Session) -> Generation:
        prompt: TokenIds = payload["input_ids"]

        def read(reply: object, where: str) -> Generation:
            return checked_reply(reply, prompt=prompt, vocab_size=self.limits.vocab_size, where=where)

        task = asyncio.current_task()
        assert task is not None
        request = _Running(task)
        counters = self.counters
        record.running.add(request)
        counters.in_flight += 1
        counters.prompt_tokens_in_flight += len(prompt)
        try:
            return await self.client.generate(payload, read, session=session)
        except asyncio.CancelledError:
            # Ours to swallow only if nobody else cancelled the task as well, as in asyncio.timeout.
            if request.given_up and task.uncancel() == 0:
                raise GenerationAborted("the rollout ended before the engine answered") from None
            raise
        finally:
            record.running.discard(request)
            counters.in_flight -= 1
            counters.prompt_tokens_in_flight -= len(prompt)
