"""Traces -> samples: ids and masks exactly as the model saw them, and no bad rollout that looks like a good one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_verifiers.record.samples import Sample, WeightSpan
from miles_verifiers.rollout.traces import Origin, Rollout, to_sample
from miles_verifiers.wire.transport import Turn

ORIGIN = Origin(group_index=3, index=14, task_index=5, environment="env", renderer="default", prompt="say it")


@dataclass
class Node:
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Branch:
    nodes: list[Node]


@dataclass
class Error:
    type: str
    message: str


def nodes_of(branches: list[Branch]) -> list[Node]:
    """Every message once, branch by branch."""
    return list({id(node): node for branch in branches for node in branch.nodes}.values())


@dataclass
class Trace:
    branches: list[Branch] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=lambda: {"correct": 1.0, "short": 0.5})
    metrics: dict[str, float] = field(default_factory=lambda: {"passed": 1.0})
    error: Error | None = None
    stop_condition: str | None = "agent_completed"
    is_truncated: bool = False
    last_reply: str = "it"

    @property
    def nodes(self) -> list[Node]:
        return nodes_of(self.branches)


def said(ids: list[int], logprobs: list[float] | None = None, before: list[int] | None = None) -> Node:
    """A reply: the generation prompt `before`, then the sampled `ids`."""
    lead = before or []
    return Node([*lead, *ids], [False] * len(lead) + [True] * len(ids), logprobs or [-0.5] * len(ids))


def given_ids(ids: list[int]) -> Node:
    return Node(ids, [False] * len(ids))


def turn(ids: list[int], *versions: tuple[str, int]) -> Turn:
    spans = [WeightSpan(version, count) for version, count in versions] or [WeightSpan("7", len(ids))]
    return Turn(ids, spans, prompt_tokens=3, seconds=0.1)


def two_turns() -> Branch:
    return Branch(
        [
            given_ids([11, 12]),
            said([21, 2], [-0.3, -0.1], before=[13]),
            given_ids([14, 15]),
            said([22, 2], [-0.7, -0.2], before=[16]),
        ]
    )


def sample_of(trace: Trace | None, turns: list[Turn] | None = None, **known: Any) -> Sample:
    return to_sample(Rollout(trace, turns or [], **known), ORIGIN)


class TestTokens:
    def test_two_turns(self) -> None:
        sample = sample_of(Trace([two_turns()]), [turn([21, 2]), turn([22, 2])])
        assert sample == Sample(
            group_index=3,
            index=14,
            task_index=5,
            tokens=[11, 12, 13, 21, 2, 14, 15, 16, 22, 2],
            response_length=7,
            loss_mask=[1, 1, 0, 0, 0, 1, 1],
            rollout_log_probs=[-0.3, -0.1, 0.0, 0.0, 0.0, -0.7, -0.2],
            reward=1.5,
            rewards={"correct": 1.0, "short": 0.5},
            metrics={"passed": 1.0},
            status="completed",
            stop_condition="agent_completed",
            turns=2,
            generated_tokens=4,
            weight_versions=[WeightSpan("7", 4)],
            renderer="default",
            environment="env",
            prompt="say it",
            response="it",
        )
        assert sample.usable

    def test_versions_change_between_and_within_turns(self) -> None:
        turns = [turn([21, 2], ("7", 1), ("8", 1)), turn([22, 2], ("8", 2))]
        assert sample_of(Trace([two_turns()]), turns).weight_versions == [WeightSpan("7", 1), WeightSpan("8", 3)]

    def test_a_turn_that_the_branch_does_not_have_is_passed_over(self) -> None:
        turns = [turn([21, 2], ("7", 2)), turn([99], ("9", 1)), turn([22, 2], ("8", 2))]
        assert sample_of(Trace([two_turns()]), turns).weight_versions == [WeightSpan("7", 2), WeightSpan("8", 2)]

    def test_a_reply_without_a_known_version_is_not_trained_on(self) -> None:
        sample = sample_of(Trace([two_turns()]), [turn([21, 2])])
        assert (sample.status, sample.reward) == ("failed", None)
        assert "weight version" in sample.error

    def test_missing_log_probs_are_not_taken_as_zero(self) -> None:
        branch = Branch([given_ids([11]), Node([21, 2], [True, True], [-0.5])])
        sample = sample_of(Trace([branch]), [turn([21, 2])])
        assert not sample.usable
        assert "2 tokens has 1 log-probs" in sample.error


class TestStatus:
    def test_truncated_by_length_is_still_used(self) -> None:
        sample = sample_of(Trace([two_turns()], is_truncated=True), [turn([21, 2]), turn([22, 2])])
        assert (sample.status, sample.error, sample.usable) == ("truncated", "", True)

    @pytest.mark.parametrize(
        ("trace", "status", "said"),
        [
            (Trace(stop_condition="context_length", is_truncated=True), "truncated", "exceeds the context"),
            (Trace(stop_condition="harness_timeout", is_truncated=True), "failed", "harness_timeout"),
            (Trace(), "failed", "no reply was sampled"),
            (Trace([Branch([given_ids([11]), said([])])]), "failed", "the reply is empty"),
            (Trace(error=Error("ReplyInvalid", "NaN")), "failed", "ReplyInvalid: NaN"),
            (Trace([two_turns()], error=Error("TaskError", "scoring")), "failed", "TaskError: scoring"),
            (Trace(error=Error("GenerationAborted", "weights")), "aborted", "GenerationAborted: weights"),
        ],
    )
    def test_rollouts_that_teach_nothing_say_why(self, trace: Trace, status: str, said: str) -> None:
        sample = sample_of(trace, [turn([21, 2]), turn([22, 2])])
        assert sample.status == status
        assert said in sample.error
        assert not sample.usable

    def test_a_rollout_that_never_began(self) -> None:
        sample = sample_of(None, ended="the step's deadline passed")
        assert (sample.status, sample.error, sample.turns) == ("failed", "the step's deadline passed", 0)

    def test_a_rollout_that_was_ended(self) -> None:
        sample = sample_of(Trace([two_turns()]), [turn([21, 2]), turn([22, 2])], ended="deadline")
        assert (sample.status, sample.error, sample.reward) == ("failed", "deadline", None)
        assert sample.tokens  # kept for people


class TestRewards:
    def reward(self, key: str | None = None, **trace: Any) -> Sample:
        origin = Origin(0, 0, 0, "env", "default", reward_key=key)
        return to_sample(Rollout(Trace([Branch([given_ids([1]), said([2])])], **trace), [turn([2])]), origin)

    def test_the_weighted_sum_or_the_one_that_is_named(self) -> None:
        assert self.reward().reward == 1.5
        assert self.reward("short").reward == 0.5

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_rewards_that_are_no_numbers(self, value: float) -> None:
        sample = self.reward(rewards={"correct": 1.0, "odd": value})
        assert (sample.status, sample.reward) == ("failed", None)
        assert "'odd'" in sample.error

    def test_unscored_is_not_zero(self) -> None:
        assert self.reward(rewards={}).reward is None
        assert self.reward("missing").reward is None
        assert self.reward(rewards={"correct": 0.0}).reward == 0.0

    def test_a_group_that_could_not_be_scored_keeps_its_tokens(self) -> None:
        trace = Trace([two_turns()])
        sample = sample_of(trace, [turn([21, 2]), turn([22, 2])], scoring_error="TaskError: boom")
        assert (sample.status, sample.error, sample.reward) == ("failed", "scoring: TaskError: boom", None)
        assert sample.response_length == 7
        assert sample.rewards == trace.rewards
