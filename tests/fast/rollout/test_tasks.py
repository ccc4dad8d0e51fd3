"""The row of tasks: every task once an epoch, the same after a resume, and an end where one is set."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.rollout.tasks import TaskRow, sampling_seed

sizes = st.integers(1, 12)


def tasks(row: TaskRow, positions: range) -> list[int]:
    return [row.task(position) for position in positions]


@settings(deadline=None)
@given(n=sizes, seed=st.integers(), shuffle=st.booleans())
def test_each_epoch_holds_every_task_once(n: int, seed: int, shuffle: bool) -> None:
    row = TaskRow(n, seed, shuffle)
    for epoch in range(3):
        assert sorted(tasks(row, range(epoch * n, (epoch + 1) * n))) == list(range(n))


def test_a_position_says_it_all() -> None:
    """In whatever order positions are asked for, as after a resume."""
    whole = tasks(TaskRow(10, seed=1), range(60))
    backwards = [TaskRow(10, seed=1).task(position) for position in reversed(range(60))]
    assert whole == backwards[::-1]


def test_without_shuffle_the_order_is_the_tasksets() -> None:
    assert tasks(TaskRow(4, seed=1, shuffle=False), range(9)) == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_epochs_and_seeds_differ() -> None:
    """Control of the above: an order that is never shuffled, or shuffled once, would pass them."""
    row = TaskRow(10, seed=1)
    epochs = [tasks(row, range(10 * epoch, 10 * epoch + 10)) for epoch in range(3)]
    other = tasks(TaskRow(10, seed=2), range(10))
    assert len({tuple(order) for order in [*epochs, other, list(range(10))]}) == 5


def test_the_order_is_the_same_on_every_machine() -> None:
    assert tasks(TaskRow(8), range(8)) == [6, 0, 4, 3, 1, 5, 2, 7]


def test_a_row_may_end() -> None:
    row = TaskRow(3, num_epoch=2)
    assert row.end == 6
    assert len(tasks(row, range(6))) == 6
    with pytest.raises(ValueError, match="no position 6"):
        row.task(6)
    assert TaskRow(3).end is None


@pytest.mark.parametrize("known", [{"n_tasks": 0}, {"n_tasks": 1, "num_epoch": 0}])
def test_impossible_rows(known: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        TaskRow(**known)


def test_seeds_are_their_own_and_the_same_everywhere() -> None:
    seeds = [
        sampling_seed(seed, environment, position, rollout, attempt)
        for seed in (0, 1)
        for environment in ("a", "b")
        for position in range(5)
        for rollout in range(4)
        for attempt in range(2)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "golf", 3, 1, 0) == GOLDEN


GOLDEN = 343585550
