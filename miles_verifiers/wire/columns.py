"""SGLang's reply parsed without an object per token. Pure.

Nine tenths of a reply are `output_token_logprobs`, [[log-prob, id, null], ...]. Parsed as it stands it is a list and two numbers
for every token, from which the same text is made again for renderers: most of what a reply costs. Where the engine wrote it
as JSON encoders do, without spaces, its two columns are parsed as one flat list, and renderers' form of it is the same
text with other things between its numbers. Anything else is parsed as usual; the checks are the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from miles_verifiers.wire.token_ids import PLACEHOLDER, PLACEHOLDER_JSON, integers_json

_KEY = b'"output_token_logprobs":[['
"""Quotes within a JSON string are escaped: these bytes are never part of a text."""
_IDS_KEY = b'"output_ids":['
_OF_NUMBERS = b"0123456789.-+eE"


@dataclass(frozen=True, slots=True)
class Columns:
    """`output_token_logprobs` of N tokens."""

    logprobs: list[Any]
    """[N] int or float, as JSON had them"""
    ids: list[int]
    """[N] from 0 on"""
    all_floats: bool
    """Whether all log-probs are floats."""
    ids_json: bytes
    """`ids` as JSON, between its brackets."""
    content_json: bytes
    """renderers' `logprobs.content`, the same way."""


def parsed(raw: bytes) -> Any:
    """What the JSON `raw` says, with Columns for `meta_info.output_token_logprobs` where they can be had.

    Raises orjson.JSONDecodeError.
    """
    start = raw.find(_KEY) + len(_KEY) - 2
    # From the end, which is near. If another list of lists stands behind, what lies between is not of our form.
    end = raw.rfind(b"]]", start) + 2
    if start < len(_KEY) - 2 or end <= start or raw.find(_KEY, end) >= 0:
        return orjson.loads(raw)
    columns = _columns(raw[start:end])
    if columns is None:
        return orjson.loads(raw)
    reply = orjson.loads(b"%b%b%b" % (_without_ids(raw[:start], columns.ids_json), PLACEHOLDER_JSON, raw[end:]))
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict) or meta.get("output_token_logprobs") != PLACEHOLDER:
        return orjson.loads(raw)
    meta["output_token_logprobs"] = columns
    if reply.get("output_ids") == PLACEHOLDER:
        reply["output_ids"] = columns.ids
    return reply


def _without_ids(text: bytes, ids_json: bytes) -> bytes:
    """`text` with a placeholder for `output_ids`, where they are the same ids once more."""
    at = text.find(_IDS_KEY)
    # Not bytes.replace, which takes longer to prepare for so long a needle than the list takes to be parsed.
    if at < 0 or not text.startswith(b"%b%b]" % (_IDS_KEY, ids_json), at):
        return text
    list_at = at + len(_IDS_KEY) - 1
    return b"%b%b%b" % (text[:list_at], PLACEHOLDER_JSON, text[list_at + len(ids_json) + 2 :])


def _columns(text: bytes) -> Columns | None:
    """The columns of `text`, or None if it is anything but [[number,integer,null],...]."""
    if not text.startswith(b"[[") or not text.endswith(b",null]]"):
        return None
    split = text[2 : -len(b",null]]")].split(b",null],[")
    rows = b"\n".join(split)
    if rows.translate(None, _OF_NUMBERS) != b",\n" * (len(split) - 1) + b",":
        return None
    try:
        flat = orjson.loads(b"[%b]" % rows.replace(b"\n", b","))
    except orjson.JSONDecodeError:
        return None
    ids = flat[1::2]
    ids_json = integers_json(ids)
    if ids_json is None:
        return None
    # There are none in the ids, and one at most in each of the others.
    all_floats = rows.count(b".") == len(split)
    content = rows.replace(b",", b',"token":"token_id:').replace(b"\n", b'"},{"logprob":')
    return Columns(flat[0::2], ids, all_floats, ids_json, b'{"logprob":%b"}' % content)
