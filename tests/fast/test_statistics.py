"""Against values computed by hand from the definitions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.statistics import fisher_greater, wilson_interval


def test_fisher_on_the_lady_tasting_tea() -> None:
    # Fisher 1935: eight cups, four of each kind. All right: 1 / 70; three or more right: (1 + 16) / 70.
    assert fisher_greater(0, 4, 4, 4) == 1 / 70
    assert fisher_greater(1, 4, 3, 4) == 17 / 70
    assert fisher_greater(2, 4, 2, 4) == 53 / 70
    assert fisher_greater(4, 4, 0, 4) == 1.0


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fisher_counts_the_ways_to_deal_the_passes(data: st.DataObject) -> None:
    before, after = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    x, y = data.draw(st.integers(0, before)), data.draw(st.integers(0, after))
    cards = [1] * (x + y) + [0] * (before + after - x - y)
    dealt = [sum(cards[k] for k in hand) for hand in combinations(range(len(cards)), after)]
    assert fisher_greater(x, before, y, after) == float(Fraction(sum(hand >= y for hand in dealt), len(dealt)))


def test_fisher_has_a_direction_and_a_size() -> None:
    assert fisher_greater(20, 160, 100, 160) < 1e-15
    assert fisher_greater(100, 160, 20, 160) > 1 - 1e-15
    assert fisher_greater(20, 160, 20, 160) > 0.5
    assert fisher_greater(0, 2000, 2000, 2000) == 0.0  # 1 in 10^1202: no float is that small, and nothing overflows
    assert fisher_greater(0, 0, 0, 0) == 1.0


def test_wilson_by_hand() -> None:
    # 8 of 10 with z = 2: centre (0.8 + 0.2) / 1.4, half width 2 / 1.4 * sqrt(0.016 + 0.01).
    low, high = wilson_interval(8, 10, z=2)
    assert low == pytest.approx(1 / 1.4 - 2 / 1.4 * math.sqrt(0.026))
    assert high == pytest.approx(1 / 1.4 + 2 / 1.4 * math.sqrt(0.026))
    assert wilson_interval(0, 4, z=2) == pytest.approx((0.0, 0.5))
    assert wilson_interval(4, 4, z=2) == pytest.approx((0.5, 1.0))
    assert wilson_interval(0, 0) == (0.0, 1.0)


@given(st.integers(0, 200), st.integers(0, 200))
def test_wilson_holds_the_rate_and_stays_within_0_and_1(passed: int, missed: int) -> None:
    low, high = wilson_interval(passed, passed + missed)
    assert 0 <= low <= high <= 1
    if passed + missed:
        assert low - 1e-12 <= passed / (passed + missed) <= high + 1e-12


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3), (1, 0)])
def test_impossible_counts_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not a pass count"):
        wilson_interval(*counts)
    with pytest.raises(ValueError, match="not a pass count"):
        fisher_greater(*counts, 1, 2)
    with pytest.raises(ValueError, match="not a pass count"):
        fisher_greater(1, 2, *counts)
