"""One HTTP/1.1 answer from the bytes of a connection. Pure. Framing follows RFC 9112, sections 6 and 7."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from miles_verifiers.wire.http.framing import LONGEST_HEAD, BadFraming, Chunks, body_length, headers, split_head

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
        self._chunks: Chunks | None = None
        self._keep_alive = True
        self.begun = False

    def feed(self, data: bytes) -> Answer | None:
        """The answer once it is complete. Raises BrokenAnswer."""
        self.begun = True
        self._came += data
        try:
            if not self._status and not self._read_head():
                return None
            return self._read_body()
        except BadFraming as error:
            raise BrokenAnswer(f"the answer has {error}") from None

    def end(self) -> Answer:
        """The answer when the connection was closed, which may be how its end is told. Raises BrokenAnswer."""
        if self._status and self._chunks is None and self._body_end == _UNTIL_CLOSED:
            return self._answer(bytes(self._came[self._body_at :]), len(self._came))
        raise BrokenAnswer("the connection was closed in the middle of the answer")

    def _read_head(self) -> bool:
        """Read status and headers if they are all there, and find out where the body ends."""
        while (end := self._came.find(b"\r\n\r\n")) >= 0:
            status_line, *lines = split_head(bytes(self._came[:end]))
            version, _, rest = status_line.partition(b" ")
            status = rest[:3]
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(status) != 3 or not status.isdigit():
                raise BrokenAnswer(f"the answer is not HTTP: {status_line[:80]!r}")
            if status[:1] == b"1":  # an interim answer; the real one follows
                del self._came[: end + 4]
                continue
            self._status, self._headers, self._body_at = int(status), headers(lines), end + 4
            self._find_end()
            closes = self._headers.get(b"connection", b"").lower() == b"close"
            self._keep_alive = version == b"HTTP/1.1" and not closes and self._body_end != _UNTIL_CLOSED
            return True
        if len(self._came) > LONGEST_HEAD:
            raise BrokenAnswer("the answer's head does not end")
        return False

    def _find_end(self) -> None:
        coding, length = self._headers.get(b"transfer-encoding"), self._headers.get(b"content-length")
        if self._status in (204, 304):
            self._body_end = self._body_at
        elif coding is not None:
            if coding.lower() != b"chunked" or length is not None:
                raise BrokenAnswer(f"the answer has the transfer coding {coding[:80]!r} and the length {length!r:.80}")
            self._chunks = Chunks(self._body_at)
        elif length is None:
            self._body_end = _UNTIL_CLOSED
        else:
            self._body_end = self._body_at + body_length(length, _LONGEST_BODY)

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
