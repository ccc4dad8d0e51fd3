"""A finished rollout's trace -> the Sample that is trained on. Pure: reads the trace, decides, changes nothing.

A trace holds a graph of messages, each with the token ids that it adds; a root-to-leaf path (branch) is the exact sequence
that the model saw and sampled (verifiers/v1/graph.py and trace.py, 0.2.0). Ids are taken as they are, never made again
from text. The types below are the part of verifiers' classes that is read, so that this module imports no verifiers.

Rules
- One rollout is one sample: the branch of the last reply. Earlier branches (a template that is not append-only, or a
  harness that compacts) are counted in `timings["forks"]` and not trained on.
- The response begins at the first sampled token; environment tokens in it have loss mask 0 and log-prob 0.0.
- A rollout without a sampled token can teach nothing: failed, with the reason. A prompt over the context is truncated.
- A failed or aborted rollout, a scoring that failed and a reward that is not finite all leave `reward` None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_verifiers.samples import Sample, Status, WeightSpan
from miles_verifiers.wire.transport import Turn

ABORTED = "GenerationAborted"
"""Type name of the error that the transport raises for an aborted request, as traces record it."""
_ERROR_CHARS = 2000


class Node(Protocol):
    """One message: ids that it adds [n], mask [n] True on sampled ones, log-probs of the sampled ones only."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def mask(self) -> list[bool]: ...
    @property
    def logprobs(self) -> list[float]: ...


class Branch(Protocol):
    @property
    def nodes(self) -> Sequence[Node]: ...


class TraceError(Protocol):
    @property
    def type(self) -> str: ...
    @property
    def message(self) -> str: ...


class Trace(Protocol):
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
    """Fill in the tokens of the last branch; returns what is wrong with them, or nothing."""
    branches = trace.branches
    if not branches:
        return "no reply was sampled"
    if len(branches) > 1:
        sample.timings["forks"] = float(len(branches) - 1)
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    replies: list[list[int]] = []
    for node in branches[-1].nodes:
        sampled = [token for token, is_sampled in zip(node.token_ids, node.mask, strict=True) if is_sampled]
        if len(node.logprobs) != len(sampled):
            return f"a reply of {len(sampled)} tokens has {len(node.logprobs)} log-probs"
        values = iter(node.logprobs)
        tokens += node.token_ids
        mask += map(int, node.mask)
        logprobs += [next(values) if is_sampled else 0.0 for is_sampled in node.mask]
        if sampled:
            replies.append(sampled)
    if not replies:
        sample.tokens = tokens
        return "the reply is empty: no token was sampled"
    prompt_len = mask.index(1)
    sample.tokens = tokens
    sample.response_length = len(tokens) - prompt_len
    sample.loss_mask = mask[prompt_len:]
    sample.rollout_log_probs = logprobs[prompt_len:]
    sample.turns = len(replies)
    versions = _versions(replies, turns)
    if versions is None:
        return "the weight version of a reply is not known"
    sample.weight_versions = versions
    return ""


def _versions(replies: Sequence[list[int]], turns: Sequence[Turn]) -> list[WeightSpan] | None:
    """Weight versions of the branch's sampled tokens, in order, equal neighbours merged; None where a reply has no record.

    A session may hold more turns than the branch (forks, a reply that the harness never saw), so replies find theirs by ids.
    """
    spans: list[WeightSpan] = []
    rest = list(turns)
    for reply in replies:
        at = next((i for i, turn in enumerate(rest) if turn.token_ids == reply), None)
        if at is None:
            return None
        for span in rest[at].weight_versions:
            if spans and spans[-1].version == span.version:
                spans[-1].count += span.count
            else:
                spans.append(WeightSpan(span.version, span.count))
        del rest[: at + 1]
    return spans


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
