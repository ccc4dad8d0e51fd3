"""Is a later pass count larger, how exact is a rate, how exact is a mean? A leaf, pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev


def fisher_greater(passed_before: int, total_before: int, passed_after: int, total_after: int) -> float:
    """p-value of Fisher's exact test that the later pass probability is larger than the earlier one.

    With both totals and the sum of passes held fixed, the later count is hypergeometric if nothing changed; the p-value is
    the probability of a count at least as large as the one seen (R. A. Fisher, Statistical Methods for Research Workers,
    5th ed., 1934). Summed in integers, so exact until the last division.

    The test takes rollouts as independent. Rollouts of one task resemble each other, which makes the p-value too small
    where few tasks were drawn: read it as a bound for chance in sampling, not for the choice of tasks.
    """
    _check_counts(passed_before, total_before)
    _check_counts(passed_after, total_after)
    total, passed = total_before + total_after, passed_before + passed_after
    extreme = sum(
        math.comb(passed, count) * math.comb(total - passed, total_after - count)
        for count in range(passed_after, min(passed, total_after) + 1)
    )
    return extreme / math.comb(total, total_after)


def wilson_interval(passed: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Confidence interval of a pass rate (E. B. Wilson, JASA 22, 1927); `z` = 1.96 gives 95 %.

    Unlike rate +- z * standard error it stays within [0, 1] and has a width at 0 and at 1. No samples: (0, 1).
    """
    _check_counts(passed, total)
    if total == 0:
        return 0.0, 1.0
    rate, spread = passed / total, z * z / total
    centre = (rate + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(rate * (1 - rate) / total + spread / (4 * total))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """Confidence interval of the mean of independent values: mean +- t * s / sqrt(n) (Student, Biometrika 6, 1908).

    None for fewer than two values, of which no spread is known. Values that depend on each other, as rewards of one task do,
    make it too narrow: give their means.
    """
    if len(values) < 2:
        return None
    mean = fmean(values)
    half = student_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def student_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t with `freedom` degrees of freedom.

    Exact for 1 and 2 of them; else by expansion from the normal quantile (Abramowitz & Stegun 26.7.5, four terms), which is
    off by 1 % at 3 degrees for a probability of 0.975, and by 0.1 % at 5.
    """
    if freedom < 1 or not 0 < probability < 1:
        raise ValueError(f"there is no quantile {probability} of Student's t with {freedom} degrees of freedom")
    if freedom == 1:
        return math.tan(math.pi * (probability - 0.5))
    if freedom == 2:
        return (2 * probability - 1) / math.sqrt(2 * probability * (1 - probability))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4.0,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def _check_counts(passed: int, total: int) -> None:
    if not 0 <= passed <= total:
        raise ValueError(f"{passed} of {total} is not a pass count")
