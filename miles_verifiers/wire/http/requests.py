"""HTTP/1.1 requests from the bytes of a connection. Pure. RFC 9112, sections 3, 6, 7 and 9."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

from miles_verifiers.wire.http.framing import LONGEST_HEAD, BadFraming, Chunks, body_length, headers, split_head

_MOST: Final = 2**40
"""Bytes of a body as far as its head may say; the limit is the server's."""


class BadRequest(Exception):
    """Bytes that are not a request. After them nothing on the connection can be read."""

    def __init__(self, status: HTTPStatus, what: str) -> None:
        super().__init__(what)
        self.status = status


@dataclass(slots=True)
class Request:
    method: str
    path: str
    """As it was sent, without the query."""
    headers: dict[bytes, bytes]
    """By name in lower case; the last one of a name."""
    keep_alive: bool
    """Whether the connection may carry another request."""
    length: int | None
    """Bytes of the body, as its head says; None where it comes in chunks."""
    body: bytes = b""

    def header(self, name: bytes) -> str:
        """Its text; what is no UTF-8 in it is kept as lone surrogates. Empty where there is none."""
        return self.headers.get(name, b"").decode("utf-8", "surrogateescape")


class RequestParser:
    """Feed it what comes, and take the requests out.

    `request` is the one that is being read, once its head is complete; `take` gives it when its body is, too.
    """

    def __init__(self, largest_body: int) -> None:
        self._came = bytearray()
        self._largest_body = largest_body
        self._body_at = 0
        self._chunks: Chunks | None = None
        self.request: Request | None = None

    def __len__(self) -> int:
        """Bytes that came and were not taken."""
        return len(self._came)

    def feed(self, data: bytes) -> None:
        self._came += data

    def read_head(self) -> Request | None:
        """The head of the next request, if it is there; its body may not be. Raises BadRequest."""
        if self.request is not None:
            return self.request
        while self._came.startswith(b"\r\n"):  # some clients end a body with one too many (RFC 9112, section 2.2)
            del self._came[:2]
        end = self._came.find(b"\r\n\r\n")
        if end > LONGEST_HEAD or (end < 0 and len(self._came) > LONGEST_HEAD):
            raise BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request's head is too long")
        if end < 0:
            return None
        try:
            first, *lines = split_head(bytes(self._came[:end]))
            request = _request(first, headers(lines))
        except BadFraming as error:
            raise BadRequest(HTTPStatus.BAD_REQUEST, f"the request has {error}") from None
        self._body_at = end + 4
        self._chunks = Chunks(self._body_at) if request.length is None else None
        self.request = request
        return request

    def take(self) -> Request | None:
        """The request whose head was read, if its body is complete. Raises BadRequest."""
        request = self.request
        if request is None:
            return None
        if self._chunks is not None:
            end = self._read_chunks(self._chunks)
            if end is None:
                return None
            request.body = b"".join(self._chunks.parts)
        else:
            end = self._body_at + (request.length or 0)
            if len(self._came) < end:
                return None
            request.body = bytes(memoryview(self._came)[self._body_at : end])
        del self._came[:end]
        self.request = self._chunks = None
        return request

    def _read_chunks(self, chunks: Chunks) -> int | None:
        try:
            whole = chunks.read(self._came)
        except BadFraming as error:
            raise BadRequest(HTTPStatus.BAD_REQUEST, f"the request has {error}") from None
        if len(self._came) - self._body_at > self._largest_body + LONGEST_HEAD:
            raise BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is over {self._largest_body} bytes")
        return chunks.at if whole else None


def _request(first_line: bytes, found: dict[bytes, bytes]) -> Request:
    parts = first_line.split(b" ")
    if len(parts) != 3 or not parts[0].isalpha() or not first_line.isascii() or not parts[1]:
        raise BadRequest(HTTPStatus.BAD_REQUEST, f"the request is not HTTP: {first_line[:80]!r}")
    method, target, version = (part.decode("ascii") for part in parts)
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, f"the request is of {version[:20]!r}, not HTTP/1.1")
    if version == "HTTP/1.1" and b"host" not in found:
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the request has no Host")
    connection = found.get(b"connection", b"").lower()
    keeps = b"close" not in connection and (version == "HTTP/1.1" or b"keep-alive" in connection)
    return Request(method, _path(target), found, keeps, _length(found, version))


def _path(target: str) -> str:
    if not target.startswith("/"):  # as proxies send it: http://host/path
        try:
            target = urlsplit(target).path or "/"
        except ValueError:
            raise BadRequest(HTTPStatus.BAD_REQUEST, f"the request is to {target[:80]!r}") from None
    return target.partition("?")[0]


def _length(found: dict[bytes, bytes], version: str) -> int | None:
    coding, length = found.get(b"transfer-encoding"), found.get(b"content-length")
    if coding is None:
        return body_length(length, _MOST) if length is not None else 0
    if length is not None or version == "HTTP/1.0":
        raise BadRequest(HTTPStatus.BAD_REQUEST, "the request has a transfer coding, and a length or an old version")
    if coding.lower() != b"chunked":
        raise BadRequest(HTTPStatus.NOT_IMPLEMENTED, f"the request has the transfer coding {coding[:80]!r}")
    return None
