"""Sample: one rollout as the trainer and the dump see it. Plain data; a leaf that every room may use.

Axis legend: [T] all tokens of the sequence, [R] tokens of the response (the last R of T).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Status = Literal["completed", "truncated", "failed", "aborted"]
STATUSES: tuple[Status, ...] = ("completed", "truncated", "failed", "aborted")


@dataclass(slots=True)
class WeightSpan:
    """`count` consecutive response tokens that were sampled under weight version `version`."""

    version: str
    count: int


class TokenSequence(Protocol):
    """What the model is trained on in one piece: a sample's own tokens, or those of one of its forks."""

    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    train_log_probs: list[float]
    weight_versions: list[WeightSpan]


@dataclass(slots=True)
class Fork:
    """A further token sequence of a rollout whose history did not only grow: compacted, rewritten, or asked twice.

    After the reply 21 2 to the prompt 11 12 13, the harness asked anew from the first two messages, 11 12, and the new prompt
    11 12 14 was answered with 31 2. The latter is the sample's own sequence, [11, 12, 14, 31, 2]; the former is this fork:

        tokens            [11, 12, 13, 21, 2]     [T]  exactly what the model saw and sampled
        response_length   2                        R   begins at the first token that this fork trains
        loss_mask         [1, 1]                  [R]  1 where the token was sampled and no earlier sequence trains it
        shared_length     2                            the first two ids are those of an earlier sequence

    The other fields are those of `Sample`, for this sequence.
    """

    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    train_log_probs: list[float] = field(default_factory=list)
    weight_versions: list[WeightSpan] = field(default_factory=list)
    shared_length: int = 0
    """So many leading tokens are the same messages as in an earlier sequence of the sample. What of them was sampled is
    trained there, never here."""


@dataclass(slots=True)
class Sample:
    """One rollout of one task: one member of its group, one reward, one advantage.

    A prompt of three ids answered with two sampled ids, the second of them the end of turn:

        tokens            [11, 12, 13, 21, 2]     [T]
        response_length   2                        R
        loss_mask         [1, 1]                  [R]  1 where the policy sampled the token, 0 where the environment wrote it
        rollout_log_probs [-0.3, -0.1]            [R]  the engine's, nats; 0.0 where loss_mask is 0

    These are the tokens of the rollout's last branch, which most rollouts have only. Sampled tokens that are not on it are in
    `forks`: `sequences` has them all, and over them every token that the rollout sampled counts exactly once.

    `reward` is the weighted sum of `rewards`; None means that scoring failed, which is not the same as zero.
    """

    group_index: int
    """Which group (one task, n samples) of the whole run."""
    index: int
    """Running number of the sample in the whole run."""
    task_index: int
    """The task's number in its taskset."""
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    train_log_probs: list[float] = field(default_factory=list)
    """[R] The trainer's, nats, under the weights that sampled; empty until the training step saw the sample."""
    reward: float | None = None
    rewards: dict[str, float] = field(default_factory=dict)
    """Weighted rewards by name, as the environment gives them."""
    metrics: dict[str, float] = field(default_factory=dict)
    advantage: float | None = None
    """None until the group was compared; 0.0 where all rewards of the group are equal."""
    status: Status = "completed"
    stop_condition: str = ""
    error: str = ""
    """Empty, or what ended the rollout."""
    turns: int = 1
    """Replies that are trained on, those of forks among them."""
    generated_tokens: int = 0
    """What the engine sampled for this rollout, by the transport's count. Of it are trained on at most all: a reply that the
    harness never saw, or a branch that it gave up, is not."""
    weight_versions: list[WeightSpan] = field(default_factory=list)
    """Of the tokens with loss mask 1, in order; equal neighbours are one span."""
    forks: list[Fork] = field(default_factory=list)
    """In order of the rollout's branches."""
    renderer: str = ""
    environment: str = ""
    seed: int | None = None
    prompt: str = ""
    """The task's prompt as text, for people."""
    response: str = ""
    """The last reply as text, for people; training reads `tokens`."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds by stage: generation, scoring, total."""

    @property
    def usable(self) -> bool:
        """Whether training may look at this sample at all."""
        return self.status in ("completed", "truncated") and self.reward is not None and any(self.loss_mask)

    @property
    def sequences(self) -> list[TokenSequence]:
        """All of the rollout's token sequences: its own, then its forks'."""
        return [self, *self.forks]

    @property
    def sampled_tokens(self) -> int:
        """Tokens with loss mask 1, over all sequences."""
        return sum(sum(sequence.loss_mask) for sequence in self.sequences)

    def get_reward_value(self, _args: Any = None) -> float | None:
        """`reward`, under the name by which filters written for Miles ask for it."""
        return self.reward


def as_row(sample: Sample) -> dict[str, Any]:
    """One flat row of plain values (lists, dicts, numbers, strings) for the dump and for crossing processes."""
    return {**_plain(sample), "forks": [_plain(fork) for fork in sample.forks]}


def from_row(row: dict[str, Any]) -> Sample:
    """Inverse of `as_row`; unknown keys are an error of the caller."""
    forks = [Fork(**{**fork, "weight_versions": _spans(fork)}) for fork in row["forks"]]
    return Sample(**{**row, "weight_versions": _spans(row), "forks": forks})


def _plain(sequence: Sample | Fork) -> dict[str, Any]:
    row = {name: getattr(sequence, name) for name in sequence.__dataclass_fields__}
    row["weight_versions"] = [{"version": s.version, "count": s.count} for s in sequence.weight_versions]
    return row


def _spans(row: Mapping[str, Any]) -> list[WeightSpan]:
    return [WeightSpan(**span) for span in row["weight_versions"]]
