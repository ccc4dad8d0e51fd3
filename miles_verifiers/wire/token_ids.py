"""Lists of token ids as JSON text, so that a prompt is looked at, and written, once. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from miles_verifiers.wire.scan import integers

_KEY = b'"token_ids":['
"""Quotes within a JSON string are escaped: these bytes are never part of a text."""
PLACEHOLDER = f"list {uuid.uuid4().hex}"
"""Stands where a list stood while the rest is parsed, so that it is known where that was. Nobody knows it beforehand."""
PLACEHOLDER_JSON = orjson.dumps(PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """Integers from 0 on."""

    json: bytes
    """With its brackets."""
    count: int
    largest: int
    """-1 where there are none."""

    def __len__(self) -> int:
        return self.count

    def as_list(self) -> list[int]:
        ids: list[int] = orjson.loads(self.json)
        return ids

    @classmethod
    def of(cls, ids: Sequence[Any]) -> Self | None:
        """None if not all of them are integers from 0 on.

        The encoder looks at every element anyway, and its text shows what they are: to check each one's type costs more.
        """
        try:
            json = orjson.dumps(ids if type(ids) is list else list(ids))
        except TypeError:
            return None
        found = integers(json, 0)
        return cls(json, *found[1:]) if found is not None and found[0] == len(json) else None


def parsed_request(raw: bytes) -> Any:
    """What the JSON `raw` says, with TokenIds for `token_ids` where they can be had. Raises orjson.JSONDecodeError."""
    start = raw.find(_KEY) + len(_KEY) - 1
    found = integers(raw, start) if start >= len(_KEY) - 1 else None
    if found is None:
        return orjson.loads(raw)
    end, count, largest = found
    body = parsed_with_placeholders(b"%b%b%b" % (raw[:start], PLACEHOLDER_JSON, raw[end:]), raw)
    if not isinstance(body, dict) or body.get("token_ids") != PLACEHOLDER:
        return orjson.loads(raw)
    body["token_ids"] = TokenIds(raw[start:end], count, largest)
    return body


def parsed_with_placeholders(text: bytes, raw: bytes) -> Any:
    """What `text` says, which is `raw` but for its placeholders. Raises orjson.JSONDecodeError, with the place in `raw`."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(raw)


def first_outside(ids: Sequence[Any], vocab_size: int) -> tuple[int, Any]:
    """Position and value of the first of `ids` that is no integer in [0, vocab_size); there is one."""
    return next((at, token) for at, token in enumerate(ids) if type(token) is not int or not 0 <= token < vocab_size)
