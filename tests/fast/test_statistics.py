"""Against values computed by hand from the definitions."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.statistics import fisher_greater, mean_interval, student_quantile, wilson_interval


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


# Table of Student's t, two-sided 95 %, as printed in any textbook.
@pytest.mark.parametrize(
    ("freedom", "quantile", "relative"),
    [(1, 12.7062, 1e-5), (2, 4.30265, 1e-5), (3, 3.18245, 0.01), (4, 2.77645, 0.003), (5, 2.57058, 0.001),
     (10, 2.22814, 1e-4), (30, 2.04227, 1e-5), (1000, 1.96234, 1e-5)],
)  # fmt: skip
def test_student_quantiles_are_those_of_the_tables(freedom: int, quantile: float, relative: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=relative)
    assert student_quantile(0.025, freedom) == pytest.approx(-quantile, rel=relative)


def test_the_interval_of_a_mean() -> None:
    # 1, 2, 3: mean 2, s = 1, t(2) = 4.30265.
    low, high = mean_interval([1.0, 2.0, 3.0]) or (0.0, 0.0)
    assert (low, high) == (pytest.approx(2 - 4.30265 / 3**0.5, rel=1e-5), pytest.approx(2 + 4.30265 / 3**0.5, rel=1e-5))
    assert mean_interval([0.5, 0.5]) == (0.5, 0.5)
    assert mean_interval([0.5]) is None
    assert mean_interval([]) is None


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_impossible_quantiles(probability: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="no quantile"):
        student_quantile(probability, freedom)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    """Of 2,000 samples of 8 numbers about 95 % of the intervals hold the true mean; a 50 % interval holds it half the time."""
    rng = random.Random(7)
    hits = {0.95: 0, 0.5: 0}
    for _ in range(2000):
        values = [rng.gauss(3.0, 2.0) for _ in range(8)]
        for level in hits:
            low, high = mean_interval(values, level) or (0.0, 0.0)
            hits[level] += low <= 3.0 <= high
    assert 0.94 < hits[0.95] / 2000 < 0.96
    assert 0.47 < hits[0.5] / 2000 < 0.53
