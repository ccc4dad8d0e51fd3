"""A prompt's ids beside their JSON: the same ids, or the same error, as without."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.wire.token_ids import TokenIds, parsed_request

BODY = b'{"model":"policy","token_ids":[11,12,13],"sampling_params":{"stop_token_ids":[2]}}'


@pytest.mark.parametrize(
    ("raw", "is_known"),
    [
        (BODY, True),
        (BODY.replace(b"11,12,13", b""), True),
        (BODY.replace(b":[11,12", b": [11, 12"), False),
        (BODY.replace(b"12", b"-12"), False),
        (BODY.replace(b"12", b"12.0"), False),
        (BODY.replace(b"12", b"[12]"), False),
        (BODY.replace(b'"token_ids"', rb'"x\"token_ids"'), False),
        (b"[%b]" % BODY, False),
        (BODY.replace(b'"model"', b'"token_ids":[1],"model"'), False),
        (BODY.replace(b'"model":', b'"other":{"token_ids":[1]},"model":'), False),
        (BODY.replace(b"}}", b'},"token_ids":[7]}'), False),
    ],
)
def test_a_prompts_ids_are_known_where_they_can_be(raw: bytes, is_known: bool) -> None:
    body = parsed_request(raw)
    ids = body["token_ids"] if isinstance(body, dict) and "token_ids" in body else None
    assert isinstance(ids, TokenIds) is is_known
    assert listed(body) == orjson.loads(raw)


def listed(body: Any) -> Any:
    """`body` with a plain list for TokenIds, which say of it what is so."""
    ids = body.get("token_ids") if isinstance(body, dict) else None
    if not isinstance(ids, TokenIds):
        return body
    plain = ids.as_list()
    assert (len(ids), ids.largest) == (len(plain), max(plain, default=-1))
    return {**body, "token_ids": plain}


@pytest.mark.parametrize("ids", [[], [0], (5, 2), [2**32 + 1]])
def test_a_list_and_its_text_are_the_same(ids: Sequence[int]) -> None:
    found = TokenIds.of(ids)
    assert found is not None
    assert listed({"token_ids": found}) == {"token_ids": list(ids)}


@pytest.mark.parametrize(
    "ids", [[-1], [1.0], [True], ["1"], [[1]], [None], [2**70], [{}], ["\ud800"], [orjson.Fragment(b"5],[6")]]
)
def test_what_is_no_id_is_no_list_of_them(ids: list[Any]) -> None:
    assert TokenIds.of([1, *ids]) is None


@given(st.integers(0, len(BODY)), st.binary(max_size=3), st.integers(0, 3))
def test_a_damaged_request_is_damaged_both_ways(at: int, put: bytes, lost: int) -> None:
    raw = BODY[:at] + put + BODY[at + lost :]
    try:
        plainly = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        with pytest.raises(orjson.JSONDecodeError, match=f"^{re.escape(str(error))}$"):
            parsed_request(raw)
        return
    assert listed(parsed_request(raw)) == plainly
