"""What requests and answers share in HTTP/1.1: headers, lengths and chunks. Pure. RFC 9112, sections 5 to 7."""

from __future__ import annotations

from typing import Final

LONGEST_HEAD: Final = 64 * 2**10
"""Bytes of a first line and headers, and of a chunk's size line."""
_OF_TOKENS: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
"""RFC 9110, section 5.6.2; in lower case."""


class BadFraming(Exception):
    """Bytes that are not HTTP; the text says what they have: "the header b'...'"."""


def headers(lines: list[bytes]) -> dict[bytes, bytes]:
    """By name in lower case; the last one of a name. Raises BadFraming, also for a second length."""
    found: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        key = name.lower()
        # Two readers that take an odd header differently see different messages in the same bytes: nothing odd is read at all.
        twice = key in found and key in (b"content-length", b"transfer-encoding")
        if not colon or not key or key.translate(None, _OF_TOKENS) or twice:
            raise BadFraming(f"the header {line[:80]!r}")
        found[key] = value.strip(b" \t")
    return found


def split_head(head: bytes) -> list[bytes]:
    """The lines of `head`, which ends before the empty one. Raises BadFraming for a line end that is half of one."""
    lines = head.split(b"\r\n")
    ends = len(lines) - 1
    if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
        raise BadFraming("a control character in its head")
    return lines


def body_length(value: bytes, largest: int) -> int:
    """What Content-Length says. Raises BadFraming for anything but digits, and for more than `largest`."""
    if not value.isdigit() or len(value) > 12 or int(value) > largest:
        raise BadFraming(f"the length {value[:80]!r}")
    return int(value)


class Chunks:
    """Reads the chunks of a body (RFC 9112, section 7.1), which begins at `at`."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.parts: list[bytes] = []
        self._in_trailer = False

    def read(self, came: bytearray) -> bool:
        """Take the chunks that are there; True once the last one and its trailer were. `at` is then behind them.

        Raises BadFraming.
        """
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
                raise BadFraming("a chunk of the wrong size")
            self.parts.append(bytes(memoryview(came)[after:end]))
            self.at = end + 2
        if len(came) - self.at > LONGEST_HEAD:
            raise BadFraming("a chunk without a size")
        return False


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip(b" \t")
    if not digits or len(digits) > 8 or digits.strip(b"0123456789abcdefABCDEF"):
        raise BadFraming(f"a chunk of size {line[:80]!r}")
    return int(digits, 16)
