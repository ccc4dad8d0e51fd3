"""HTTP/1.1 to engines: POST a body, get the whole answer, keep the connection for the next.

No redirects, no cookies, no proxies, no compression, one request at a time on a connection.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Final, cast
from urllib.parse import urlsplit

from miles_verifiers.errors import ConfigError
from miles_verifiers.wire.http.answers import Answer, AnswerParser, BrokenAnswer

_LONGEST_REST: Final = 4.0
"""Seconds that an idle connection is kept; uvicorn closes it after five (SGLang 0.5.23)."""


class NoAnswer(Exception):
    """Not one byte of an answer came. Asking again is safe."""


class FirstByteLate(Exception):
    """No answer began in time."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an engine listens. `of` raises ConfigError."""

    host: str
    port: int
    tls: bool
    authority: str
    path: str
    """What stands before the paths of requests, without a slash at its end."""

    @classmethod
    def of(cls, url: str) -> Origin:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        text = f"{parts.netloc}{parts.path}"
        plain = text.isascii() and text.isprintable() and " " not in text and "@" not in text
        if parts.scheme not in ("http", "https") or not parts.hostname or not plain or parts.query or parts.fragment:
            raise ConfigError(f"{url!r:.200} is not the URL of an engine", next_step="write http://HOST:PORT")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.netloc, parts.path.rstrip("/"))


class Connections:
    """Connections to any number of origins, kept while they rest. Use it on one event loop, and close it there."""

    def __init__(self, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._resting: dict[Origin, list[_Connection]] = {}
        self._tls: ssl.SSLContext | None = None
        self._closed = False

    async def post(
        self, origin: Origin, path: str, body: bytes, headers: str = "", *, first_byte: float | None = None
    ) -> Answer:
        """The answer to a POST of the JSON `body`; `headers` are further lines, each with its line end.

        Raises NoAnswer, BrokenAnswer, and FirstByteLate after `first_byte` seconds. Cancelling it closes the connection.
        """
        connection = self._take(origin) or await self._connect(origin)
        head = (
            f"POST {origin.path}{path} HTTP/1.1\r\nHost: {origin.authority}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        try:
            answer = await connection.ask(head.encode() + body, first_byte)
        except BaseException:
            connection.abort()
            raise
        if answer.reusable and not self._closed:
            connection.rests_since = asyncio.get_running_loop().time()
            self._resting.setdefault(origin, []).append(connection)
        else:
            connection.abort()
        return answer

    def close(self) -> None:
        """Close what rests; what is under way is closed when it is answered."""
        self._closed = True
        for connections in self._resting.values():
            for connection in connections:
                connection.abort()
        self._resting.clear()

    def _take(self, origin: Origin) -> _Connection | None:
        """The connection that rested the shortest: the other side closes those that rest long."""
        resting = self._resting.get(origin)
        if not resting:
            return None
        oldest_useful = asyncio.get_running_loop().time() - _LONGEST_REST
        while resting:
            connection = resting.pop()
            if connection.open and connection.rests_since >= oldest_useful:
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin) -> _Connection:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    _Connection, origin.host, origin.port, ssl=self._tls if origin.tls else None
                )
        except TimeoutError:
            raise NoAnswer(f"no connection within {self._connect_timeout:g} s") from None
        except (OSError, UnicodeError) as error:  # of the name, the network or TLS
            raise NoAnswer(f"no connection: {error}") from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, on which one request is under way at most."""

    def __init__(self) -> None:
        self.open = False
        self.rests_since = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._parser = AnswerParser()

    async def ask(self, request: bytes, first_byte: float | None) -> Answer:
        if self._transport is None or not self.open:
            raise NoAnswer("the connection was closed")
        loop = asyncio.get_running_loop()
        self._parser = AnswerParser()
        waiter: asyncio.Future[Answer] = loop.create_future()
        self._waiter = waiter
        self._transport.write(request)
        timer = loop.call_later(first_byte, self._late) if first_byte is not None else None
        try:
            return await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def abort(self) -> None:
        self.open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports (Ray's actors run on it) are no subclasses of asyncio's.
        self._transport, self.open = cast(asyncio.Transport, transport), True

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.abort()  # bytes that nobody asked for: what comes next could be taken for another's answer
            return
        try:
            answer = self._parser.feed(data)
        except BrokenAnswer as error:
            self._fail(error)
            return
        if answer is not None:
            self._waiter.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self.open = False
        if self._waiter is None or self._waiter.done():
            return
        if not self._parser.begun:
            self._fail(NoAnswer(f"the connection was closed{f': {error}' if error else ''}"))
            return
        try:
            if error is not None:
                raise BrokenAnswer(f"the connection was lost in the middle of the answer: {error}")
            self._waiter.set_result(self._parser.end())
        except BrokenAnswer as broken:
            self._fail(broken)

    def _late(self) -> None:
        if not self._parser.begun:
            self._fail(FirstByteLate())

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
