"""Collecting a step's groups: in order whatever ends first, bounded, resumable, and nothing accepted lost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.errors import RolloutError
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.cursor import Cursor
from miles_verifiers.rollout.groups import Batch, Collector, Group
from miles_verifiers.rollout.policies import Verdict

Verdicts = Callable[[int], str]


def group(position: int, cause: str) -> Group:
    return Group(position, [Sample(group_index=-1, index=k, task_index=position) for k in range(2)], Verdict(cause))


def collect(collector: Collector, verdicts: Verdicts, rng: random.Random | None = None, limit: int = 1000) -> Batch:
    """Drives a collector as the worker does; groups end in random order where a generator is given."""
    running: list[int] = []
    started: list[int] = []
    while not collector.done:
        starting = collector.to_start()
        started += starting
        running += starting
        assert running, "nothing runs, nothing starts, and it is not done"
        assert len(started) < limit
        position = running.pop(rng.randrange(len(running)) if rng else 0)
        collector.finish(group(position, verdicts(position)))
    assert len(set(started)) == len(started)
    return collector.batch()


def run(
    steps: int, verdicts: Verdicts, rng: random.Random | None = None, cursor: Cursor | None = None, **known: Any
) -> tuple[list[list[int]], Cursor]:
    """The positions that each step trains on."""
    cursor, trained = cursor or Cursor(), []
    for _ in range(steps):
        batch = collect(Collector(cursor, **{"want": 3, "wave": 3, **known}), verdicts, rng)
        trained.append([taken.position for taken in batch.groups])
        cursor = Cursor.from_json(batch.cursor.as_json())
    return trained, cursor


def good(_position: int) -> str:
    return ""


def every_third_bad(position: int) -> str:
    return "" if position % 3 else "equal rewards"


def test_without_drops_steps_cut_the_row() -> None:
    trained, cursor = run(3, good)
    assert trained == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert cursor == Cursor(position=9, groups=9)


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_dropped_groups_make_room_for_the_next(surplus: str) -> None:
    trained, cursor = run(3, every_third_bad, wave=4, surplus=surplus)
    assert trained == [[1, 2, 4], [5, 7, 8], [10, 11, 13]]
    assert cursor.groups == 9
    # Started in waves of four: 0-3, 4-7 of which 5 and 7 are over, ...
    assert (cursor.position, [kept.position for kept in cursor.kept]) == (
        (14, []) if surplus == "rerun" else (16, [14])
    )


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), wave=st.integers(3, 7), surplus=st.sampled_from(["rerun", "keep"]))
def test_what_ends_first_does_not_matter(seed: int, wave: int, surplus: str) -> None:
    bad = random.Random(seed)
    fate = {position: bad.random() < 0.4 for position in range(2000)}

    def verdicts(position: int) -> str:
        return "failed" if fate[position] else ""

    known = {"wave": wave, "surplus": surplus, "max_dropped": 1000}
    in_order = run(4, verdicts, **known)
    assert run(4, verdicts, random.Random(seed + 1), **known) == in_order
    trained = [position for step in in_order[0] for position in step]
    assert trained == [position for position in range(2000) if not fate[position]][: len(trained)]


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
@settings(deadline=None)
@given(seed=st.integers(0, 10**6), stop=st.integers(0, 5))
def test_a_resumed_run_trains_on_the_same(surplus: str, seed: int, stop: int) -> None:
    def verdicts(position: int) -> str:
        return "failed" if random.Random(f"{seed} {position}").random() < 0.5 else ""

    known: dict[str, Any] = {"wave": 5, "surplus": surplus, "max_dropped": 1000}
    whole, end = run(6, verdicts, random.Random(1), **known)
    first, cursor = run(stop, verdicts, random.Random(2), **known)
    rest, resumed_end = run(6 - stop, verdicts, random.Random(3), cursor=cursor, **known)
    assert first + rest == whole
    assert resumed_end == end


def test_a_lost_cursor_would_be_noticed() -> None:
    """Control of the above: forgetting the kept groups, or the position, changes what is trained on."""
    whole, _ = run(2, every_third_bad, wave=4, surplus="keep")
    _, cursor = run(1, every_third_bad, wave=4, surplus="keep")
    forgetful = Cursor(cursor.position, cursor.groups)
    assert cursor.kept
    assert run(1, every_third_bad, cursor=forgetful, wave=4, surplus="keep")[0] != whole[1:]
    assert run(1, every_third_bad, wave=4, surplus="keep")[0] != whole[1:]


def test_rerun_leaves_stragglers_behind() -> None:
    collector = Collector(Cursor(), want=2, wave=4)
    assert collector.to_start() == [0, 1, 2, 3]
    collector.finish(group(3, ""))
    collector.finish(group(1, ""))
    assert not collector.done  # group 0 decides whether 3 is needed
    collector.finish(group(0, ""))
    assert collector.done
    assert collector.running == 1
    batch = collector.batch()
    assert [taken.position for taken in batch.groups] == [0, 1]
    assert batch.cursor == Cursor(position=2, groups=2)


def test_keep_waits_for_all_and_trains_on_the_rest_next() -> None:
    collector = Collector(Cursor(), want=2, wave=4, surplus="keep")
    for position in collector.to_start():
        assert not collector.done
        collector.finish(group(position, ""))
    batch = collector.batch()
    assert [kept.position for kept in batch.cursor.kept] == [2, 3]
    following = Collector(batch.cursor, want=2, wave=4, surplus="keep")
    assert following.done  # nothing has to be sampled
    assert [taken.position for taken in following.batch().groups] == [2, 3]
    assert following.batch().cursor == Cursor(position=4, groups=4)


def test_another_wave_starts_as_soon_as_the_step_cannot_be_filled() -> None:
    collector = Collector(Cursor(), want=3, wave=3)
    assert collector.to_start() == [0, 1, 2]
    collector.finish(group(2, ""))
    assert collector.to_start() == []
    collector.finish(group(1, "failed"))
    assert collector.to_start() == [3, 4, 5]


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_too_many_dropped_in_a_row_stop_and_lose_nothing(surplus: str) -> None:
    def verdicts(position: int) -> str:
        return "" if position == 1 or position > 20 else "judge down" if position % 2 else "equal rewards"

    batch = collect(Collector(Cursor(), want=3, wave=3, surplus=surplus, max_dropped=5), verdicts)  # type: ignore[arg-type]
    assert (batch.ending, batch.groups) == ("too many dropped", [])
    assert [kept.position for kept in batch.cursor.kept] == [1]
    assert batch.dropped == {"judge down": 3, "equal rewards": 4}
    # Started again, the count begins anew and the accepted group is trained on first.
    again, _ = run(1, verdicts, cursor=batch.cursor, max_dropped=50, surplus=surplus)
    assert again[0][0] == 1
    assert min(again[0][1:]) > 20


def test_drops_in_a_row_are_counted_over_steps() -> None:
    verdicts = {0: "", 1: "x", 2: "x"}
    _, cursor = run(1, lambda position: verdicts.get(position, ""), want=1, wave=3, surplus="keep", max_dropped=2)
    assert cursor.dropped_in_a_row == 2
    batch = collect(Collector(cursor, want=1, wave=1, surplus="keep", max_dropped=2), lambda position: "x")
    assert batch.ending == "too many dropped"


def test_a_bound_that_is_not_reached_does_not_stop() -> None:
    """Control: five in a row are within a bound of five."""
    batch = collect(Collector(Cursor(), want=1, wave=1, max_dropped=5), lambda position: "x" if position < 5 else "")
    assert (batch.ending, len(batch.groups)) == ("full", 1)
    batch = collect(Collector(Cursor(), want=1, wave=1, max_dropped=4), lambda position: "x" if position < 5 else "")
    assert batch.ending == "too many dropped"


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_when_tasks_run_out_kept_groups_are_kept(surplus: str) -> None:
    batch = collect(Collector(Cursor(), want=3, wave=3, surplus=surplus, last=7), every_third_bad)  # type: ignore[arg-type]
    assert batch.ending == "full"
    batch = collect(Collector(batch.cursor, want=3, wave=3, surplus=surplus, last=7), every_third_bad)  # type: ignore[arg-type]
    assert (batch.ending, [taken.position for taken in batch.groups]) == ("tasks ran out", [5])
    batch = collect(Collector(batch.cursor, want=3, wave=3, last=7), every_third_bad)
    assert (batch.ending, batch.groups) == ("tasks ran out", [])


def test_a_deadline_keeps_what_was_accepted() -> None:
    collector = Collector(Cursor(), want=3, wave=3)
    collector.to_start()
    collector.finish(group(1, ""))
    collector.close()
    for position in (0, 2):
        collector.finish(group(position, "batch deadline"))
    assert collector.to_start() == []
    batch = collector.batch()
    assert (batch.ending, [taken.position for taken in batch.groups]) == ("deadline", [1])
    assert batch.cursor == Cursor(position=3, groups=1, dropped_in_a_row=1)
    assert batch.dropped == {"batch deadline": 2}


@pytest.mark.parametrize(
    "damage",
    [
        {"position": "x"},
        {"kept": [{"position": 1}]},
        {"kept": [{"position": 9, "samples": []}]},
        {"kept": [{"position": 2, "samples": []}, {"position": 1, "samples": []}]},
        {"kept": None},
        {"position": -1},
    ],
)
def test_a_damaged_cursor_is_refused(damage: dict[str, Any]) -> None:
    value = Cursor(position=4, groups=2).as_json()
    assert Cursor.from_json(value).position == 4
    with pytest.raises(RolloutError, match="place in the row"):
        Cursor.from_json({**value, **damage})
