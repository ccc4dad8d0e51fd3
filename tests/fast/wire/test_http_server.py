"""Our HTTP server: requests in every division into pieces, nothing odd is read, callers that dawdle, leave or push."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus

import aiohttp
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.wire.http import server as server_module
from miles_verifiers.wire.http.requests import BadRequest, Request, RequestParser
from miles_verifiers.wire.http.server import HttpServer, Response

HEAD = b"POST /a HTTP/1.1\r\nHost: h\r\n"
LARGEST = 1000


def requests(raw: bytes, cuts: list[int] = []) -> list[Request]:  # noqa: B006 - never written to
    """The requests in `raw`, given in pieces."""
    parser = RequestParser(LARGEST)
    found = []
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    for start, end in itertools.pairwise(edges):
        parser.feed(raw[start:end])
        while parser.read_head() is not None and (request := parser.take()) is not None:
            found.append(request)
    return found


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x;e\r\n%s\r\n" % (len(part), part) for part in parts if part) + b"0\r\nX-T: y\r\n\r\n"


class TestParser:
    bodies = st.binary(max_size=60)
    cuts = st.lists(st.integers(0, 900), max_size=8)

    @given(st.lists(bodies | st.lists(bodies, max_size=3), max_size=4), cuts)
    def test_requests_one_behind_the_other(self, bodies: list[bytes | list[bytes]], cuts: list[int]) -> None:
        raw = b""
        for body in bodies:
            if isinstance(body, bytes):
                raw += HEAD + b"X-A:\t b \r\nContent-Length: %d\r\n\r\n" % len(body) + body
            else:
                raw += b"\r\n" + HEAD + b"Transfer-Encoding: Chunked\r\n\r\n" + chunked(body)
        found = requests(raw, cuts)
        assert [request.body for request in found] == [
            body if isinstance(body, bytes) else b"".join(body) for body in bodies
        ]
        assert all((request.method, request.path, request.keep_alive) == ("POST", "/a", True) for request in found)
        assert all(request.header(b"x-a") == "b" for request in found if request.length is not None)

    @pytest.mark.parametrize(
        ("head", "keeps"),
        [
            (b"GET / HTTP/1.1\r\nHost: h\r\n", True),
            (b"GET / HTTP/1.1\r\nHost: h\r\nConnection: Close\r\n", False),
            (b"GET / HTTP/1.0\r\n", False),
            (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n", True),
        ],
    )
    def test_what_may_carry_another_request(self, head: bytes, keeps: bool) -> None:
        (request,) = requests(head + b"\r\n")
        assert request.keep_alive is keeps

    @pytest.mark.parametrize(
        ("target", "path"),
        [
            (b"/a?b=c", "/a"),
            (b"/%ff", "/%ff"),
            (b"http://h/a?b", "/a"),
            (b"http://h", "/"),
            (b"*", "*"),
        ],
    )
    def test_paths(self, target: bytes, path: str) -> None:
        (request,) = requests(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target)
        assert request.path == path

    @pytest.mark.parametrize(
        ("raw", "status"),
        [
            (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),
            (b"GET /\r\n\r\n", 400),
            (b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
            (b"GET / HTTP/1.1 \r\nHost: h\r\n\r\n", 400),
            (b"G\xc3T / HTTP/1.1\r\nHost: h\r\n\r\n", 400),
            (b"GET http://[ HTTP/1.1\r\nHost: h\r\n\r\n", 400),
            (b"GET / HTTP/2\r\nHost: h\r\n\r\n", 505),
            (b"GET / HTTP/1.1\r\n\r\n", 400),
            (HEAD + b"no colon\r\n\r\n", 400),
            (HEAD + b"X : y\r\n\r\n", 400),
            (HEAD + b": y\r\n\r\n", 400),
            (HEAD + b"X: a\r\n folded\r\n\r\n", 400),
            (HEAD + b"X: a\nY: b\r\n\r\n", 400),
            (HEAD + b"X: a\rb\r\n\r\n", 400),
            (HEAD + b"X: a\0b\r\n\r\n", 400),
            (HEAD + b"Content-Length: -1\r\n\r\n", 400),
            (HEAD + b"Content-Length: +1\r\n\r\n", 400),
            (HEAD + b"Content-Length: 1, 1\r\n\r\n", 400),
            (HEAD + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400),
            (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n", 400),
            (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked([b"x" * 100_000]), 413),
            (HEAD + b"X: " + b"y" * 70_000, 431),
            (HEAD + b"X: " + b"y" * 70_000 + b"\r\n\r\n", 431),
        ],
    )
    def test_what_is_not_a_request(self, raw: bytes, status: int) -> None:
        with pytest.raises(BadRequest) as caught:
            requests(raw)
        assert caught.value.status == status

    @given(st.binary(max_size=200), cuts)
    def test_whatever_comes_only_a_bad_request_comes_out(self, raw: bytes, cuts: list[int]) -> None:
        for candidate in (raw, HEAD + raw, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + raw):
            with contextlib.suppress(BadRequest):
                requests(candidate, cuts)


class Echo:
    """An application that answers with the body, when `may_answer` lets it."""

    def __init__(self) -> None:
        self.may_answer: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
        self.answered = 0
        self.cancelled = 0

    def refuse(self, request: Request) -> Response | None:
        return Response(403, b"refused") if request.path == "/refused" else None

    async def answer(self, request: Request) -> Response:
        if request.path == "/fault":
            raise ZeroDivisionError
        try:
            await self.may_answer()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.answered += 1
        return Response(200, request.body, {"X-Path": request.path}, "text/plain")

    def broken(self, status: HTTPStatus, what: str, request: Request | None = None) -> Response:
        return Response(status, what.encode())


class Caller:
    """A connection by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, raw: bytes) -> None:
        self.writer.write(raw)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode()
        first, *lines = head.rstrip().split("\r\n")
        assert first.startswith("HTTP/1.1 ")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(first.split()[1]), headers, await self.reader.readexactly(int(headers.get("Content-Length", 0)))

    async def is_closed(self) -> bool:
        return await asyncio.wait_for(self.reader.read(), 5) == b""


