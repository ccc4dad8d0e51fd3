"""The order of tasks: every task once an epoch, the same after a resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.rollout.tasks import tasks_for_step

sizes = st.integers(1, 12)


@given(n=sizes, batch=sizes, seed=st.integers(), shuffle=st.booleans())
def test_each_epoch_holds_every_task_once(n: int, batch: int, seed: int, shuffle: bool) -> None:
    row = [task for step in range(3 * n) for task in tasks_for_step(n, step, batch, seed, shuffle)]
    epochs = [row[at : at + n] for at in range(0, len(row) - n + 1, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)


def test_a_resumed_run_goes_on_where_it_was() -> None:
    whole = [tasks_for_step(10, step, 3, seed=1, shuffle=True) for step in range(20)]
    resumed = [tasks_for_step(10, step, 3, seed=1, shuffle=True) for step in range(7, 20)]
    assert whole[7:] == resumed


def test_without_shuffle_the_order_is_the_tasksets() -> None:
    assert [tasks_for_step(4, step, 3, seed=1, shuffle=False) for step in range(3)] == [[0, 1, 2], [3, 0, 1], [2, 3, 0]]


def test_epochs_and_seeds_differ() -> None:
    """Control of the above: an order that is never shuffled, or shuffled once, would pass them."""
    epochs = [tasks_for_step(10, step, 10, seed=1, shuffle=True) for step in range(3)]
    other = tasks_for_step(10, 0, 10, seed=2, shuffle=True)
    assert len({tuple(order) for order in [*epochs, other, list(range(10))]}) == 5


def test_the_order_is_the_same_on_every_machine() -> None:
    assert tasks_for_step(8, 0, 8, seed=0, shuffle=True) == GOLDEN


GOLDEN = [6, 0, 4, 3, 1, 5, 2, 7]


@pytest.mark.parametrize(("n", "step", "batch"), [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_sizes(n: int, step: int, batch: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        tasks_for_step(n, step, batch, 0, True)
