"""Sample: one rollout as the trainer and the dump see it. Plain data; a leaf that every room may use.

Axis legend: [T] all tokens of the sequence, [R] tokens of the response (the last R of T).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["completed", "truncated", "failed", "aborted"]
STATUSES: tuple[Status, ...] = ("completed", "truncated", "failed", "aborted")


@dataclass(slots=True)
class WeightSpan:
    """`count` consecutive response tokens that were sampled under weight version `version`."""

    version: str
    count: int


@dataclass(slots=True)
class Sample:
    """One rollout of one task.

    A prompt of three ids answered with two sampled ids, the second of them the end of turn:

        tokens            [11, 12, 13, 21, 2]     [T]
        response_length   2                        R
        loss_mask         [1, 1]                  [R]  1 where the policy sampled the token, 0 where the environment wrote it
        rollout_log_probs [-0.3, -0.1]            [R]  the engine's, nats; 0.0 where loss_mask is 0

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
    weight_versions: list[WeightSpan] = field(default_factory=list)
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

    def get_reward_value(self, _args: Any = None) -> float | None:
        """`reward`, under the name by which filters written for Miles ask for it."""
        return self.reward


def as_row(sample: Sample) -> dict[str, Any]:
    """One flat row of plain values (lists, dicts, numbers, strings) for the dump and for crossing processes."""
    row = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    row["weight_versions"] = [{"version": s.version, "count": s.count} for s in sample.weight_versions]
    return row


def from_row(row: dict[str, Any]) -> Sample:
    """Inverse of `as_row`; unknown keys are an error of the caller."""
    return Sample(**{**row, "weight_versions": [WeightSpan(**span) for span in row["weight_versions"]]})
