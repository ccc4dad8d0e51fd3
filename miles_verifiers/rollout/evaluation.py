"""Evaluations: when there is one, and what its samples say. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.record.samples import Sample
from miles_verifiers.statistics import mean_interval


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One environment, before one step.

    Tasks count alike, however many of their samples are missing: `mean` is the mean over tasks of the mean reward of the
    task's scored samples. Samples of a task resemble each other, so the interval is that of the tasks' means; with one
    sample of each it is the ordinary one.
    """

    tasks: int
    n: int
    """Samples asked for."""
    missing: int
    """Of them, those without a reward: failed, aborted, or not scored. They are no zeros."""
    mean: float | None
    low: float | None
    """95 % confidence interval of `mean`; None where fewer than two tasks have a reward."""
    high: float | None
    pass_rate: float | None
    """As `mean`, of the pass metric; None where no sample has it."""
    response_length_mean: float | None

    def line(self) -> str:
        """For people: `mean 0.42 [0.31, 0.53], 64 samples of 16 tasks, 2 missing`."""
        mean = "no reward" if self.mean is None else f"mean {self.mean:.3f}"
        interval = "" if self.low is None else f" [{self.low:.3f}, {self.high:.3f}]"
        return f"{mean}{interval}, {self.n} samples of {self.tasks} tasks, {self.missing} missing"


def evaluation_due(rollout: RolloutSection, step: int) -> bool:
    """Whether there is an evaluation before training step `step`; the one at the end of a run is not asked for here."""
    if rollout.eval_interval is None or (step == 0 and rollout.skip_eval_before_train):
        return False
    return step % rollout.eval_interval == 0


def summary(samples: Sequence[Sample], pass_metric: str) -> Evaluation:
    """What one environment's samples say."""
    scored = [sample for sample in samples if sample.reward is not None]
    rewards = [(sample.task_index, sample.reward) for sample in scored if sample.reward is not None]
    passes = [(s.task_index, s.metrics[pass_metric]) for s in scored if pass_metric in s.metrics]
    means = _task_means(rewards)
    interval = mean_interval(means)
    return Evaluation(
        tasks=len({sample.task_index for sample in samples}),
        n=len(samples),
        missing=len(samples) - len(scored),
        mean=fmean(means) if means else None,
        low=interval[0] if interval else None,
        high=interval[1] if interval else None,
        pass_rate=fmean(_task_means(passes)) if passes else None,
        response_length_mean=fmean(sample.response_length for sample in scored) if scored else None,
    )


def _task_means(values: Sequence[tuple[int, float]]) -> list[float]:
    by_task: dict[int, list[float]] = {}
    for task, value in values:
        by_task.setdefault(task, []).append(value)
    return [fmean(own) for own in by_task.values()]
