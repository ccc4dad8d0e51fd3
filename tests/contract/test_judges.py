"""Reward functions that wait for something, as for a model that judges, and the deadlines over them.

Whichever deadline passes, the waiting coroutine itself is cancelled, gets to the end of its `finally` before the step is over,
and its rollouts are counted under the deadline's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rollouts import STOP, N, Speaker, step_of
from silent_judge import JUDGE, SilentJudge

DEADLINES = {
    "scoring deadline": "rollout.scoring_timeout=0.4",
    "group deadline": "rollout.group_timeout=1.0",
    "batch deadline": "rollout.batch_timeout=1.5",
}
KINDS = ("reward", "group_reward")


@pytest.fixture
def judge() -> Iterator[SilentJudge]:
    JUDGE.reset()
    yield JUDGE
    JUDGE.reset()


@pytest.mark.parametrize("cause", DEADLINES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_deadline_cancels_a_judge(
    qwen3_folder: Path, tmp_path: Path, judge: SilentJudge, kind: str, cause: str
) -> None:
    taskset = f"{{ id = 'contract-env', task = {{ {kind} = 'hangs' }} }}"
    ending, bound = ("deadline", "") if cause == "batch deadline" else ("too many dropped", STOP)
    overrides = filter(None, (DEADLINES[cause], bound))
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), *overrides, taskset=taskset)
    assert judge.asked >= (2 if kind == "group_reward" else 2 * N), "each group has asked, or each rollout of each"
    assert (judge.answered, judge.cancelled, judge.closed) == (0, judge.asked, judge.asked)
    assert (step["rows"], step["ending"]) == ([], ending)
    assert (set(step["dropped"]), set(step["causes"])) == ({cause}, {cause})


async def test_a_cancellation_that_is_lost_on_the_way_is_repeated(
    qwen3_folder: Path, tmp_path: Path, judge: SilentJudge
) -> None:
    """The deadline falls into the setup, which goes on all the same; the judge is asked after it, and cancelled."""
    taskset = "{ id = 'contract-env', task = { reward = 'hangs', setup = 'loses a cancellation' } }"
    step = await step_of(
        qwen3_folder, tmp_path, Speaker(qwen3_folder), STOP, "rollout.group_timeout=0.4", taskset=taskset
    )
    assert judge.asked >= 2 * N
    assert (judge.answered, judge.cancelled, judge.closed) == (0, judge.asked, judge.asked)
    assert (step["rows"], set(step["causes"])) == ([], {"group deadline"})


@pytest.mark.parametrize("kind", KINDS)
async def test_a_judge_that_answers_in_time_is_left_alone(
    qwen3_folder: Path, tmp_path: Path, judge: SilentJudge, kind: str
) -> None:
    """Control: the same deadlines, all of them."""
    judge.reset(seconds=0.02)
    taskset = f"{{ id = 'contract-env', task = {{ {kind} = 'hangs' }} }}"
    deadlines = ("rollout.scoring_timeout=20", "rollout.group_timeout=20", "rollout.batch_timeout=20")
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), STOP, *deadlines, taskset=taskset)
    assert judge.asked == (2 if kind == "group_reward" else 2 * N)
    assert (judge.answered, judge.cancelled, judge.closed) == (judge.asked, 0, judge.asked)
    assert (step["ending"], step["causes"], len(step["rows"])) == ("full", {}, 2 * N)
    assert {row["reward"] for row in step["rows"]} == {1.5}