@pytest.fixture
def echo() -> Echo:
    return Echo()


@asynccontextmanager
async def serving(echo: Echo, read_timeout: float = 5.0) -> AsyncIterator[int]:
    server = HttpServer(echo, largest_body=LARGEST, read_timeout=read_timeout)
    _, port = await server.open("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close(grace=0.1)


@asynccontextmanager
async def caller(port: int) -> AsyncIterator[Caller]:
    made = Caller(*await asyncio.open_connection("127.0.0.1", port))
    try:
        yield made
    finally:
        made.writer.transport.abort()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - nothing here sets an event
            await asyncio.sleep(0.005)


def post(body: bytes, path: bytes = b"/a") -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % (path, len(body)) + body


async def test_the_answer_byte_for_byte(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module.time, "time", lambda: 0.0)
    async with serving(echo) as port, caller(port) as one:
        one.send(post(b"abc"))
        assert await one.reader.readuntil(b"abc") == (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nDate: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
            b"X-Path: /a\r\n\r\nabc"
        )


async def test_requests_that_come_together_are_answered_in_turn(echo: Echo) -> None:
    async with serving(echo) as port, caller(port) as one:
        one.send(b"".join(post(b"%d" % i) for i in range(200)) + post(b"last", b"/refused"))
        assert [(await one.answer())[2] for _ in range(200)] == [b"%d" % i for i in range(200)]
        assert (await one.answer())[0] == 403
        one.send(post(b"again"))
        assert (await one.answer())[2] == b"again"


async def test_requests_before_their_turn_wait_at_the_callers_end(echo: Echo) -> None:
    gate = asyncio.Event()
    echo.may_answer = gate.wait
    async with serving(echo) as port, caller(port) as one:
        requests = [post(b"x" * 900) for _ in range(8000)]  # more than the sockets take
        one.send(b"".join(requests))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.writer.drain(), 0.2)
        gate.set()
        for _ in requests:
            assert (await one.answer())[0] == 200


async def test_head_has_no_body(echo: Echo) -> None:
    async with serving(echo) as port, caller(port) as one:
        one.send(b"HEAD /refused HTTP/1.1\r\nHost: h\r\n\r\n" + post(b"abc"))
        head = await one.reader.readuntil(b"\r\n\r\n")
        assert b" 403 " in head
        assert b"Content-Length: 7" in head
        assert (await one.answer())[2] == b"abc"


@pytest.mark.parametrize(
    "raw", [b"?\r\n\r\n", post(b"ab").replace(b"2", b"x"), post(b"")[:-4] + b"\r\nConnection: close\r\n\r\n"]
)
async def test_after_a_last_answer_the_connection_ends(echo: Echo, raw: bytes) -> None:
    async with serving(echo) as port, caller(port) as one:
        one.send(raw + post(b"more"))
        status, headers, _ = await one.answer()
        assert status == (200 if b"close" in raw else 400)
        assert headers["Connection"] == "close"
        one.send(post(b"later"))
        assert await one.is_closed()
        await asyncio.sleep(0.02)
        assert echo.answered == (1 if b"close" in raw else 0)


