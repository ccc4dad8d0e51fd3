"""Two questions about pass counts: is the later one larger, and how exact is a rate? A leaf, pure Python."""

from __future__ import annotations

import math


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


def _check_counts(passed: int, total: int) -> None:
    if not 0 <= passed <= total:
        raise ValueError(f"{passed} of {total} is not a pass count")
