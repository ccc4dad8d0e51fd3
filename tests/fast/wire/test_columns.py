"""Parsing by columns changes nothing: whatever the engine writes, the same response comes out, or the same error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from fake_engine import VOCAB, good_reply
from hypothesis import example, given
from hypothesis import strategies as st

from miles_verifiers.errors import WireError
from miles_verifiers.wire import columns, scan
from miles_verifiers.wire.columns import Columns, parsed
from miles_verifiers.wire.translate import from_sglang


@pytest.fixture(params=["compiled", "in Python"], autouse=True)
def scan_used(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test with both."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in Python":
            patch.setattr(columns, "rows", scan.rows_in_python)
        yield


numbers = st.integers(-3, VOCAB + 3) | st.floats(-1e4, 1e-4) | st.floats(allow_nan=False, allow_infinity=False)
good_logprobs = st.floats(-999, 0).filter(lambda value: b"." in orjson.dumps(value))
good_entries = st.lists(
    st.tuples(good_logprobs, st.integers(0, VOCAB - 1), st.none()).map(list), min_size=1, max_size=20
)
bad_entries = st.lists(
    st.lists(numbers | st.none() | st.booleans() | st.text(max_size=3), max_size=4) | numbers, max_size=5
)


def said(reply: Any) -> Any:
    """The response to `reply`, or the error, as data."""
    try:
        return from_sglang(reply, prompt_ids=[11, 12, 13], vocab_size=VOCAB, where="here")
    except WireError as error:
        return type(error), error.what


def as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def reply_of(entries: Any) -> dict[str, Any]:
    count = len(entries) if isinstance(entries, list) else 0
    return good_reply([5] * count, output_ids=..., completion_tokens=count, output_token_logprobs=entries)


def without_ids(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name != "output_ids"}


@given(good_entries | bad_entries)
@example([[-0.5], [5, None, -0.5, 6, None]])
@example([[-0.5, 5, 6, None], [-0.5, None]])
@example([[-0.5, 5, -0.25, None], [6, None]])
@example([[1e-7, 5, None]])
@example([[0, 5, None], [-1, 6, None]])
@example([[-0.5, 5, None], [-9999.0, 6, None]])
@example([[-1e-7, 5.0, None]])
def test_both_ways_say_the_same(entries: Any) -> None:
    raw = orjson.dumps(without_ids(reply_of(entries)))
    # As text, because 0 and 0.0 are equal and not the same.
    assert as_text(said(parsed(raw))) == as_text(said(orjson.loads(raw)))


@given(good_entries)
def test_good_replies_are_parsed_by_columns(entries: list[Any]) -> None:
    """Control: the test before this one compares two ways, not one with itself."""
    found = parsed(orjson.dumps(without_ids(reply_of(entries))))["meta_info"]["output_token_logprobs"]
    assert isinstance(found, Columns)
    assert found.ids.as_list() == [entry[1] for entry in entries]
    assert [(entry["token"], entry["logprob"]) for entry in orjson.loads(b"[%b]" % found.content_json)] == [
        (f"token_id:{token}", value) for value, token, _ in entries
    ]


GOOD = orjson.dumps(good_reply([5, 6, 2]))


@pytest.mark.parametrize(
    "raw",
    [
        GOOD.replace(b"],[", b"], ["),
        GOOD.replace(b'"ignored"', rb'"\"output_token_logprobs\":[[1,2,null]]"'),
        GOOD.replace(b'{"text"', b'{"output_token_logprobs":[[-9.5,9,null]],"text"'),
        GOOD.replace(b'"meta_info":', b'"output_token_logprobs":[[-9.5,9,null]],"meta_info":'),
        GOOD[:-2] + b',"output_top_logprobs":[[1,2]]}}',
        GOOD[:-2] + b',"output_token_logprobs":[[-1.5,5,null]],"completion_tokens":1}}',
        GOOD[:-2] + b',"output_token_logprobs": [[-1.5,5,null]],"completion_tokens":1}}',
        b'{"output_token_logprobs":[[-0.5,5,null]],"meta_info":{}}',
        b'{"output_token_logprobs":[[-0.5,5,null]],"meta_info":{"output_token_logprobs":"columns"}}',
        GOOD.replace(b'"output_ids":[5,6,2]', b'"output_ids":[5,6,3]'),
        GOOD.replace(b'"output_ids":[5,6,2]', b'"output_ids":[5,6,2,7]'),
        GOOD.replace(b'"output_ids":[5,6,2]', b'"output_ids": [5,6,2]'),
        GOOD.replace(b'"output_ids":[5,6,2]', b'"other":{"output_ids":[5,6,2]},"output_ids":[5,6]'),
        GOOD.replace(b'"output_ids":[5,6,2]', b'"output_ids":[5,6,2],"output_ids":[1]'),
        GOOD.replace(b'"output_ids":[5,6,2]', b'"output_ids":[5.0,6,2]'),
        orjson.dumps({**good_reply([5], output_token_logprobs=...), "output_token_logprobs": [[-0.5, 5, None]]}),
        GOOD.replace(b'"output_ids":[5,6,2],', b"").replace(b'"rid-of-the-engine"', b'{"output_ids":[5,6,2]}'),
        GOOD.replace(b'"output_ids":[5,6,2],', b"").replace(b'"7"', b'{"output_ids":[5,6,2]}'),
        GOOD.replace(b"5,null", b"-0,null"),
        b'[{"output_token_logprobs":[[-0.5,5,null]]}]',
        b'{"meta_info":{"x\\"output_token_logprobs":[[-0.5,5,null]]}}',
        json.dumps(good_reply([5, 6, 2])).encode(),
    ],
)
def test_forms_that_could_be_mistaken(raw: bytes) -> None:
    assert said(parsed(raw)) == said(orjson.loads(raw))


@given(st.integers(0, len(GOOD)), st.binary(max_size=3), st.integers(0, 3))
def test_damage_is_damage_both_ways(at: int, put: bytes, lost: int) -> None:
    raw = GOOD[:at] + put + GOOD[at + lost :]
    try:
        plainly = said(orjson.loads(raw))
    except orjson.JSONDecodeError as error:
        with pytest.raises(orjson.JSONDecodeError, match=f"^{re.escape(str(error))}$"):
            parsed(raw)
        return
    assert said(parsed(raw)) == plainly
