"""Rules on rewards, on what the environment says of success, and on the advantages made of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

from miles_verifiers.grpo import group_advantages
from miles_verifiers.record.samples import Sample
from miles_verifiers.verify.rule import Problem, Rule, rule
from miles_verifiers.verify.run import Run

_TOLERANCE = 1e-6
"""For sums of a few numbers near 1; float64 is off by less than 1e-15."""


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _differ(a: float, b: float) -> bool:
    # Not abs(a - b) > tolerance: that is false for NaN.
    return not abs(a - b) <= _TOLERANCE


@rule()
def finite_rewards(run: Run) -> Iterator[Problem]:
    """Rewards and metrics are finite, and only a rollout that failed or was aborted has none."""
    for where, sample in run.samples():
        if sample.reward is None:
            if sample.status not in ("failed", "aborted"):
                yield Problem(where, f"no reward, though {sample.status}")
        elif not math.isfinite(sample.reward):
            yield Problem(where, f"reward = {sample.reward}")
        for kind, values in (("rewards", sample.rewards), ("metrics", sample.metrics)):
            for name, value in values.items():
                if not math.isfinite(value):
                    yield Problem(where, f"{kind}[{name!r}] = {value}")


@rule()
def reward_names(run: Run) -> Iterator[Problem]:
    """Every scored sample has exactly its environment's rewards."""
    configured = set() if run.config.environments else set(run.config.verify.reward_names)
    expected: dict[str, set[str]] = {}
    for where, sample in run.samples():
        if sample.reward is None:
            continue
        # Where the configuration names none, and where there are several environments: those of the first sample.
        names = configured or expected.setdefault(sample.environment, set(sample.rewards))
        missing, unknown = names - sample.rewards.keys(), sample.rewards.keys() - names
        if missing or unknown:
            yield Problem(where, f"rewards missing: {sorted(missing)}, unknown: {sorted(unknown)}")


@rule()
def reward_sums(run: Run) -> Iterator[Problem]:
    """The reward that was trained on is the sum of the named rewards, or the one named by reward_key."""
    for rollout in run.rollouts:
        rows = list(rollout.placed())
        pairs = [(where, s.reward, _named_reward(run, s)) for where, s in rows if s.reward is not None]
        if run.config.rollout.reward_control == "shuffle":
            # Dealt out anew among the samples of the step, so that only the collection is the same.
            got, expected = sorted(r for _, r, _ in pairs), sorted(n for _, _, n in pairs)
            pairs = [(rollout.name, g, e) for g, e in zip(got, expected, strict=True)]
        for where, reward, named in pairs:
            if _differ(reward, named):
                yield Problem(where, f"reward = {reward}, the named rewards give {named}")


def _named_reward(run: Run, sample: Sample) -> float:
    key = run.config.rollout.reward_key
    return math.fsum(sample.rewards.values()) if key is None else sample.rewards.get(key, math.nan)


@rule()
def pass_metric(run: Run) -> Iterator[Problem]:
    """Every scored sample says by 0 or 1 whether it passed."""
    name = run.config.verify.pass_metric
    for where, sample in run.samples():
        if sample.reward is not None and sample.metrics.get(name) not in (0, 1):
            yield Problem(where, f"metrics[{name!r}] = {sample.metrics.get(name)}, expected 0 or 1")


@rule()
def some_passed(run: Run) -> Iterator[Problem]:
    """At least min_passed samples of the run passed."""
    passed = sum(run.passed(sample) for _, sample in run.samples())
    if passed < run.config.verify.min_passed:
        yield Problem("", f"{passed} samples passed, min_passed is {run.config.verify.min_passed}")


@rule(asked=lambda run: bool(run.config.verify.group_share_rewards))
def group_shares(run: Run) -> Iterator[Problem]:
    """A group's winners passed and share its group reward equally; where none passed there is none to share."""
    for where, samples in run.groups():
        scored = [sample for sample in samples if sample.reward is not None]
        somebody_passed = any(run.passed(sample) for sample in scored)
        for name, total in run.config.verify.group_share_rewards.items():
            expected = total if somebody_passed else 0.0
            for message in _share_problems(run, scored, name, expected):
                yield Problem(where, message)


def _share_problems(run: Run, scored: list[Sample], name: str, expected: float) -> Iterator[str]:
    winners = [sample for sample in scored if sample.rewards.get(name, 0.0) != 0]
    shares = [sample.rewards[name] for sample in winners]
    for sample in winners:
        if not run.passed(sample):
            yield f"sample {sample.index} did not pass but has {name} = {sample.rewards[name]}"
    if shares and _differ(min(shares), max(shares)):
        yield f"{name} is not shared equally: {shares}"
    if _differ(math.fsum(shares), expected):
        yield f"{name} sums to {math.fsum(shares)}, expected {expected}"


@rule()
def advantages(run: Run) -> Iterator[Problem]:
    """Advantages are those that the rewards give within each group, and sum to 0."""
    for where, samples in run.groups():
        for sample in samples:
            if not sample.usable and sample.advantage is not None:
                yield Problem(where, f"sample {sample.index} cannot be trained on but has an advantage")
        # A reward that is not finite is the finding of another rule and leaves nothing to compare.
        compared = [sample for sample in samples if sample.usable]
        if all(_is_number(sample.reward) for sample in compared):
            yield from (Problem(where, message) for message in _advantage_problems(run, compared))


def _advantage_problems(run: Run, compared: list[Sample]) -> Iterator[str]:
    rewards = [sample.reward for sample in compared if sample.reward is not None]
    expected = group_advantages(rewards, normalize=run.config.training.normalize_advantages)
    for sample, value in zip(compared, expected, strict=True):
        if sample.advantage is None or _differ(sample.advantage, value):
            yield f"sample {sample.index} has advantage {sample.advantage}, its group's rewards give {value}"
    total = math.fsum(sample.advantage or 0.0 for sample in compared)
    if _differ(total, 0.0):
        yield f"the advantages sum to {total}"


RULES: tuple[Rule, ...] = (
    finite_rewards,
    reward_names,
    reward_sums,
    pass_metric,
    some_passed,
    group_shares,
    advantages,
)
