"""Several environments in one run: shares, order, numbers, and whose answer counts."""

from __future__ import annotations

from typing import Any

import pytest
from factories import config_table
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.config import loading
from miles_verifiers.errors import ConfigError
from miles_verifiers.record.samples import Sample, as_row
from miles_verifiers.rollout.cursor import Cursor
from miles_verifiers.rollout.mixing import Mixer, interleaved
from miles_verifiers.training.steps import merged, renumbered


def test_slots_by_hand() -> None:
    assert Mixer([1.0]).slots(0, 3) == [0, 0, 0]
    assert Mixer([1.0, 1.0]).slots(0, 5) == [0, 1, 0, 1, 0]
    assert Mixer([3.0, 1.0]).slots(0, 8) == [0, 0, 1, 0, 0, 0, 1, 0]


@settings(deadline=None)
@given(weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5), count=st.integers(1, 200))
def test_each_has_its_share_at_every_moment(weights: list[float], count: int) -> None:
    slots = Mixer(weights).slots(0, count)
    for number, weight in enumerate(weights):
        share = weight / sum(weights) * count
        assert abs(slots.count(number) - share) < (1.001 if len(weights) < 3 else 2.001)


@settings(deadline=None)
@given(first=st.integers(0, 50), count=st.integers(1, 20))
def test_a_slot_does_not_depend_on_what_was_asked_before(first: int, count: int) -> None:
    mixer = Mixer([2.0, 1.0, 0.5])
    assert mixer.slots(first, count) == Mixer([2.0, 1.0, 0.5]).slots(0, first + count)[first:]
    assert mixer.slots(0, 5) == Mixer([2.0, 1.0, 0.5]).slots(0, 5)


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0]])
def test_impossible_weights(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Mixer(weights)


def test_groups_are_dealt_to_their_slots() -> None:
    assert interleaved([0, 1, 0, 1], {0: ["a", "b"], 1: ["x", "y"]}) == ["a", "x", "b", "y"]
    assert interleaved([0, 1, 0, 1], {0: ["a", "b"], 1: ["x"]}) == ["a", "x", "b"]


def answer(tasks: list[int], groups: int, **known: Any) -> dict[str, Any]:
    """What a worker says that stood at `groups` groups before."""
    samples = [
        Sample(group_index=groups + i, index=2 * (groups + i) + k, task_index=task, environment=known.get("env", ""))
        for i, task in enumerate(tasks)
        for k in range(2)
    ]
    return {
        "rows": [as_row(sample) for sample in samples],
        "cursor": Cursor(position=groups + len(tasks), groups=groups + len(tasks)).as_json(),
        "ending": known.get("ending", "full"),
        "dropped": known.get("dropped", {}),
        "causes": {},
        "retried": {},
    }


def test_answers_make_one_step_numbered_through_the_run() -> None:
    cursors = {"a": Cursor(position=9, groups=8).as_json(), "b": Cursor(position=2, groups=2).as_json()}
    answers = {0: answer([5, 6], 8, dropped={"x": 1}), 1: answer([1], 2, dropped={"x": 2, "y": 1}, ending="deadline")}
    step = merged([0, 1, 0, 1], answers, ["a", "b"], cursors)
    assert [(s.task_index, s.group_index, s.index) for s in step.samples] == [
        (5, 10, 20), (5, 10, 21), (1, 11, 22), (1, 11, 23), (6, 12, 24), (6, 12, 25)
    ]  # fmt: skip
    assert step.dropped == {"x": 3, "y": 1}
    assert step.ending == "deadline"
    assert {name: cursor["groups"] for name, cursor in step.cursors.items()} == {"a": 10, "b": 3}
    assert "3  x" in step.why()


def test_an_environment_that_is_not_asked_keeps_its_place() -> None:
    cursors = {"a": Cursor(groups=4).as_json(), "b": Cursor(groups=1).as_json()}
    step = merged([0, 0], {0: answer([0, 1], 4)}, ["a", "b"], cursors)
    assert step.cursors["b"] == cursors["b"]
    assert [sample.group_index for sample in step.samples] == [5, 5, 6, 6]


def test_evaluations_of_several_are_numbered_through() -> None:
    samples = {
        "a": [Sample(group_index=i // 2, index=i, task_index=i // 2) for i in range(4)],
        "b": [Sample(group_index=i, index=i, task_index=i) for i in range(2)],
    }
    assert [(s.group_index, s.index) for s in renumbered(samples)] == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (3, 5)]


def test_environments_are_told_apart() -> None:
    table = config_table()
    table["environments"] = [{"source": "environments/golf", "weight": 2.0}]
    with pytest.raises(ConfigError, match="names that differ, these are golf, golf"):
        loading.validate(table, where="the test")
    table["environments"][0]["name"] = "more golf"
    made = loading.validate(table, where="the test")
    assert [environment.label for environment in made.all_environments] == ["golf", "more golf"]
    assert made.of_environment(1).environment.weight == 2.0
    assert made.of_environment(1).all_environments == [made.environments[0]]
