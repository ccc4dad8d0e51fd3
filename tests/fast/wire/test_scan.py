"""The compiled scan gives what the one in Python gives, or nothing; and what it gives is what a parser sees."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.wire import scan

logprobs = st.floats(-999, 0).filter(lambda value: b"." in orjson.dumps(value)) | st.sampled_from([0.0, -0.0])
entries = st.tuples(logprobs, st.integers(0, 10**10 - 1), st.none())
PIECES = [
    *"0123456789",
    "-",
    "+",
    ".",
    "e",
    "E",
    ",",
    "[",
    "]",
    " ",
    "null",
    "NaN",
    "\0",
    ",null],[",
    "[[",
    "]]",
    '"',
    "é",
]


def test_it_is_compiled_here() -> None:
    assert scan.COMPILED, "tests need a C compiler: install one, then the package once more"
    assert scan.rows is not scan.rows_in_python


@pytest.mark.parametrize("compiled", ["None", "types.SimpleNamespace(VERSION=0)", "types.SimpleNamespace()"])
def test_without_the_compiled_file_or_with_an_older_one_python_serves(compiled: str) -> None:
    code = (
        "import sys, types; from miles_verifiers import wire\n"
        f"wire._scan = sys.modules['miles_verifiers.wire._scan'] = {compiled}\n"
        "if wire._scan is None: del wire._scan\n"
        "from miles_verifiers.wire import scan\n"
        "assert not scan.COMPILED and scan.rows is scan.rows_in_python and scan.integers is scan.integers_in_python"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


@pytest.mark.parametrize("rows", [scan.rows, scan.rows_in_python])
@given(
    before=st.binary(max_size=5), behind=st.sampled_from([b"", b"}}", b',"x":1}']), found=st.lists(entries, min_size=1)
)
def test_rows_of_an_encoder(
    rows: Callable[[bytes, int], Any], before: bytes, behind: bytes, found: list[tuple[float, int, None]]
) -> None:
    text = orjson.dumps(found)
    end, count, largest, ids, content = rows(before + text + behind, len(before))
    assert (end, count, largest) == (len(before + text), len(found), max(token for _, token, _ in found))
    assert orjson.loads(ids) == [token for _, token, _ in found]
    said = [{"logprob": value, "token": f"token_id:{token}"} for value, token, _ in found]
    assert json.dumps(orjson.loads(b"[%b]" % content)) == json.dumps(said)  # as text: -0.0 is not 0.0


@pytest.mark.parametrize("integers", [scan.integers, scan.integers_in_python])
@given(before=st.binary(max_size=5), behind=st.binary(max_size=3), found=st.lists(st.integers(0, 10**10 - 1)))
def test_integers_of_an_encoder(
    integers: Callable[[bytes, int], Any], before: bytes, behind: bytes, found: list[int]
) -> None:
    text = before + orjson.dumps(found)
    assert integers(text + behind, len(before)) == (len(text), len(found), max(found, default=-1))


ROWS = b"[[-0.5,5,null],[-12.25,60,null],[-0.0,0,null],[-1.5e-7,7,null]]"
INTEGERS = b"[11,0,12]"


@given(
    st.sampled_from([ROWS, INTEGERS]),
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 5), st.sampled_from(PIECES) | st.text(max_size=2)), max_size=3
    ),
)
def test_damage_is_nothing_to_it_or_the_same_as_in_python(text: bytes, damages: list[tuple[int, int, str]]) -> None:
    for at, lost, put in damages:
        text = text[:at] + put.encode(errors="replace") + text[at + lost :]
    for compiled, in_python in ((scan.rows, scan.rows_in_python), (scan.integers, scan.integers_in_python)):
        found = compiled(text, 0)
        assert found in (None, in_python(text, 0))


@pytest.mark.parametrize("rows", [scan.rows, scan.rows_in_python])
@pytest.mark.parametrize(
    "row",
    [
        *("", "-0.5", "-0.5,5", "-0.5,5,null,null", "-0.5,5,nul", '-0.5,5,"a"', "5,null", ",,null", "-0.5,,null"),
        *("0.5,5,null", "1e-9,5,null", "-9999.0,5,null", "-10000.5,5,null", "-1.0e9,5,null", "-0.5e2000,5,null"),
        *(
            "-0.,5,null",
            "-.5,5,null",
            "-00.5,5,null",
            "--0.5,5,null",
            "-0.5.5,5,null",
            "-0.5e,5,null",
            "-0.5e--1,5,null",
        ),
        *("null,5,null", "NaN,5,null", "-Infinity,5,null", "0,5,null", "-1,5,null", "0.0000001,5,null", "-0.5x,5,null"),
        *("-0.5,-5,null", "-0.5,5.0,null", "-0.5,05,null", "-0.5,5e1,null", "-0.5,null,null", "-0.5, 5,null"),
        *("-0.5,-0,null", "-0.5,+5,null"),
    ],
)
def test_a_row_that_is_none(rows: Callable[[bytes, int], Any], row: str) -> None:
    good = "[-0.5,5,null]"
    assert rows(f"[{good},{good}]".encode(), 0) is not None
    assert rows(f"[{good},[{row}]]".encode(), 0) is None
    assert rows(f"[[{row}],{good}]".encode(), 0) is None


@pytest.mark.parametrize(
    "text",
    ["", "[", "[1", "[1,", "[1,]", "[,1]", "[1,,2]", "[01]", "[-1]", "[1.0]", "[1 ]", "[[1]]", "[null]", "1]", "{}"],
)
def test_a_list_that_is_none(text: str) -> None:
    for integers in (scan.integers, scan.integers_in_python):
        assert integers(text.encode(), 0) is None


def test_half_a_list_is_none() -> None:
    for end in range(len(ROWS)):
        assert scan.rows(ROWS[:end], 0) is scan.rows_in_python(ROWS[:end], 0) is None
    for end in range(len(INTEGERS)):
        assert scan.integers(INTEGERS[:end], 0) is scan.integers_in_python(INTEGERS[:end], 0) is None


def test_compiled_calls_that_are_wrong() -> None:
    for function in (scan.rows, scan.integers):
        assert function(b"", 0) is None
        assert function(ROWS, len(ROWS)) is None
        for start in (-1, len(ROWS) + 1):
            with pytest.raises(IndexError):
                function(ROWS, start)
        with pytest.raises(TypeError):
            function("[1]", 0)  # type: ignore[arg-type]
