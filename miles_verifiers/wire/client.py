"""HTTP client of one or several SGLang servers: pool, deadlines, careful retries, aborts.

A request is repeated only if no byte of an answer came, or the engine said that it is busy: then nothing was sampled that
anyone saw. Each attempt has its own request id, so that a repeated request cannot meet its own ghost. Whenever a request
is given up (deadline, or the caller was cancelled) the engine is told, so that it stops sampling for nobody.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import orjson

from miles_verifiers.errors import (
    DeadlineExceeded,
    EngineBusy,
    EngineUnreachable,
    PromptTooLong,
    ReplyInvalid,
    RequestRefused,
    shown,
)
from miles_verifiers.wire.columns import parsed
from miles_verifiers.wire.http.answers import Answer, BrokenAnswer
from miles_verifiers.wire.http.connections import Connections, FirstByteLate, NoAnswer, Origin
from miles_verifiers.wire.token_ids import TokenIds

_BUSY = frozenset({429, 503})
_ROUTING_HEADER = "X-SMG-Routing-Key"
"""sglang-router's header for consistent hashing; SGLang itself ignores it on /generate (0.5.23)."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds."""

    connect: float = 10.0
    first_byte: float | None = None
    """From sending a request to the first byte of its answer. SGLang answers in one piece when everything is sampled, so
    None, which leaves it to `total`, is right but where replies are known to be short."""
    total: float = 240.0
    """One request, repeats included."""
    abort: float = 5.0
    """Telling the engine to give up a request."""


@dataclass(slots=True)
class Traffic:
    """What the client did since it was made."""

    attempts: int = 0
    """Requests sent to engines, repeats included."""
    repeats: int = 0
    aborts: int = 0
    """Requests that an engine was told to give up."""


T = TypeVar("T")
Reader = Callable[[Any, str], T]
"""Makes something of a parsed reply; the text names request and engine, for messages."""


class _Unanswered(Exception):
    """No byte of an answer came; asking again is safe."""

    def __init__(self, error: EngineUnreachable | EngineBusy, wait: float = 0.0) -> None:
        super().__init__(str(error))
        self.error = error
        self.wait = wait


