"""What becomes of a group of rollouts: trained on, or dropped and why. Pure.

    a sample that cannot be used    is left out, its siblings are compared ("mask"), or takes the whole group along ("drop")
    fewer than two usable samples   nothing can be compared: dropped
    all rewards equal               no gradient: kept with advantage 0 ("mask"), or dropped
    the dynamic filter says no      dropped, under the filter's own reason

A group that is dropped makes room for one of the next task; how many may be dropped in a row is bounded by the collector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.causes import BAD_REWARD, EQUAL_REWARDS, cause_of, most_common

Filter = Callable[[Sequence[Sample]], tuple[bool, str]]
"""Of a group's usable samples: whether to keep the group, and the reason where not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`cause` says why a group was dropped; empty where it is kept."""

    cause: str = ""

    @property
    def kept(self) -> bool:
        return not self.cause


def judge(samples: Sequence[Sample], rollout: RolloutSection, dynamic_filter: Filter | None = None) -> Verdict:
    """What becomes of a finished group. Raises what the filter raises."""
    usable = [sample for sample in samples if sample.usable]
    lost = [sample for sample in samples if not sample.usable]
    bad_rewards = [sample for sample in lost if cause_of(sample) == BAD_REWARD]
    failed = [sample for sample in lost if cause_of(sample) != BAD_REWARD]
    if len(usable) < 2:
        return Verdict(most_common(lost) or "too few samples")
    if failed and rollout.failed_rollouts == "drop":
        return Verdict(most_common(failed) or "unusable sample")
    if bad_rewards and rollout.bad_rewards == "drop":
        return Verdict(BAD_REWARD)
    if rollout.equal_rewards == "drop" and len({sample.reward for sample in usable}) == 1:
        return Verdict(EQUAL_REWARDS)
    if dynamic_filter is not None:
        keep, reason = dynamic_filter(usable)
        if not keep:
            return Verdict(f"filter: {reason}" if reason else "filter")
    return Verdict()
