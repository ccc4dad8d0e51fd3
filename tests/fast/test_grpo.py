"""Advantages, by hand and by property."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.errors import TrainerError
from miles_verifiers.grpo import AdvantageCounts, assign_advantages, group_advantages, shuffled_rewards
from miles_verifiers.record.samples import Sample

finite = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False)


def sample(index: int, group: int, reward: float | None, **fields) -> Sample:
    return Sample(group_index=group, index=index, task_index=0, loss_mask=[1], reward=reward, **fields)


def test_by_hand():
    # mean 0.5, sample standard deviation sqrt(4 * 0.25 / 3) = 0.57735
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=True, eps=0.0) == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254]
    )
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=False) == [0.5, -0.5, -0.5, 0.5]
    # The population's deviation, 0.5, would give 1.0: the two are told apart.
    assert group_advantages([1.0, 0.0, 0.0, 1.0], normalize=True)[0] != pytest.approx(1.0, abs=0.1)


def test_eps_bounds_a_nearly_flat_group():
    spread = 1e-9
    assert max(group_advantages([0.0, spread], normalize=True, eps=1e-6)) < 1e-3
    assert max(group_advantages([0.0, spread], normalize=True, eps=0.0)) > 0.5


@given(st.lists(finite, min_size=2, max_size=16), st.booleans())
def test_advantages_of_a_group_add_up_to_zero(rewards, normalize):
    advantages = group_advantages(rewards, normalize=normalize)
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6 * max(1.0, max(map(abs, advantages))))


@given(st.lists(finite, min_size=2, max_size=16), st.booleans())
def test_a_better_reward_never_has_the_worse_advantage(rewards, normalize):
    advantages = group_advantages(rewards, normalize=normalize)
    ranked = [a for _, a in sorted(zip(rewards, advantages, strict=True))]
    assert ranked == sorted(ranked)


@given(finite, st.integers(min_value=0, max_value=16), st.booleans())
def test_equal_rewards_are_exactly_zero(reward, n, normalize):
    assert group_advantages([reward] * n, normalize=normalize) == [0.0] * n


def test_a_third_three_times_is_flat_although_its_mean_rounds():
    assert group_advantages([0.1] * 3, normalize=True, eps=0.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rewards_that_are_not_finite_are_refused(bad):
    with pytest.raises(TrainerError, match="cannot be compared"):
        group_advantages([0.0, bad], normalize=True)
    with pytest.raises(TrainerError, match="sample 7 of group 3"):
        assign_advantages([sample(6, 3, 0.0), sample(7, 3, bad)], normalize=True)


def test_assign_over_interleaved_groups():
    samples = [
        sample(0, 0, 1.0),
        sample(1, 1, 0.5),
        sample(2, 0, 0.0),
        sample(3, 1, 0.5),
        sample(4, 2, 1.0),  # its only sibling failed
        sample(5, 2, 0.0, status="failed"),
        sample(6, 0, None),  # unscored is not zero
        sample(7, 3, 0.0, status="aborted"),
    ]
    counts = assign_advantages(samples, normalize=False)
    assert [s.advantage for s in samples] == [0.5, 0.0, -0.5, 0.0, 0.0, None, None, None]
    assert counts == AdvantageCounts(groups=4, trained_groups=1, flat_groups=3, dropped_samples=3)


def test_a_stale_advantage_of_a_dropped_sample_is_removed():
    dropped = sample(0, 0, 1.0, status="failed", advantage=3.0)
    assign_advantages([dropped], normalize=True)
    assert dropped.advantage is None


def test_shuffled_rewards_move_between_usable_samples_only():
    samples = [sample(i, i // 4, float(i)) for i in range(16)]
    samples[3] = sample(3, 0, 3.0, status="failed")
    dealt = shuffled_rewards(samples, seed=1)
    assert sorted(s.reward for s in dealt) == [float(i) for i in range(16)]
    assert dealt[3].reward == 3.0
    assert [s.reward for s in dealt] != [s.reward for s in samples]
    assert [s.reward for s in samples] == [float(i) for i in range(16)], "the originals stay"
    assert [s.reward for s in dealt] == [s.reward for s in shuffled_rewards(samples, seed=1)]
    assert [s.reward for s in dealt] != [s.reward for s in shuffled_rewards(samples, seed=2)]