class EngineClient:
    """Client of `urls`. Use it on one event loop, and close it there.

    Requests of one session go to one engine, which has their common prefix in its cache; others take turns. Where an engine does
    not answer, a request is repeated at the next one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        deadlines: Deadlines | None = None,
        attempts: int = 4,
        max_connections: int = 1024,
    ) -> None:
        if not urls:
            raise ValueError("an engine client needs at least one url")
        self.urls = [url.rstrip("/") for url in urls]
        self._origins = {url: Origin.of(url) for url in self.urls}
        self.deadlines = deadlines or Deadlines()
        self.traffic = Traffic()
        self._attempts = attempts
        self._slots = asyncio.Semaphore(max_connections)
        self._connections = Connections(self.deadlines.connect)
        self._name, self._numbers = uuid.uuid4().hex, itertools.count()
        self._turn = 0
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False

    async def generate(self, payload: Mapping[str, Any], read: Reader[T], *, session: str | None = None) -> T:
        """What `read` makes of the reply of `/generate` to `payload`.

        A parsed reply is a list per token, and is gone again when this returns: replies that wait for their turn on the
        event loop make the garbage collector the most expensive part of the wire.

        Raises what `read` raises, RequestRefused and PromptTooLong (400), ReplyInvalid (another error status, or half an answer),
        EngineUnreachable, EngineBusy and DeadlineExceeded, each with the request's id and the engine.
        """
        if self._closed:
            raise EngineUnreachable("the client was closed")
        engine = self._engine_of(session)
        try:
            async with asyncio.timeout(self.deadlines.total), self._slots:
                raw, where = await self._repeat(engine, payload, session)
        except TimeoutError:
            raise _late(
                f"no complete answer within {self.deadlines.total:g} s",
                f"engine {self.urls[engine]}, session {session or '-'}",
            ) from None
        try:
            reply = parsed(raw)
        except orjson.JSONDecodeError as error:
            raise ReplyInvalid(f"the answer is not JSON: {error}", where=where) from None
        return read(reply, where)

    async def close(self) -> None:
        """Let pending aborts end, each within its deadline, and close the connections."""
        self._closed = True
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=self.deadlines.abort)
        self._connections.close()
        await asyncio.sleep(0)  # transports close their sockets in the next round of the loop

    def _engine_of(self, session: str | None) -> int:
        if session is not None:
            return zlib.crc32(session.encode(errors="replace")) % len(self.urls)
        self._turn += 1
        return self._turn % len(self.urls)

    async def _repeat(self, engine: int, payload: Mapping[str, Any], session: str | None) -> tuple[bytes, str]:
        for attempt in range(1, self._attempts + 1):
            url = self.urls[engine]
            # All of one length: an abort ends every request whose id begins with the one given (SGLang 0.5.23, scheduler.py).
            rid = f"{self._name}-{next(self._numbers):012x}"
            where = f"request {rid} to engine {url}"
            self.traffic.attempts += 1
            try:
                return await self._once(url, rid, payload, session, where), where
            except _Unanswered as failed:
                if attempt == self._attempts:
                    raise failed.error.at(f"{where}, attempt {attempt} of {self._attempts}") from failed
                await asyncio.sleep(max(failed.wait, _backoff(attempt)))
                self.traffic.repeats += 1
                if isinstance(failed.error, EngineUnreachable):
                    engine = (engine + 1) % len(self.urls)
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _once(self, url: str, rid: str, payload: Mapping[str, Any], session: str | None, where: str) -> bytes:
        try:
            body = orjson.dumps({**payload, "rid": rid}, _written, orjson.OPT_PASSTHROUGH_DATACLASS)
        except TypeError as error:  # orjson.JSONEncodeError is a TypeError
            raise RequestRefused(f"the request cannot be written as JSON: {error}", where=where) from None
        headers = "" if session is None else f"{_ROUTING_HEADER}: {_header_value(session)}\r\n"
        try:
            answer = await self._connections.post(
                self._origins[url], "/generate", body, headers, first_byte=self.deadlines.first_byte
            )
        except asyncio.CancelledError:
            self._abort(url, rid)
            raise
        except FirstByteLate:
            self._abort(url, rid)
            raise _late(f"no answer began within {self.deadlines.first_byte:g} s", where) from None
        except NoAnswer as error:
            hint = "see the engine's log; is its process alive?"
            raise _Unanswered(EngineUnreachable(f"the engine did not answer: {error}", next_step=hint)) from None
        except BrokenAnswer as error:
            raise ReplyInvalid(f"the answer broke off: {error}", where=where) from None
        if answer.status != 200:
            self._raise_for(answer, where)
        return answer.body

    def _raise_for(self, answer: Answer, where: str) -> NoReturn:
        said = _message(answer.body)
        if answer.status in _BUSY:
            raise _Unanswered(EngineBusy(f"the engine is busy: {said}"), _retry_after(answer))
        if answer.status in (400, 413, 422):
            kind = PromptTooLong if "context length" in said else RequestRefused
            raise kind(f"the engine refused the request: {said}", where=where)
        raise ReplyInvalid(f"the engine answered {answer.status}: {said}", where=where)

    def _abort(self, url: str, rid: str) -> None:
        """Tell the engine in the background: whoever was cancelled must not wait for it."""

        self.traffic.aborts += 1

        async def tell() -> None:
            body = orjson.dumps({"rid": rid})
            try:
                async with asyncio.timeout(self.deadlines.abort):
                    await self._connections.post(self._origins[url], "/abort_request", body)
            except (NoAnswer, BrokenAnswer, TimeoutError):
                pass  # an engine that cannot be told is not sampling for us either: the connection is closed

        task = asyncio.get_running_loop().create_task(tell())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _written(value: object) -> orjson.Fragment:
    if isinstance(value, TokenIds):
        return orjson.Fragment(value.json)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _late(what: str, where: str) -> DeadlineExceeded:
    hint = "raise rollout.request_timeout, or see the engine's log for why it is slow"
    return DeadlineExceeded(what, where=where, next_step=hint)


def _backoff(attempt: int) -> float:
    """Seconds before the next attempt: 0.1, 0.2, 0.4, ... at most 2, of which up to half is taken away at random."""
    return min(0.1 * 2.0 ** (attempt - 1), 2.0) * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, not a secret


def _retry_after(answer: Answer) -> float:
    try:
        seconds = float(answer.headers.get(b"retry-after", b"0"))
    except ValueError:  # an HTTP date; the backoff serves as well
        return 0.0
    return min(seconds, 10.0) if seconds > 0.0 else 0.0


def _header_value(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    return "".join(char for char in text if char.isascii() and char.isprintable())


def _message(raw: bytes) -> str:
    """What an error body says. SGLang: {"error": {"message": ...}}, FastAPI: {"detail": ...}."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw[:500].decode(errors="replace") or "an empty body"
    if isinstance(body, dict):
        error = body.get("error", body)
        for key in ("message", "detail"):
            if isinstance(error, dict) and error.get(key):
                return _text(error[key])
    return _text(body)


def _text(said: object) -> str:
    return said[:500] if isinstance(said, str) else shown(said, 500)
