"""HTTP/1.1 server for one Application, on the event loop of whoever opens it.

One request at a time is answered on a connection, in the order in which they came. A caller that goes away cancels the
task that answers it. A connection may rest, but neither half a request nor a caller that does not read may hold one for long.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from typing import Final, Protocol, cast

from miles_verifiers.wire.http.framing import LONGEST_HEAD
from miles_verifiers.wire.http.requests import BadRequest, Request, RequestParser

log = logging.getLogger(__name__)

_LONGEST_REST: Final = 75.0
"""Seconds that a connection may rest between requests."""
_LONGEST_FAREWELL: Final = 5.0
"""Seconds that a caller has to read a last answer and close: closing before it has sent all would take the answer from it."""
_BACKLOG: Final = 2048
_REASONS: Final = {status.value: status.phrase for status in HTTPStatus}


@dataclass(slots=True)
class Response:
    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    """Further ones, of ASCII."""
    content_type: str = "application/json"


class Application(Protocol):
    """What a server serves. Where it raises, the caller gets what `broken` makes of a status 500."""

    def refuse(self, request: Request) -> Response | None:
        """The answer to a request of which only the head is known, or None to read on."""

    async def answer(self, request: Request) -> Response: ...

    def broken(self, status: HTTPStatus, what: str, request: Request | None = None) -> Response:
        """The answer to what is no request, and to one on which `answer` failed."""


class HttpServer:
    """`read_timeout`: seconds until a request must be there whole, and until the caller must have read its answer."""

    def __init__(self, application: Application, *, largest_body: int, read_timeout: float) -> None:
        self.application = application
        self.largest_body = largest_body
        self.read_timeout = read_timeout
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and say where. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self, loop), host, port, backlog=_BACKLOG)
        self._look_at_clocks(loop)
        bound: tuple[str, int] = self._server.sockets[0].getsockname()[:2]
        return bound

    async def close(self, grace: float) -> None:
        """Listen no more; requests that are being answered may end for `grace` seconds."""
        if self._server is None:
            return
        self._server.close()
        if self._sweep is not None:
            self._sweep.cancel()
        answering = [connection.task for connection in self.connections if connection.task is not None]
        if answering:
            await asyncio.wait(answering, timeout=grace)
        for connection in list(self.connections):
            connection.end()
        await asyncio.sleep(0)  # transports close their sockets in the next round of the loop
        self._server = None

    def _look_at_clocks(self, loop: asyncio.AbstractEventLoop) -> None:
        """One timer for all connections: one for each request would be a good part of what a request costs."""
        now = loop.time()
        for connection in list(self.connections):
            connection.look_at_clock(now)
        self._sweep = loop.call_later(min(1.0, self.read_timeout / 4), self._look_at_clocks, loop)


class _Connection(asyncio.Protocol):
    """One caller. What it waits for: a request, its rest, an answer (`task`), or to be read (`_unread`, `_farewell`)."""

    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server, self._application, self._loop = server, server.application, loop
        self._parser = RequestParser(server.largest_body)
        self._transport: asyncio.Transport
        self.task: asyncio.Task[None] | None = None
        self._since = loop.time()
        """When it began to wait for what it waits for."""
        self._unread = self._farewell = self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's transports (Ray's actors run on it) are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.connections.discard(self)
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._unread, self._since = True, self._loop.time()

    def resume_writing(self) -> None:
        self._unread = False

    def data_received(self, data: bytes) -> None:
        if self._farewell:
            return
        if not self._parser:
            self._since = self._loop.time()
        self._parser.feed(data)
        if self.task is None:
            self._go_on()
        elif len(self._parser) > LONGEST_HEAD:  # requests that come before their turn wait at the caller's end
            self._paused = True
            self._transport.pause_reading()

    def look_at_clock(self, now: float) -> None:
        """End it if it waits too long."""
        waits = now - self._since
        if self._farewell:
            if waits >= _LONGEST_FAREWELL:
                self._transport.abort()
        elif self._unread:
            if waits >= self._server.read_timeout:
                self._transport.abort()
        elif self.task is None and self._parser:
            if waits >= self._server.read_timeout:
                self._break(HTTPStatus.REQUEST_TIMEOUT, f"the request was not there after {waits:.0f} s")
        elif self.task is None and waits >= _LONGEST_REST:
            self._transport.close()

    def end(self) -> None:
        """Close it once what was written is sent; what was not answered never will be."""
        if self.task is not None:
            self.task.cancel()
        if self._unread:
            self._transport.abort()
        else:
            self._transport.close()

    def _go_on(self) -> None:
        """Take on the next request, as far as it is there."""
        try:
            known = self._parser.request is not None
            head = self._parser.read_head()
            if head is None:
                return
            request = self._parser.take()
            if not known and (refusal := self._application.refuse(head)) is not None:
                self._send(refusal, head, keep=request is not None and head.keep_alive)
            elif request is not None:
                self.task = self._loop.create_task(self._answer(request))
            elif not known and head.headers.get(b"expect", b"").lower() == b"100-continue":  # curl, from a megabyte on
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        except BadRequest as error:
            self._break(error.status, str(error))

    async def _answer(self, request: Request) -> None:
        try:
            response = await self._application.answer(request)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            what = "a fault of the server; its log has it"
            response = self._application.broken(HTTPStatus.INTERNAL_SERVER_ERROR, what, request)
        finally:
            self.task = None
        self._send(response, request, keep=request.keep_alive)

    def _break(self, status: HTTPStatus, what: str) -> None:
        self._send(self._application.broken(status, what), None, keep=False)

    def _send(self, response: Response, request: Request | None, *, keep: bool) -> None:
        """Write it, and go on, or wait for the caller to close."""
        if self._transport.is_closing():
            return
        self._since = self._loop.time()
        body = b"" if request is not None and request.method == "HEAD" else response.body
        self._transport.write(_head(response, keep) + body)
        if not keep:
            self._farewell = True
            self._transport.write_eof()
            self._resume()
        elif self._parser:
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        if self.task is None and not self._farewell and not self._transport.is_closing():
            self._resume()
            self._go_on()

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._transport.resume_reading()


def _head(response: Response, keep: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}",
        f"Content-Type: {response.content_type}",
        f"Content-Length: {len(response.body)}",
        f"Date: {_date(int(time.time()))}",
        *(f"{name}: {value}" for name, value in response.headers.items()),
    ]
    if not keep:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


@functools.lru_cache(maxsize=1)
def _date(second: int) -> str:
    return formatdate(second, usegmt=True)
