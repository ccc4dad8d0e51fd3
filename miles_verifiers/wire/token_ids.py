"""Lists of token ids beside their JSON, so that a prompt is looked at, and written, once. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

_KEY = b'"token_ids":['
"""Quotes within a JSON string are escaped: these bytes are never part of a text."""
_OF_INTEGERS = b"0123456789,"
"""What a JSON list of them holds between its brackets."""
PLACEHOLDER = f"list {uuid.uuid4().hex}"
"""Stands where a list stood while the rest is parsed, so that it is known where that was. Nobody else can say it."""
PLACEHOLDER_JSON = orjson.dumps(PLACEHOLDER)


class TokenIds(list[int]):
    """[N] integers from 0 on, with their JSON, which would else be made once to look at them and once more to send them."""

    __slots__ = ("json",)

    def __init__(self, ids: Iterable[int], json: bytes) -> None:
        super().__init__(ids)
        self.json = json
        """Between its brackets."""


def parsed_request(raw: bytes) -> Any:
    """What the JSON `raw` says, with TokenIds for `token_ids` where they can be had. Raises orjson.JSONDecodeError."""
    start = raw.find(_KEY) + len(_KEY)
    end = raw.find(b"]", start)
    inner = raw[start:end]
    if start < len(_KEY) or end < 0 or inner.translate(None, _OF_INTEGERS):
        return orjson.loads(raw)
    body = orjson.loads(b"%b%b%b" % (raw[: start - 1], PLACEHOLDER_JSON, raw[end + 1 :]))
    if not isinstance(body, dict) or body.get("token_ids") != PLACEHOLDER:
        return orjson.loads(raw)
    body["token_ids"] = TokenIds(orjson.loads(b"[%b]" % inner), inner)
    return body


def integers_json(ids: Sequence[Any]) -> bytes | None:
    """`ids` as JSON between its brackets, or None if not all of them are integers from 0 on.

    The encoder looks at every element anyway, and its text shows what they are: a type check of each costs three times as much.
    """
    try:
        inner = orjson.dumps(ids)[1:-1]
    except TypeError:
        return None
    return None if inner.translate(None, _OF_INTEGERS) else inner
