"""Lists of numbers in JSON text, without an object for every number. Pure.

Nine tenths of what the wire carries are two lists: a prompt's ids, and a reply's rows [log-prob, id, null]. Both go on as text,
and all that has to be known of them is that they are what they should be, how many there are, and the largest id. `rows`
and `integers` say so in one pass. Where the package was installed with a C compiler they are `_scan.c`; else, five times
slower, what is here. Either gives None for text that is not of the form that encoders write, which says nothing about
the text: a parser then has to.
"""

from __future__ import annotations

from typing import Final

import orjson

MISSING_LOGPROB: Final = -9999.0
"""What vLLM and SGLang put where they have no log-prob; renderers refuses exactly this value."""
_VERSION: Final = 1
"""Of `_scan.c`. It changes with what its functions take and give, as the compiled file may be of an earlier install."""
_OF_INTEGERS: Final = b"0123456789,"
_OF_ROWS: Final = b"0123456789.-+eE"


def integers_in_python(raw: bytes, start: int) -> tuple[int, int, int] | None:
    """Of the list of integers from 0 on that begins at `start`: where it ends, how many there are, the largest or -1."""
    end = raw.find(b"]", start) + 1
    text = raw[start:end]
    if text[:1] != b"[" or text[1:-1].translate(None, _OF_INTEGERS):
        return None
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return end, len(found), max(found, default=-1)


def rows_in_python(raw: bytes, start: int) -> tuple[int, int, int, bytes, bytes] | None:
    """Of the list [[log-prob, id, null], ...] that begins at `start`: where it ends, how many rows there are, the largest id,
    the list of ids as JSON, and the rows as renderers' `logprobs.content`, between its brackets.

    All log-probs are then floats above MISSING_LOGPROB and not above zero, and all ids integers from 0 on.
    """
    end = raw.find(b"]]", start) + 2
    text = raw[start:end]
    if not text.startswith(b"[[") or not text.endswith(b",null]]"):
        return None
    split = text[2 : -len(b",null]]")].split(b",null],[")
    lines = b"\n".join(split)
    # "-0" is a number that encoders never write, and an integer from 0 on to parsers.
    if lines.translate(None, _OF_ROWS) != b",\n" * (len(split) - 1) + b"," or b",-" in lines:
        return None
    try:
        flat = orjson.loads(b"[%b]" % lines.replace(b"\n", b","))
    except orjson.JSONDecodeError:
        return None
    logprobs, ids = flat[0::2], flat[1::2]
    ids_json = orjson.dumps(ids)
    # No dot in the ids, and one at most in each log-prob. JSON has no NaN and no infinity, so that the ends say it all.
    are_floats = not ids_json[1:-1].translate(None, _OF_INTEGERS) and lines.count(b".") == len(split)
    if not are_floats or not (min(logprobs) > MISSING_LOGPROB and max(logprobs) <= 0.0):
        return None
    content = lines.replace(b",", b',"token":"token_id:').replace(b"\n", b'"},{"logprob":')
    return end, len(split), max(ids), ids_json, b'{"logprob":%b"}' % content


try:
    from miles_verifiers.wire import _scan

    COMPILED = _scan.VERSION == _VERSION
except (ImportError, AttributeError):  # no compiler when it was installed, or another platform's file
    COMPILED = False

if COMPILED:
    integers, rows = _scan.integers, _scan.rows
else:
    integers, rows = integers_in_python, rows_in_python
