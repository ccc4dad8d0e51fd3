"""The worked example of the docstring, usability, and the flat row."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from factories import fork, sample

from miles_verifiers.record.samples import Fork, Sample, as_row, from_row


def test_rows_are_plain_and_come_back_the_same() -> None:
    original = sample(5)
    row = as_row(original)
    assert list(row) == [field.name for field in fields(Sample)]
    assert row["weight_versions"] == [{"version": "0", "count": 2}]
    assert from_row(json.loads(json.dumps(row))) == original
    assert from_row(as_row(Sample(0, 0, 0))) == Sample(0, 0, 0)


def test_forks_are_rows_of_their_own_within_the_row() -> None:
    original = replace(sample(5), forks=[fork(), Fork()])
    row = as_row(original)
    assert list(row["forks"][0]) == [field.name for field in fields(Fork)]
    assert row["forks"][0]["weight_versions"] == [{"version": "0", "count": 2}]
    assert from_row(json.loads(json.dumps(row))) == original
    with pytest.raises(TypeError, match="colour"):
        from_row({**row, "forks": [{**row["forks"][0], "colour": "red"}]})


def test_all_sequences_count() -> None:
    original = sample()
    assert (original.sequences, original.sampled_tokens) == ([original], 2)
    forked = replace(original, forks=[fork(), fork()])
    assert forked.sequences == [forked, *forked.forks]
    assert forked.sampled_tokens == 6


def test_a_row_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        from_row({**as_row(sample()), "colour": "red"})


def test_from_row_keeps_the_row_as_it_was() -> None:
    row = as_row(sample())
    before = json.dumps(row)
    from_row(row)
    assert json.dumps(row) == before


@pytest.mark.parametrize(
    ("changes", "usable"),
    [
        ({}, True),
        ({"status": "truncated"}, True),
        ({"reward": 0.0}, True),
        ({"loss_mask": [0, 1]}, True),
        ({"status": "failed"}, False),
        ({"status": "aborted"}, False),
        ({"reward": None}, False),
        ({"loss_mask": [0, 0]}, False),
        ({"loss_mask": []}, False),
    ],
)
def test_training_uses_scored_samples_with_sampled_tokens(changes: dict[str, Any], usable: bool) -> None:
    assert replace(sample(), **changes).usable is usable


def test_samples_do_not_share_their_lists() -> None:
    first, second = Sample(0, 0, 0), Sample(0, 1, 0)
    first.tokens.append(1)
    first.rewards["correct"] = 1.0
    assert (second.tokens, second.rewards) == ([], {})
