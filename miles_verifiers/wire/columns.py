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

_KEY = b'"output_token_logprobs":[['
"""Quotes within a JSON string are escaped: these bytes are never part of a text."""
_OF_NUMBERS = b"0123456789.-+eE"
_BETWEEN = b",null],["
_PLACEHOLDER = 4_705_882_352_941_176
"""Stands where the list stood while the rest is parsed, so that it is known where that was."""


@dataclass(frozen=True, slots=True)
class Columns:
    """`output_token_logprobs` of N tokens."""

    logprobs: list[Any]
    """[N] int or float, as JSON had them"""
    ids: list[Any]
    """[N] the same"""
    points: int
    """Decimal points in all numbers together: N of them in the log-probs, none in the ids, and all log-probs are floats."""
    content_json: bytes
    """renderers' `logprobs.content`, between its brackets."""


def parsed(raw: bytes) -> Any:
    """What the JSON `raw` says, with Columns for `meta_info.output_token_logprobs` where they can be had.

    Raises orjson.JSONDecodeError.
    """
    start = raw.find(_KEY) + len(_KEY) - 2
    # From the end, which is near. If another list of lists stands behind, what lies between is not of our form.
    end = raw.rfind(b"]]", start) + 2
    if start >= len(_KEY) - 2 and end > start and raw.find(_KEY, end) < 0:
        columns = _columns(raw[start:end])
        if columns is not None:
            reply = orjson.loads(b"%b%d%b" % (raw[:start], _PLACEHOLDER, raw[end:]))
            meta = reply.get("meta_info") if isinstance(reply, dict) else None
            if isinstance(meta, dict) and meta.get("output_token_logprobs") == _PLACEHOLDER:
                meta["output_token_logprobs"] = columns
                return reply
    return orjson.loads(raw)


def _columns(text: bytes) -> Columns | None:
    """The columns of `text`, or None if it is anything but [[number,number,null],...]."""
    skeleton = text.translate(None, _OF_NUMBERS)
    count = len(skeleton) // len(",,null],[")
    if skeleton != b"[[" + b",,null],[" * (count - 1) + b",,null]]":
        return None
    rows = text[2 : -len(",null]]")].split(_BETWEEN)
    try:
        flat = orjson.loads(b"[%b]" % b",".join(rows))
    except orjson.JSONDecodeError:
        return None
    content = b"\n".join(rows).replace(b",", b',"token":"token_id:').replace(b"\n", b'"},{"logprob":')
    return Columns(flat[0::2], flat[1::2], text.count(b"."), b'{"logprob":%b"}' % content)
