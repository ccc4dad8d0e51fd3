"""Our HTTP: every framing in every division into pieces, only our errors for anything else, connections kept and dropped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.errors import ConfigError
from miles_verifiers.wire.http.answers import Answer, AnswerParser, BrokenAnswer
from miles_verifiers.wire.http.connections import Connections, FirstByteLate, NoAnswer, Origin

OK = b"HTTP/1.1 200 OK\r\n"


def chunked(parts: list[bytes]) -> bytes:
    framed = b"".join(b"%X;ext=1\r\n%s\r\n" % (len(part), part) for part in parts if part)
    return OK + b"Transfer-Encoding: chunked\r\n\r\n" + framed + b"0\r\nX-Trailer: y\r\n\r\n"


def fed(raw: bytes, cuts: list[int], closed: bool = False) -> Answer | None:
    """The answer that `raw` makes, given in pieces."""
    parser = AnswerParser()
    edges = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    answer = None
    for start, end in itertools.pairwise(edges):
        if end > start:
            assert answer is None, "an answer before its last piece"
            answer = parser.feed(raw[start:end])
    return parser.end() if closed else answer


class TestParser:
    bodies = st.binary(max_size=60)
    cuts = st.lists(st.integers(0, 400), max_size=6)

    @given(bodies, cuts)
    def test_a_length(self, body: bytes, cuts: list[int]) -> None:
        raw = OK + b"X-A:  b \r\nContent-Length: %d\r\n\r\n" % len(body) + body
        answer = fed(raw, cuts)
        assert answer == Answer(200, {b"x-a": b"b", b"content-length": b"%d" % len(body)}, body, True)

    @given(st.lists(bodies, max_size=4), cuts)
    def test_chunks(self, parts: list[bytes], cuts: list[int]) -> None:
        answer = fed(chunked(parts), cuts)
        assert answer is not None
        assert (answer.body, answer.reusable) == (b"".join(parts), True)

    @given(bodies, cuts)
    def test_until_closed(self, body: bytes, cuts: list[int]) -> None:
        answer = fed(OK + b"X-A: b\r\n\r\n" + body, cuts, closed=True)
        assert answer is not None
        assert (answer.body, answer.reusable) == (body, False)

    @given(bodies, cuts)
    def test_an_interim_answer_is_passed_over(self, body: bytes, cuts: list[int]) -> None:
        raw = b"HTTP/1.1 100 Continue\r\n\r\n" + b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        answer = fed(raw, cuts)
        assert answer is not None
        assert (answer.status, answer.body) == (503, body)

    @given(st.sampled_from([OK + b"Content-Length: 9\r\n\r\nabcdefghi", chunked([b"abc", b"defg"])]), st.data())
    def test_half_an_answer_is_broken(self, raw: bytes, data: st.DataObject) -> None:
        half = raw[: data.draw(st.integers(1, len(raw) - 1))]
        with pytest.raises(BrokenAnswer, match="in the middle"):
            fed(half, [], closed=True)

    @given(st.binary(max_size=200), cuts)
    def test_whatever_comes_only_a_broken_answer_comes_out(self, raw: bytes, cuts: list[int]) -> None:
        for candidate in (raw, OK + raw, OK + b"Transfer-Encoding: chunked\r\n\r\n" + raw):
            parser = AnswerParser()
            try:
                answer = parser.feed(candidate) or parser.end()
            except BrokenAnswer:
                continue
            assert answer.status in range(200, 1000)

    @pytest.mark.parametrize(
        "head",
        [
            b"SSH-2.0-OpenSSH\r\n\r\n",
            b"HTTP/2 200\r\n\r\n",
            b"HTTP/1.1 2x0 OK\r\n\r\n",
            OK + b"no colon\r\n\r\n",
            OK + b"Content-Length: -1\r\n\r\n",
            OK + b"Content-Length: 1e3\r\n\r\n",
            OK + b"Content-Length: 99999999999999\r\n\r\n",
            OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
            OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            OK + b"Transfer-Encoding: gzip\r\n\r\n",
            OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
            OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nab\r\n",
            OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 70_000,
            OK + b"X: " + b"y" * 70_000,
        ],
    )
    def test_what_is_not_http(self, head: bytes) -> None:
        with pytest.raises(BrokenAnswer):
            AnswerParser().feed(head)

    @pytest.mark.parametrize(
        ("raw", "reusable"),
        [
            (OK + b"Content-Length: 1\r\n\r\na", True),
            (OK + b"Content-Length: 1\r\nConnection: Close\r\n\r\na", False),
            (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\na", False),
            (OK + b"Content-Length: 1\r\n\r\nab", False),
            (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        ],
    )
    def test_what_may_carry_another_request(self, raw: bytes, reusable: bool) -> None:
        answer = AnswerParser().feed(raw)
        assert answer is not None
        assert answer.reusable is reusable


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h:30000", Origin("h", 30000, False, "h:30000", "")),
        ("https://h/engine/", Origin("h", 443, True, "h", "/engine")),
        ("http://[::1]:8", Origin("::1", 8, False, "[::1]:8", "")),
    ],
)
def test_origins(url: str, origin: Origin) -> None:
    assert Origin.of(url) == origin


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:30000",
        "ftp://h",
        "http://",
        "http://h:x",
        "http://h:99999",
        "http://u:p@h",
        "http://h\r\nX: y",
        "http://h?a",
    ],
)
def test_urls_that_are_no_engines(url: str) -> None:
    with pytest.raises(ConfigError, match="is not the URL of an engine"):
        Origin.of(url)


@asynccontextmanager
async def talker(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any],
) -> AsyncIterator[tuple[Origin, list]]:
    """A server that speaks by hand, and the connections that it got."""
    came: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(writer)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Origin.of(f"http://127.0.0.1:{port}"), came
    server.close()
    for writer in came:
        writer.transport.abort()
    await asyncio.sleep(0.01)  # transports close their sockets in the next round of the loop


async def request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head + await reader.readexactly(length)


@pytest.fixture
async def connections() -> AsyncIterator[Connections]:
    made = Connections(connect_timeout=2.0)
    yield made
    made.close()
    await asyncio.sleep(0)


async def test_the_request_byte_for_byte(connections: Connections) -> None:
    got = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await request(reader))
        writer.write(OK + b"Content-Length: 2\r\n\r\n{}")

    async with talker(talk) as (origin, _):
        answer = await connections.post(origin, "/generate", b'{"a":1}', "X-Key: s\r\n")
    assert (answer.status, answer.body) == (200, b"{}")
    assert got == [
        b"POST /generate HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: 7\r\nX-Key: s\r\n\r\n"
        b'{"a":1}' % origin.authority.encode()
    ]


async def test_a_connection_is_kept_and_a_closed_one_is_not(connections: Connections) -> None:
    async def twice(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await request(reader)
            writer.write(OK + b"Content-Length: 1\r\n\r\na")

    async with talker(twice) as (origin, came):
        for expected in (1, 1, 2, 2):
            assert (await connections.post(origin, "/", b"")).body == b"a"
            await asyncio.sleep(0.02)  # the server's end arrives
            assert len(came) == expected


async def test_an_old_connection_is_not_used(connections: Connections, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(OK + b"Content-Length: 1\r\n\r\na")

    async with talker(forever) as (origin, came):
        await connections.post(origin, "/", b"")
        await connections.post(origin, "/", b"")
        assert len(came) == 1
        monkeypatch.setattr("miles_verifiers.wire.http.connections._LONGEST_REST", -1.0)
        await connections.post(origin, "/", b"")
        assert len(came) == 2


async def test_bytes_that_nobody_asked_for_end_the_connection(connections: Connections) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"Content-Length: 1\r\n\r\na")
        await asyncio.sleep(0.02)
        writer.write(OK + b"Content-Length: 1\r\n\r\nb")
        await reader.read()

    async with talker(talk) as (origin, came):
        assert (await connections.post(origin, "/", b"")).body == b"a"
        await asyncio.sleep(0.05)
        assert (await connections.post(origin, "/", b"")).body == b"a"
        assert len(came) == 2


@pytest.mark.parametrize(
    ("says", "error"),
    [
        (b"", NoAnswer),
        (b"H", BrokenAnswer),
        (OK + b"Content-Length: 5\r\n\r\nab", BrokenAnswer),
        (b"?\r\n\r\n", BrokenAnswer),
    ],
)
async def test_a_connection_that_ends(connections: Connections, says: bytes, error: type[Exception]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(says)

    async with talker(talk) as (origin, _):
        with pytest.raises(error):
            await connections.post(origin, "/", b"")


async def test_an_answer_that_ends_with_the_connection(connections: Connections) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"\r\nall of it")

    async with talker(talk) as (origin, _):
        assert (await connections.post(origin, "/", b"")).body == b"all of it"


async def test_the_first_byte_has_a_deadline_and_the_rest_does_not(connections: Connections) -> None:
    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = await request(reader)
        if body.endswith(b"slow end"):
            writer.write(b"H")
            await asyncio.sleep(0.3)
            writer.write(OK[1:] + b"Content-Length: 1\r\n\r\na")
        else:
            await asyncio.sleep(5)

    async with talker(late) as (origin, _):
        with pytest.raises(FirstByteLate):
            await connections.post(origin, "/", b"slow start", first_byte=0.1)
        assert (await connections.post(origin, "/", b"slow end", first_byte=0.2)).body == b"a"


async def test_a_cancelled_request_closes_its_connection(connections: Connections) -> None:
    closed = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        assert await reader.read() == b""
        closed.set()

    async with talker(talk) as (origin, came):
        asking = asyncio.create_task(connections.post(origin, "/", b""))
        while not came:  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        asking.cancel()
        await asyncio.wait_for(closed.wait(), 2)


async def test_nobody_listens(connections: Connections) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)

    async with talker(talk) as (origin, _):
        pass
    for url in (f"http://{origin.authority}", "http://no-such-host.invalid", f"http://{'x' * 70}.invalid"):
        with pytest.raises(NoAnswer, match="no connection"):
            await connections.post(Origin.of(url), "/", b"")


# Made for this test, of an engine that does not exist; `openssl req -x509 -newkey ec ... -days 36500`.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBojCCAUigAwIBAgIUDv2LP8c1pvZ45metCcswmnhxQMIwCgYIKoZIzj0EAwIw
GTEXMBUGA1UEAwwOZW5naW5lLmV4YW1wbGUwIBcNMjYxMTMwMDQxNzM0WhgPMjEy
NjExMDYwNDE3MzRaMBkxFzAVBgNVBAMMDmVuZ2luZS5leGFtcGxlMFkwEwYHKoZI
zj0CAQYIKoZIzj0DAQcDQgAE+SxmCc8bYOKPyQqaGdqEisZTMOosAcILd3HVn3+c
YTZ3tW//KP0kZg78u7s4o2gZ7ZQ6u6lIac1tGa3lknlIgqNsMGowHQYDVR0OBBYE
FFhONpWYigYPltKv32DfCD7RtJ8aMB8GA1UdIwQYMBaAFFhONpWYigYPltKv32Df
CD7RtJ8aMBoGA1UdEQQTMBGCCWxvY2FsaG9zdIcEfwAAATAMBgNVHRMBAf8EAjAA
MAoGCCqGSM49BAMCA0gAMEUCIQDg389ihMDCTaQ1N2CnvVnJ9ZSQ0u7pUjHu4Pzb
tUmMwQIgFwcxK+2HQ4/BXXLC3MPn2G4nqHvTaP8HE01XDQ9OAAM=
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQglrS54Chk/YjzsJ2z
+NDRrz8ybyPkoUtoj83eoTzQ2xWhRANCAAT5LGYJzxtg4o/JCpoZ2oSKxlMw6iwB
wgt3cdWff5xhNne1b/8o/SRmDvy7uzijaBntlDq7qUhpzW0ZreWSeUiC
-----END PRIVATE KEY-----
"""


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_tls(connections: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_trusted: bool) -> None:
    files = {"cert.pem": CERTIFICATE, "key.pem": KEY, "other.pem": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="ascii")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / ("cert.pem" if is_trusted else "other.pem")))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(OK + b"Content-Length: 1\r\n\r\na")
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    origin = Origin.of(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    if is_trusted:
        assert (await connections.post(origin, "/", b"")).body == b"a"
    else:
        with pytest.raises(NoAnswer, match="certificate"):
            await connections.post(origin, "/", b"")
    server.close()
    connections.close()
    await asyncio.sleep(0.05)


async def test_tls_that_is_none(connections: Connections) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)

    async with talker(talk) as (origin, _):
        with pytest.raises(NoAnswer, match="no connection"):
            await connections.post(Origin.of(f"https://{origin.authority}"), "/", b"")


@pytest.mark.parametrize("chunks", [False, True])
@pytest.mark.parametrize("size", [0, 1, 70_000, 3_000_000])
async def test_against_aiohttps_server(connections: Connections, chunks: bool, size: int) -> None:
    async def echo(http: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if chunks:
            response.enable_chunked_encoding()
        else:
            response.content_length = size
        await response.prepare(http)
        body = await http.content.read()  # read() stops at a megabyte
        for at in range(0, size, 50_000):
            await response.write(body[at : at + 50_000])
        return response

    runner = web.ServerRunner(web.Server(echo))  # type: ignore[arg-type]
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    origin = Origin.of(f"http://127.0.0.1:{runner.addresses[0][1]}")
    body = bytes(range(256)) * (size // 256 + 1)
    for _ in range(3):
        assert (await connections.post(origin, "/", body[:size])).body == body[:size]
    await runner.cleanup()
