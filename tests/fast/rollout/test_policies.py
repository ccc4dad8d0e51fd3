"""What becomes of groups: policies, filters, and the names of what went wrong."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from factories import config_table

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.errors import ConfigError, RolloutError
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.causes import cause_of, name_of, table
from miles_verifiers.rollout.filters import load_filter
from miles_verifiers.rollout.policies import judge


def rollout(**fields: Any) -> RolloutSection:
    return loading.validate(config_table(rollout=fields), where="the test").rollout


def sample(reward: float | None, error: str = "", **known: Any) -> Sample:
    status = "failed" if error else "completed"
    return Sample(
        group_index=0, index=0, task_index=0, loss_mask=[1], reward=reward, error=error, status=status, **known
    )


GOOD, FLAT = [sample(1.0), sample(0.0), sample(0.5)], [sample(0.25)] * 3
FAILED = sample(None, "HarnessError: it broke")
NAN = sample(None, "scoring: the reward 'right' is nan")


@pytest.mark.parametrize(
    ("samples", "fields", "cause"),
    [
        (GOOD, {}, ""),
        (FLAT, {}, ""),
        (FLAT, {"equal_rewards": "drop"}, "equal rewards"),
        (GOOD, {"equal_rewards": "drop"}, ""),
        ([*GOOD, FAILED], {}, ""),
        ([*GOOD, FAILED], {"failed_rollouts": "drop"}, "HarnessError"),
        ([*GOOD, FAILED], {"bad_rewards": "drop"}, ""),
        ([*GOOD, NAN], {"failed_rollouts": "drop"}, ""),
        ([*GOOD, NAN], {"bad_rewards": "drop"}, "bad reward"),
        (GOOD, {"failed_rollouts": "drop", "bad_rewards": "drop"}, ""),
        ([GOOD[0], FAILED, FAILED, NAN], {}, "HarnessError"),
        ([NAN, NAN], {}, "bad reward"),
        ([], {}, "too few samples"),
        (
            FLAT,
            {"dynamic_sampling_filter_path": "miles.rollout.filter_hub.check_reward_nonzero_std"},
            "filter: equal rewards",
        ),
        (GOOD, {"dynamic_sampling_filter_path": "any.path:check_reward_nonzero_std"}, ""),
    ],
)
def test_verdicts(samples: list[Sample], fields: dict[str, Any], cause: str) -> None:
    section = rollout(**fields)
    verdict = judge(samples, section, load_filter(section))
    assert (verdict.cause, verdict.kept) == (cause, not cause)


def test_rewards_that_almost_agree_are_not_equal() -> None:
    assert judge([sample(0.1 + 0.2), sample(0.3)], rollout(equal_rewards="drop")).kept


@dataclass
class Answer:
    keep: Any
    reason: str | None = None


@pytest.fixture
def my_filters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "my_filters.py").write_text(
        "number = 3\ndef decide(args, samples, **kwargs):\n    return answer(args, samples)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_filters", raising=False)
    import my_filters  # type: ignore[import-not-found]

    return my_filters


@pytest.mark.parametrize("path", ["my_filters:decide", "my_filters.decide"])
def test_a_users_filter_is_called_as_in_miles(my_filters: Any, path: str) -> None:
    seen: dict[str, Any] = {}

    def answer(args: Any, samples: list[Sample]) -> Any:
        seen.update(
            key=args.reward_key, n=args.n_samples_per_prompt, rewards=[s.get_reward_value(args) for s in samples]
        )
        return seen["answer"]

    my_filters.answer = answer
    section = rollout(dynamic_sampling_filter_path=path, reward_key="right")
    for given, cause in [(True, ""), (False, "filter"), (Answer(1), ""), (Answer(0, "too easy"), "filter: too easy")]:
        seen["answer"] = given
        assert judge([*GOOD, FAILED], section, load_filter(section)).cause == cause
    # Only what can be trained on: a reward of None is nothing that a filter has to know about.
    assert (seen["key"], seen["n"], seen["rewards"]) == ("right", 4, [1.0, 0.0, 0.5])


@pytest.mark.parametrize("path", ["nothing", ":f", "m:", "no_such_module:f", "my_filters:absent", "my_filters:number"])
def test_a_path_that_leads_nowhere(my_filters: Any, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_filter(rollout(dynamic_sampling_filter_path=path))
    assert caught.value.where == "rollout.dynamic_sampling_filter_path"


def test_a_filter_that_raises_stops_the_run(my_filters: Any) -> None:
    section = rollout(dynamic_sampling_filter_path="my_filters:decide")
    with pytest.raises(RolloutError, match="my_filters:decide raised NameError"):
        judge(GOOD, section, load_filter(section))


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("", ""),
        ("the group's deadline passed during the rollout", "group deadline"),
        ("the step's deadline passed before the rollout began", "batch deadline"),
        ("scoring: the step's deadline passed during group rewards", "batch deadline"),
        ("HarnessError: harness setup timed out", "setup deadline"),
        ("TaskError: task setup timed out", "setup deadline"),
        ("TaskError: scoring timed out", "scoring deadline"),
        ("TaskError: task finalize timed out", "scoring deadline"),
        ("scoring: group rewards took more than 5 s", "scoring deadline"),
        (
            "scoring: TimeoutError: MyEnv.finalize() exceeded its 5s deadline (--env.timeout.finalize)",
            "scoring deadline",
        ),
        ("DeadlineExceeded: no complete answer within 3 s", "request deadline"),
        ("scoring: the environment gave no reward", "bad reward"),
        ("scoring: no reward is named 'x', only y", "bad reward"),
        ("scoring: TaskError: task T group scoring: KeyError: 1", "group scoring failed"),
        ("TaskError: task T scoring: KeyError: 1", "scoring failed"),
        ("TaskError: task setup: OSError: no", "setup failed"),
        ("scoring: the group is incomplete: not every rollout", "incomplete group"),
        ("the reply is empty: no token was sampled (stopped by nothing)", "empty reply"),
        ("no reply was sampled (stopped by nothing)", "no reply"),
        ("GenerationAborted: weights", "GenerationAborted"),
        ("something else", "other"),
    ],
)
def test_names(error: str, name: str) -> None:
    assert name_of(error) == name


def test_a_deadline_of_the_rollout_is_named_though_it_may_be_trained_on() -> None:
    cut = sample(1.0, stop_condition="harness_timeout")
    assert cut.usable
    assert cause_of(cut) == "rollout deadline"


def test_a_table_has_the_most_frequent_first() -> None:
    assert table("why", {"b": 1, "a": 1, "c": 12}) == ["why", "     12  c", "      1  a", "      1  b"]
