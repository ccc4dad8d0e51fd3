"""One HTTP/1.1 answer from the bytes of a connection. Pure. Framing follows RFC 9112, sections 6 and 7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_LONGEST_HEAD: Final = 64 * 2**10
"""Bytes of a status line and headers, and of a chunk's size line."""
_LONGEST_BODY: Final = 512 * 2**20
"""Bytes. A reply of a million tokens has about 45 MiB."""
_UNTIL_CLOSED: Final = -1


class BrokenAnswer(Exception):
    """The answer broke off, or is not HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    """By name in lower case; the last one of a name."""
    body: bytes
    reusable: bool
    """Whether the connection may carry another request."""


class AnswerParser:
    """Feed it what comes until it gives the answer; `begun` says whether anything came. One parser per answer."""

    def __init__(self) -> None:
        self._came = bytearray()
        self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body_at = self._body_end = 0
        self._chunks: _Chunks | None = None
        self._keep_alive = True
        self.begun = False

    def feed(self, data: bytes) -> Answer | None:
        """The answer once it is complete. Raises BrokenAnswer."""
        self.begun = True
        self._came += data
        if not self._status and not self._read_head():
            return None
        return self._read_body()

    def end(self) -> Answer:
        """The answer when the connection was closed, which may be how its end is told. Raises BrokenAnswer."""
        if self._status and self._chunks is None and self._body_end == _UNTIL_CLOSED:
            return self._answer(bytes(self._came[self._body_at :]), len(self._came))
        raise BrokenAnswer("the connection was closed in the middle of the answer")

    def _read_head(self) -> bool:
        """Read status and headers if they are all there, and find out where the body ends."""
        while (end := self._came.find(b"\r\n\r\n")) >= 0:
            status_line, *lines = bytes(self._came[:end]).split(b"\r\n")
            version, _, rest = status_line.partition(b" ")
            status = rest[:3]
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(status) != 3 or not status.isdigit():
                raise BrokenAnswer(f"the answer is not HTTP: {status_line[:80]!r}")
            if status[:1] == b"1":  # an interim answer; the real one follows
                del self._came[: end + 4]
                continue
            self._status, self._headers, self._body_at = int(status), _headers(lines), end + 4
            self._find_end()
            closes = self._headers.get(b"connection", b"").lower() == b"close"
            self._keep_alive = version == b"HTTP/1.1" and not closes and self._body_end != _UNTIL_CLOSED
            return True
        if len(self._came) > _LONGEST_HEAD:
            raise BrokenAnswer("the answer's head does not end")
        return False

    def _find_end(self) -> None:
        coding, length = self._headers.get(b"transfer-encoding"), self._headers.get(b"content-length")
        if self._status in (204, 304):
            self._body_end = self._body_at
        elif coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise BrokenAnswer(f"the answer has the transfer coding {coding[:80]!r} and the length {length!r:.80}")
            self._chunks = _Chunks(self._body_at)
        elif length is None:
            self._body_end = _UNTIL_CLOSED
        elif not length.isdigit() or len(length) > 12 or int(length) > _LONGEST_BODY:
            raise BrokenAnswer(f"the answer has the length {length[:80]!r}")
        else:
            self._body_end = self._body_at + int(length)

    def _read_body(self) -> Answer | None:
        came = self._came
        if self._chunks is not None:
            if self._chunks.read(came):
                return self._answer(b"".join(self._chunks.parts), self._chunks.at)
        elif self._body_end != _UNTIL_CLOSED and len(came) >= self._body_end:
            return self._answer(bytes(memoryview(came)[self._body_at : self._body_end]), self._body_end)
        if len(came) > 2 * _LONGEST_BODY:
            raise BrokenAnswer("the answer does not end")
        return None

    def _answer(self, body: bytes, end: int) -> Answer:
        # Bytes behind the answer belong to no request of ours: whatever follows could be taken for another's answer.
        return Answer(self._status, self._headers, body, self._keep_alive and len(self._came) == end)


def _headers(lines: list[bytes]) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        key = name.lower()
        if not colon or (key in headers and key in (b"content-length", b"transfer-encoding")):
            raise BrokenAnswer(f"the answer has the header {line[:80]!r}")
        headers[key] = value.strip()
    return headers


class _Chunks:
    """Reads the chunks of a body (RFC 9112, section 7.1), which begins at `at`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.parts: list[bytes] = []
        self._in_trailer = False

    def read(self, came: bytearray) -> bool:
        """Take the chunks that are there; True once the last one and its trailer were. `at` is then behind them."""
        while (line_end := came.find(b"\r\n", self.at)) >= 0:
            line = bytes(came[self.at : line_end])
            after = line_end + 2
            if self._in_trailer:
                self.at = after
                if not line:
                    return True
                continue
            size = _chunk_size(line)
            if size == 0:
                self._in_trailer, self.at = True, after
                continue
            end = after + size
            if len(came) < end + 2:
                return False
            if came[end : end + 2] != b"\r\n":
                raise BrokenAnswer("the answer has a chunk of the wrong size")
            self.parts.append(bytes(memoryview(came)[after:end]))
            self.at = end + 2
        if len(came) - self.at > _LONGEST_HEAD:
            raise BrokenAnswer("the answer has a chunk without a size")
        return False


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BrokenAnswer(f"the answer has a chunk of size {line[:80]!r}")
    return int(digits, 16)
