"""A finished rollout's trace -> the Sample that is trained on. Pure: reads the trace, decides, changes nothing.

Token ids and masks are those of the trace's branches, as `branches` unfolds them. The types below are the part of verifiers'
classes that is read, so that this module imports no verifiers.

Rules
- One rollout is one sample: the branch of the last reply is its own sequence, what other branches add are its forks.
- A rollout whose last branch has no sampled token can teach nothing: failed, with the reason. So is one of which any branch
  contradicts itself. A prompt over the context is truncated.
- A failed or aborted rollout, a scoring that failed and a reward that is not finite all leave `reward` None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_verifiers.record.samples import Sample, Status
from miles_verifiers.rollout.branches import Branch, Node, unfold
from miles_verifiers.wire.transport import Turn

ABORTED = "GenerationAborted"
"""Type name of the error that the transport raises for an aborted request, as traces record it."""
_ERROR_CHARS = 2000


class TraceError(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...


class Trace(Protocol):
    @property
    def nodes(self) -> Sequence[Node]: ...
    @property
    def branches(self) -> Sequence[Branch]: ...
    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def metrics(self) -> Mapping[str, float]: ...
    @property
    def error(self) -> TraceError | None: ...
    @property
    def stop_condition(self) -> str | None: ...
    @property
    def is_truncated(self) -> bool: ...
    @property
    def last_reply(self) -> str: ...


@dataclass(slots=True)
class Rollout:
    """What a backend knows of one rollout when it is over."""

    trace: Trace | None
    """None where it never began."""
    turns: Sequence[Turn] = ()
    """What the transport recorded for it."""
    ended: str = ""
    """Why it was ended from outside: a deadline, a group that could not be built."""
    scoring_error: str = ""
    """Why its group could not be scored."""
    seed: int | None = None
    """The sampling seed that it ran with."""
    earlier: Sequence[str] = ()
    """What ended the attempts before this one."""
    timings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a sample belongs."""

    group_index: int
    index: int
    task_index: int
    environment: str
    renderer: str
    prompt: str = ""
    reward_key: str | None = None


def to_sample(rollout: Rollout, origin: Origin) -> Sample:
    """The sample of one rollout. Never raises for what a rollout did: a bad rollout is a failed sample that says why."""
    sample = Sample(
        group_index=origin.group_index,
        index=origin.index,
        task_index=origin.task_index,
        environment=origin.environment,
        renderer=origin.renderer,
        prompt=origin.prompt,
        seed=rollout.seed,
        turns=0,
        generated_tokens=sum(len(turn.token_ids) for turn in rollout.turns),
        timings=dict(rollout.timings),
    )
    if rollout.earlier:
        sample.timings["retries"] = float(len(rollout.earlier))
    trace = rollout.trace
    if trace is None:
        return _ended(sample, "failed", rollout.ended or "the rollout never began")
    sample.response = trace.last_reply
    sample.stop_condition = trace.stop_condition or ""
    # Numbers that are not finite stay out of the sample, which is dumped whatever became of it; they are its error.
    sample.rewards = _finite(trace.rewards)
    sample.metrics = _finite(trace.metrics)
    problem = _put_tokens(sample, trace, rollout.turns)
    status, why = _status(trace, rollout.ended, problem)
    if status in ("failed", "aborted"):
        return _ended(sample, status, why)
    sample.status, sample.error = status, why
    if rollout.scoring_error:
        return _ended(sample, "failed", f"scoring: {rollout.scoring_error}")
    return _put_reward(sample, trace, origin.reward_key)


def failure(rollout: Rollout) -> str:
    """Why nothing can be learned from a rollout, whatever its reward; empty for one that did its part."""
    if rollout.trace is None:
        return rollout.ended or "the rollout never began"
    scratch = Sample(group_index=0, index=0, task_index=0)
    status, why = _status(rollout.trace, rollout.ended, _put_tokens(scratch, rollout.trace, rollout.turns))
    return why if status in ("failed", "aborted") else ""


def _ended(sample: Sample, status: Status, why: str) -> Sample:
    sample.status, sample.error, sample.reward = status, why[:_ERROR_CHARS], None
    return sample


def _status(trace: Trace, ended: str, problem: str) -> tuple[Status, str]:
    """Status and reason. The first cause counts: what ended a rollout explains why its tokens are missing."""
    if trace.error is not None:
        status: Status = "aborted" if trace.error.type == ABORTED else "failed"
        return status, f"{trace.error.type}: {trace.error.message}"
    if ended:
        return "failed", ended
    if problem and trace.stop_condition == "context_length" and not trace.branches:
        return "truncated", "the prompt alone exceeds the context"
    if problem:
        return "failed", f"{problem} (stopped by {trace.stop_condition or 'nothing'})"
    return ("truncated" if trace.is_truncated else "completed"), ""


def _put_tokens(sample: Sample, trace: Trace, turns: Sequence[Turn]) -> str:
    """Fill in the tokens of all branches; returns what is wrong with them, or nothing."""
    branches = trace.branches
    if not branches:
        return "no reply was sampled"
    unfolded = unfold(branches, trace.nodes, turns)
    own, *sample.forks = unfolded.sequences
    sample.tokens = own.tokens
    sample.response_length = own.response_length
    sample.loss_mask = own.loss_mask
    sample.rollout_log_probs = own.rollout_log_probs
    sample.weight_versions = own.weight_versions
    sample.turns = unfolded.replies
    return unfolded.problem


def _finite(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _put_reward(sample: Sample, trace: Trace, reward_key: str | None) -> Sample:
    for kind, values in (("reward", trace.rewards), ("metric", trace.metrics)):
        for name, value in values.items():
            if not math.isfinite(value):
                return _ended(sample, "failed", f"scoring: the {kind} {name!r} is {value}")
    if not sample.rewards:
        return _ended(sample, "failed", "scoring: the environment gave no reward")
    if reward_key is None:
        sample.reward = math.fsum(sample.rewards.values())
    elif reward_key in sample.rewards:
        sample.reward = sample.rewards[reward_key]
    else:
        names = ", ".join(sorted(sample.rewards))
        return _ended(sample, "failed", f"scoring: no reward is named {reward_key!r}, only {names}")
    return sample