async def test_a_refused_body_does_not_take_the_answer_along(echo: Echo) -> None:
    """A connection that is closed while its caller still sends is reset, and the answer is lost to it."""
    async with serving(echo) as port, caller(port) as one:
        one.send(b"POST /refused HTTP/1.1\r\nHost: h\r\nContent-Length: 50000000\r\n\r\n")
        for _ in range(20):
            one.send(b"x" * 1_000_000)
            await one.writer.drain()
        assert (await one.answer())[0] == 403
        assert await one.is_closed()


async def test_a_fault_is_answered(echo: Echo, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(echo) as port, caller(port) as one:
        one.send(post(b"", b"/fault") + post(b"next"))
        assert (await one.answer())[0] == 500
        assert (await one.answer())[2] == b"next"
    assert "ZeroDivisionError" in caplog.text


async def test_a_caller_that_goes_away_cancels(echo: Echo) -> None:
    echo.may_answer = asyncio.Event().wait
    async with serving(echo) as port:
        async with caller(port) as one:
            one.send(post(b""))
            await asyncio.sleep(0.05)
        await until(lambda: echo.cancelled == 1)


@pytest.mark.parametrize("half", [b"P", post(b"abc")[:-1], post(b"x") + b"P"])
async def test_half_a_request_has_a_deadline(echo: Echo, half: bytes) -> None:
    async with serving(echo, read_timeout=0.1) as port, caller(port) as one:
        one.send(half)
        if half.startswith(post(b"x")):
            assert (await one.answer())[0] == 200
        status, headers, _ = await one.answer()
        assert (status, headers["Connection"]) == (408, "close")


async def test_one_that_answers_slowly_is_not_hurried(echo: Echo) -> None:
    echo.may_answer = lambda: asyncio.sleep(0.4)
    async with serving(echo, read_timeout=0.1) as port, caller(port) as one:
        one.send(post(b"abc"))
        assert (await one.answer())[2] == b"abc"


async def test_rest_has_an_end(echo: Echo, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(echo, read_timeout=0.1) as port, caller(port) as one:
        one.send(post(b"abc"))
        await one.answer()
        await asyncio.sleep(0.3)
        one.send(post(b"def"))
        assert (await one.answer())[2] == b"def"
        monkeypatch.setattr(server_module, "_LONGEST_REST", 0.1)
        assert await one.is_closed()


async def test_a_caller_that_does_not_read_is_left(echo: Echo) -> None:
    server = HttpServer(echo, largest_body=30_000_000, read_timeout=0.2)
    _, port = await server.open("127.0.0.1", 0)
    async with caller(port) as one:
        one.reader._transport.pause_reading()  # type: ignore[attr-defined]
        one.send(post(b"x" * 20_000_000))
        await until(lambda: echo.answered == 1)
        assert len(server.connections) == 1
        await until(lambda: not server.connections)
    await server.close(grace=0.1)


async def test_what_is_being_answered_may_end_before_it_closes(echo: Echo) -> None:
    echo.may_answer = lambda: asyncio.sleep(0.05)
    server = HttpServer(echo, largest_body=LARGEST, read_timeout=5)
    _, port = await server.open("127.0.0.1", 0)
    async with caller(port) as one, caller(port) as other:
        one.send(post(b"abc"))
        await asyncio.sleep(0.02)
        await server.close(grace=2.0)
        assert (await one.answer())[2] == b"abc"
        assert await one.is_closed()
        assert await other.is_closed()
    with pytest.raises(OSError, match="Connect"):
        await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("size", [0, 1, 70_000, 900_000])
async def test_against_the_clients_in_use(echo: Echo, size: int) -> None:
    """aiohttp's, and httpx, which openai's client is made of."""
    body = bytes(range(256)) * (size // 256 + 1)
    server = HttpServer(echo, largest_body=size + 300, read_timeout=5)
    _, port = await server.open("127.0.0.1", 0)
    url = f"http://127.0.0.1:{port}/a"

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 50_000):
            yield body[at : at + 50_000]

    async with aiohttp.ClientSession() as session:
        for data in (body, pieces(), body):
            async with session.post(url, data=data) as response:
                assert await response.read() == body
    async with httpx.AsyncClient() as client:
        for content in (body, pieces(), body):
            assert (await client.post(url, content=content)).content == body
    await server.close(grace=0.1)
