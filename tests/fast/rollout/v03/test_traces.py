"""Env-API traces, as `traces` reads them: names of errors, deadlines, prompts over the context, rewards that are not there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from miles_verifiers import errors
from miles_verifiers.record.samples import Sample, WeightSpan
from miles_verifiers.rollout.causes import cause_of
from miles_verifiers.rollout.traces import Origin, Rollout, to_sample
from miles_verifiers.rollout.v03.traces import named_error, scoring_problem, view_of
from miles_verifiers.wire.gateway_errors import error_response
from miles_verifiers.wire.transport import Turn


@dataclass
class Error:
    type: str
    message: str
    status_code: int | None = None


@dataclass
class Call:
    error: Error | None = None


@dataclass
class Reward:
    score: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.score * self.weight


@dataclass
class Node:
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]


@dataclass
class Branch:
    nodes: list[Node]
    trainable: bool = True


def said(*ids: int, lead: int = 4) -> Node:
    return Node([lead, *ids], [False] + [True] * len(ids), [-0.5] * len(ids))


def turn(*ids: int) -> Turn:
    return Turn([*ids], [WeightSpan("3", len(ids))], prompt_tokens=1, seconds=0.1)


def reply(*ids: int) -> Branch:
    return Branch([said(*ids, lead=1)])


@dataclass
class Trace:
    branches: list[Branch] = field(default_factory=lambda: [reply(7, 2)])
    rewards: dict[str, Reward | None] = field(default_factory=lambda: {"right": Reward(1.0), "short": Reward(0.5, 0.5)})
    metrics: dict[str, float | None] = field(default_factory=lambda: {"length": 2.0})
    ok: bool = True
    errors: list[Error] = field(default_factory=list)
    calls: list[Call] = field(default_factory=lambda: [Call()])
    stop_condition: str | None = "agent_completed"
    is_truncated: bool = False
    last_reply: str = "it"

    @property
    def nodes(self) -> list[Node]:
        """Every message once, branch by branch."""
        return list({id(node): node for branch in self.branches for node in branch.nodes}.values())


def sample_of(trace: Trace, *turns: Turn) -> Sample:
    rollout = Rollout(view_of(trace), turns or [turn(7, 2)], scoring_error=scoring_problem(trace))
    return to_sample(rollout, Origin(0, 0, 0, "env", "qwen3"))


def test_a_good_rollout() -> None:
    sample = sample_of(Trace())
    assert (sample.status, sample.reward, sample.rewards) == ("completed", 1.25, {"right": 1.0, "short": 0.25})
    assert (sample.tokens, sample.loss_mask, sample.metrics) == ([1, 7, 2], [1, 1], {"length": 2.0})


def test_a_reward_that_was_not_given_is_a_failed_scoring() -> None:
    sample = sample_of(Trace(rewards={"right": Reward(1.0), "short": None}))
    assert (sample.status, sample.reward) == ("failed", None)
    assert sample.error == "scoring: the reward 'short' was not given"
    assert cause_of(sample) == "bad reward"
    assert sample.tokens


@pytest.mark.parametrize(
    ("stage", "said", "cause"),
    [
        ("setup", "TaskError: task setup timed out", "setup deadline"),
        ("finalize", "TaskError: task finalize timed out", "scoring deadline"),
        ("scoring", "TaskError: scoring timed out", "scoring deadline"),
    ],
)
def test_deadlines_are_said_and_counted_as_in_older_versions(stage: str, said: str, cause: str) -> None:
    sample = sample_of(Trace(stop_condition=f"{stage}_timeout"))
    assert (sample.status, sample.error, sample.reward) == ("failed", said, None)
    assert cause_of(sample) == cause


def test_the_agents_deadline_truncates() -> None:
    sample = sample_of(Trace(stop_condition="agent_timeout"))
    assert (sample.status, sample.reward) == ("truncated", 1.25)


def test_errors_of_attempts_that_were_repeated_with_success_do_not_count() -> None:
    assert sample_of(Trace(errors=[Error("SandboxError", "gone")])).status == "completed"
    assert sample_of(Trace(errors=[Error("SandboxError", "gone")], ok=False)).error == "SandboxError: gone"


OVER = "Prompt length (600) exceeds maximum context length (512)."


@pytest.mark.parametrize(
    "trace",
    [
        Trace(branches=[], stop_condition="context_length", is_truncated=True),  # 0.3.1
        Trace(branches=[], calls=[Call(Error("ProviderError", OVER, 400))]),  # 0.4.0, the harness coped
        Trace(  # 0.4.0, the harness did not cope
            branches=[],
            ok=False,
            errors=[Error("ProviderError", OVER, 400)],
            calls=[Call(Error("ProviderError", OVER, 400))],
            stop_condition="provider_error",
        ),
    ],
)
def test_a_prompt_over_the_context_is_truncated(trace: Trace) -> None:
    sample = sample_of(trace)
    assert (sample.status, sample.stop_condition) == ("truncated", "context_length")
    assert "exceeds the context" in sample.error


def test_a_later_turn_over_the_context_keeps_the_earlier_ones() -> None:
    sample = sample_of(Trace(calls=[Call(), Call(Error("ProviderError", OVER, 400))]))
    assert (sample.status, sample.error, sample.reward) == ("truncated", "", 1.25)


def test_another_refusal_is_no_full_context() -> None:
    """Control for the three above."""
    refused = Error("ProviderError", "top_k is refused", 400)
    sample = sample_of(Trace(branches=[], ok=False, errors=[refused], calls=[Call(refused)]))
    assert (sample.status, sample.error) == ("failed", "ProviderError: top_k is refused")


def test_branches_that_are_not_to_be_trained_are_left_out() -> None:
    """A compaction that 0.4.0 tried, and the harness did not resume from; another that it did resume from."""
    question = Node([1, 5], [False, False], [])
    answer, summary = said(7, 2), said(9, 2)
    thrown_away = Branch([question, answer, said(6, 6)], trainable=False)
    accepted = Branch([question, answer, summary])
    resumed = Branch([Node([1, 9], [False, False], []), said(8, 2)])
    turns = [turn(7, 2), turn(6, 6), turn(9, 2), turn(8, 2)]
    sample = sample_of(Trace(branches=[thrown_away, accepted, resumed]), *turns)
    assert (sample.tokens, sample.turns) == ([1, 9, 4, 8, 2], 3)
    assert [fork.tokens for fork in sample.forks] == [[1, 5, 4, 7, 2, 4, 9, 2]]
    assert (sample.sampled_tokens, sample.generated_tokens) == (6, 8)
    # Control: in 0.3.1, which marks none, all that was sampled is trained on.
    for branch in (thrown_away, accepted, resumed):
        branch.trainable = True
    sample = sample_of(Trace(branches=[thrown_away, accepted, resumed]), *turns)
    assert [fork.tokens for fork in sample.forks] == [[1, 5, 4, 7, 2, 4, 6, 6], [1, 5, 4, 7, 2, 4, 9, 2]]
    assert (sample.sampled_tokens, sample.generated_tokens, sample.forks[1].loss_mask) == (8, 8, [1, 1])


def said_by_openai(error: errors.WireError) -> str:
    """openai's text of an error answer (openai/_base_client.py 2.54 `_make_status_error_from_response`)."""
    import json

    response: Any = error_response(error)
    return f"Error code: {response.status} - {json.loads(response.body)}"


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.WireError)],
)
def test_every_error_of_the_wire_gets_its_name_back(kind: type[errors.WireError]) -> None:
    named = named_error("ProviderError", said_by_openai(kind("it said \"no\" {to} 'it'", where="engine 1")))
    assert named.type == kind.__name__
    assert named.message.startswith("it said \"no\" {to} 'it'")


@pytest.mark.parametrize(
    "message",
    ["", "no braces", "{", "x {'error': 5}", "x {'error': {'code': 'other'}}", "{1: 2}", "{'error': {'code': []}}"],
)
def test_other_errors_stay_as_they_are(message: str) -> None:
    assert (named_error("ProviderError", message).type, named_error("ProviderError", message).message) == (
        "ProviderError",
        message,
    )
    assert named_error("HarnessError", said_by_openai(errors.ReplyInvalid("x"))).type == "HarnessError"


def test_an_aborted_generation_is_aborted() -> None:
    aborted = Error("ProviderError", said_by_openai(errors.GenerationAborted("weights")), 502)
    sample = sample_of(Trace(ok=False, errors=[aborted], calls=[Call(aborted)]))
    assert (sample.status, sample.error) == ("aborted", "GenerationAborted: weights")
