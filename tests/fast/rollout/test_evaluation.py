"""Evaluations: when, and figures in which a missing sample is missing."""

from __future__ import annotations

from typing import Any

import pytest
from factories import config_table

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.backend import Sampling, eval_sampling
from miles_verifiers.rollout.evaluation import evaluation_due, summary


def rollout(**fields: Any) -> RolloutSection:
    return loading.validate(config_table(rollout=fields), where="the test").rollout


def sample(task: int, reward: float | None, passed: float | None = None) -> Sample:
    metrics = {} if passed is None else {"passed": passed}
    return Sample(group_index=task, index=0, task_index=task, reward=reward, metrics=metrics, response_length=10)


def test_tasks_count_alike_and_missing_samples_are_no_zeros() -> None:
    samples = [
        sample(0, 1.0, 1),
        sample(0, 0.0, 0),
        sample(1, 1.0, 1),
        sample(1, None),
        sample(2, None),
        sample(2, None),
    ]
    found = summary(samples, "passed")
    assert (found.tasks, found.n, found.missing) == (3, 6, 3)
    assert found.mean == 0.75  # of 0.5 and 1.0; over samples it would be 2/3, with zeros 1/3
    assert found.pass_rate == 0.75
    assert found.low is not None
    assert found.high is not None
    assert found.low < 0.75 < found.high
    assert found.line() == f"mean 0.750 [{found.low:.3f}, {found.high:.3f}], 6 samples of 3 tasks, 3 missing"


def test_samples_of_one_task_do_not_make_the_interval_narrow() -> None:
    """Control of what the interval is made of: four copies of each sample tell no more than one."""
    one = summary([sample(task, float(task % 2)) for task in range(6)], "passed")
    four = summary([sample(task, float(task % 2)) for task in range(6) for _ in range(4)], "passed")
    assert (one.low, one.high) == (four.low, four.high)
    assert one.n * 4 == four.n


@pytest.mark.parametrize("samples", [[], [sample(0, None)], [sample(0, 1.0)]])
def test_what_is_not_known_is_none(samples: list[Sample]) -> None:
    found = summary(samples, "passed")
    assert (found.low, found.high, found.pass_rate) == (None, None, None)
    assert found.mean == (1.0 if samples and samples[0].reward else None)
    assert "missing" in found.line()


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, []),
        ({"eval_interval": 3}, [0, 3, 6]),
        ({"eval_interval": 3, "skip_eval_before_train": True}, [3, 6]),
        ({"eval_interval": 1}, list(range(8))),
    ],
)
def test_when(fields: dict[str, Any], steps: list[int]) -> None:
    assert [step for step in range(8) if evaluation_due(rollout(**fields), step)] == steps


def test_sampling_is_that_of_training_but_for_what_is_set() -> None:
    assert eval_sampling(rollout(rollout_temperature=0.8)) == Sampling(0.8, 1.0, -1, 8)
    own = rollout(eval_temperature=0.0, eval_top_p=0.9, eval_top_k=5, eval_max_response_len=100)
    assert eval_sampling(own) == Sampling(0.0, 0.9, 5, 100)
