"""From replies to programs and from a group's results to shares. Pure: no I/O, no Verifiers.

Axis legend: [N] the rollouts of one group (one task).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

# A fence that the token limit cut off has no closing mark; it still counts, up to the end of the reply.
_FENCE = re.compile(r"```(?:python3?|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


def program_of(reply: str) -> str:
    """The last fenced Python block of a reply, else the whole reply; "" where there is nothing to run."""
    blocks = _FENCE.findall(reply)
    return (blocks[-1] if blocks else reply).strip()


def is_correct(stdout: str, expected: str) -> bool:
    """Whether a program printed what was asked for; white space around it does not count."""
    return stdout.strip() == expected.strip()


def shares(costs: Sequence[float], passed: Sequence[bool]) -> list[float]:
    """One reward of 1, split evenly among the passing rollouts of least cost.

    Args:
        costs: [N] what is to be small, such as characters or seconds. A NaN or infinite cost never wins.
        passed: [N] whether the rollout may win at all.

    Returns:
        [N] 1/k for each of the k winners, else 0.0. Sums to 1 where somebody may win, else to 0.

    Raises:
        ValueError: the two lists differ in length.
    """
    entries = [cost if ok and math.isfinite(cost) else math.inf for cost, ok in zip(costs, passed, strict=True)]
    best = min(entries, default=math.inf)
    if best == math.inf:
        return [0.0] * len(entries)
    return [1.0 / entries.count(best) if cost == best else 0.0 for cost in entries]
