"""SGLang's reply parsed without an object per token. Pure.

Nine tenths of a reply are `output_token_logprobs`, [[log-prob, id, null], ...]. Parsed as it stands it is a list and two numbers
for every token, from which the same text is made again for renderers: most of what a reply costs. Where the engine wrote it
as JSON encoders do, without spaces, renderers' form of it is the same text with other things between its numbers. Anything
else is parsed as usual; the checks are the same for both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from miles_verifiers.wire.scan import rows
from miles_verifiers.wire.token_ids import PLACEHOLDER, PLACEHOLDER_JSON, TokenIds, parsed_with_placeholders

_KEY = b'"output_token_logprobs":['
"""Quotes within a JSON string are escaped: these bytes are never part of a text."""
_IDS_KEY = b'"output_ids":'


@dataclass(frozen=True, slots=True)
class Columns:
    """`output_token_logprobs` of N tokens, N > 0: ids from 0 on, and log-probs that are floats above -9999 and not above zero."""

    ids: TokenIds
    content_json: bytes
    """renderers' `logprobs.content`, between its brackets."""


def parsed(raw: bytes) -> Any:
    """What the JSON `raw` says, with Columns for `meta_info.output_token_logprobs` where they can be had.

    `output_ids` are then the same TokenIds if they are the same ids once more. Raises orjson.JSONDecodeError.
    """
    start = raw.find(_KEY) + len(_KEY) - 1
    found = rows(raw, start) if start >= len(_KEY) - 1 else None
    if found is None or raw.find(_KEY, found[0]) >= 0:
        return orjson.loads(raw)
    end, count, largest, ids_json, content_json = found
    ids = TokenIds(ids_json, count, largest)
    before, lacks_ids = _without_ids(raw[:start], ids.json)
    reply = parsed_with_placeholders(b"%b%b%b" % (before, PLACEHOLDER_JSON, raw[end:]), raw)
    meta = reply.get("meta_info") if isinstance(reply, dict) else None
    if not isinstance(meta, dict) or meta.get("output_token_logprobs") != PLACEHOLDER:
        return orjson.loads(raw)
    meta["output_token_logprobs"] = Columns(ids, content_json)
    if lacks_ids:
        if reply.get("output_ids") != PLACEHOLDER:  # those of another object were taken out
            return orjson.loads(raw)
        reply["output_ids"] = ids
    return reply


def _without_ids(text: bytes, ids_json: bytes) -> tuple[bytes, bool]:
    """`text` with a placeholder for `output_ids`, where they are the same ids once more, and whether they are."""
    at = text.find(_IDS_KEY) + len(_IDS_KEY)
    # Not bytes.replace, which takes longer to prepare for so long a needle than the list takes to be parsed.
    if at < len(_IDS_KEY) or not text.startswith(ids_json, at):
        return text, False
    return b"%b%b%b" % (text[:at], PLACEHOLDER_JSON, text[at + len(ids_json) :]), True
