"""Replies to programs, groups to shares."""

import math

import pytest
from code_golf_v1.scoring import is_correct, program_of, shares
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("```py\nprint(1)\n```", "print(1)"),
        ("```Python\r\nprint(1)\r\n```", "print(1)"),
        ("Try this:\n```python\nprint(1)\n```\nor, shorter:\n```python\nprint(2)\n```\nDone.", "print(2)"),
        ("print(1)", "print(1)"),
        ("  print(1)\n", "print(1)"),
        ("```python\nfor i in 1, 2:\n    print(i)", "for i in 1, 2:\n    print(i)"),  # cut off by the token limit
        ("```python\n\n```", ""),
        ("```python\nprint(1)\n```\n```python\n```", ""),  # the last block counts, even an empty one
        ("```bash\nls\n```", "```bash\nls\n```"),  # no Python block: the whole reply, which will not run
        ("", ""),
        (" \n", ""),
    ],
)
def test_program_of(reply, program):
    assert program_of(reply) == program


@pytest.mark.parametrize(
    ("stdout", "expected", "correct"),
    [
        ("42\n", "42", True),
        (" 42 \n\n", "42", True),
        ("4 2", "42", False),
        ("42\n42\n", "42", False),
        ("", "42", False),
    ],
)
def test_is_correct(stdout, expected, correct):
    assert is_correct(stdout, expected) is correct


@pytest.mark.parametrize(
    ("costs", "passed", "expected"),
    [
        ([3, 1, 2], [True, True, True], [0, 1, 0]),
        ([3, 1, 2], [True, False, True], [0, 0, 1]),  # the smallest failed
        ([2, 1, 1, 1], [True, True, True, False], [0, 0.5, 0.5, 0]),
        ([5, 5, 5, 5], [True] * 4, [0.25] * 4),
        ([1, 2], [False, False], [0, 0]),
        ([0, 2], [False, True], [0, 1]),  # an empty program, which cannot have passed
        ([math.nan, 2], [True, True], [0, 1]),
        ([math.nan, math.nan], [True, True], [0, 0]),
        ([math.inf, 2], [True, True], [0, 1]),
        ([math.inf], [True], [0]),
        ([7], [True], [1]),
        ([], [], []),
    ],
)
def test_shares(costs, passed, expected):
    assert shares(costs, passed) == expected


def test_shares_refuses_lists_of_different_length():
    with pytest.raises(ValueError, match="shorter"):
        shares([1, 2], [True])


costs_and_passed = st.lists(st.tuples(st.floats() | st.integers(0, 3), st.booleans()), max_size=12)


@given(costs_and_passed)
def test_a_group_shares_one_or_nothing(entries):
    costs, passed = [cost for cost, _ in entries], [ok for _, ok in entries]
    given_out = shares(costs, passed)
    can_win = [ok and math.isfinite(cost) for cost, ok in entries]
    assert sum(given_out) == pytest.approx(1.0 if any(can_win) else 0.0)
    assert all(share == 0.0 for share, may in zip(given_out, can_win, strict=True) if not may)
    winners = [cost for cost, share in zip(costs, given_out, strict=True) if share > 0]
    assert all(cost == min(c for c, may in zip(costs, can_win, strict=True) if may) for cost in winners)
