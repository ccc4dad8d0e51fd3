"""Group relative advantages: how much better a sample did than its siblings. Pure Python, no torch.

GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) compares the samples of one task with each other:

    advantage_i = (reward_i - mean(rewards)) / (std(rewards) + eps)

The paper does not say which standard deviation. This is the sample one (divisor n - 1), with eps = 1e-6, as in slime and
Miles. Without division (`normalize=False`) it is the variant of Dr. GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from miles_verifiers.errors import TrainerError
from miles_verifiers.record.samples import Sample

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class AdvantageCounts:
    """What became of the groups of one training step.

    `groups` = `trained_groups` + `flat_groups`. A flat group has rewards without spread, or fewer than two usable
    samples: there is nothing to learn from it. `dropped_samples` were not usable and took no part in any group.
    """

    groups: int
    trained_groups: int
    flat_groups: int
    dropped_samples: int


def group_advantages(rewards: Sequence[float], *, normalize: bool, eps: float = EPS) -> list[float]:
    """Advantages of one group, [n] for n rewards; exactly 0.0 for all where all rewards are equal or n < 2.

    Raises TrainerError for a reward that is NaN or infinite.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise TrainerError(
                f"a reward of {reward} cannot be compared with its group {list(rewards)}",
                next_step="let the environment's reward functions return finite numbers",
            )
    # Not by a small spread: the mean of equal numbers may differ from them in the last bit.
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + eps) for c in centred]


def assign_advantages(samples: Iterable[Sample], normalize: bool) -> AdvantageCounts:
    """Set `advantage` of each sample, in place: None where it is not usable, else relative to its usable siblings.

    Groups are told apart by `group_index`; their samples need not lie together. Raises TrainerError for a reward that is
    not finite, naming the sample.
    """
    groups: dict[int, list[Sample]] = {}
    dropped = 0
    for sample in samples:
        members = groups.setdefault(sample.group_index, [])
        sample.advantage = None
        if sample.usable:
            members.append(sample)
        else:
            dropped += 1

    trained = 0
    for members in groups.values():
        rewards = [_reward(sample) for sample in members]
        advantages = group_advantages(rewards, normalize=normalize)
        for sample, advantage in zip(members, advantages, strict=True):
            sample.advantage = advantage
        trained += any(advantages)
    return AdvantageCounts(len(groups), trained, len(groups) - trained, dropped)


def shuffled_rewards(samples: Sequence[Sample], seed: int) -> list[Sample]:
    """A control under which nothing can be learned: copies of the samples, rewards dealt out anew among the usable ones.

    Only `reward` moves; the named rewards and metrics keep telling what really happened.
    """
    usable = [i for i, sample in enumerate(samples) if sample.usable]
    rewards = [samples[i].reward for i in usable]
    random.Random(seed).shuffle(rewards)  # noqa: S311 - an experiment's control, not a secret
    dealt = dict(zip(usable, rewards, strict=True))
    return [replace(sample, reward=dealt.get(i, sample.reward)) for i, sample in enumerate(samples)]


def _reward(sample: Sample) -> float:
    assert sample.reward is not None, "usable samples have a reward"
    if not math.isfinite(sample.reward):
        raise TrainerError(
            f"the reward of a sample is {sample.reward}",
            where=f"sample {sample.index} of group {sample.group_index} ({sample.environment or 'environment unknown'})",
            next_step="let the environment's reward functions return finite numbers; rewards: "
            + ", ".join(f"{name} = {value}" for name, value in sample.rewards.items()),
        )
    return sample.reward
