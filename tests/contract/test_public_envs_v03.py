"""Environments that Verifiers ships for its Env API, unmodified; the engine is a fake.

best-of-n   single turn, several attempts compared      user-sim   many turns, a modelled user
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_engine import FakeEngine
from rollouts import GOLF, STOP, SUBSETS, N, Speaker, rows_of, sampled_of, step_of, worker

from miles_verifiers.errors import EnvironmentPackageError

CONTEXT = "rollout.rollout_max_context_len=8192"
ONE = "rollout.rollout_batch_size=1"


async def test_best_of_n(qwen3_folder: Path, tmp_path: Path) -> None:
    wanted = SUBSETS["default"][0].expected
    speaker = Speaker(qwen3_folder, lambda prompt, count: f"print({wanted!r})" if count == 2 else "print(1)")
    overrides = (ONE, "environment.env={ id = 'best-of-n' }", "rollout.max_concurrency=1")
    rows = await rows_of(qwen3_folder, tmp_path, speaker, *overrides, taskset=f"{{ id = '{GOLF}' }}")
    assert [row["reward"] for row in rows] == [0.0, 0.0, 1.0, 0.0]
    assert [row["metrics"]["best"] for row in rows] == [0.0, 0.0, 1.0, 0.0]
    assert {row["metrics"]["pass_at_n"] for row in rows} == {1.0}


def converse(prompt: str, count: int) -> str:
    """Both sides of a conversation: the user asks twice and is content."""
    if "role-playing a USER" in prompt:
        return ("Say nothing yet", "Say w0", "###DONE###")[prompt.count("<|im_start|>assistant") - 1]
    return "nothing" if prompt.endswith("yet<|im_end|>\n<|im_start|>assistant\n") else "w0"


async def test_user_simulator(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker = Speaker(qwen3_folder, converse)
    overrides = (ONE, CONTEXT, "environment.env={ id = 'user-sim' }")
    rows = await rows_of(qwen3_folder, tmp_path, speaker, *overrides)
    assert len(rows) == N
    for row in rows:
        assert (row["status"], row["turns"], row["error"]) == ("completed", 2, "")
        assert sampled_of(row) == [*speaker.ids("nothing"), *speaker.ids("w0")]  # the user's turns are not trained on
        assert (row["reward"], row["metrics"]["user_turns"]) == (1.0, 3.0)


async def test_another_seat_can_be_trained(qwen3_folder: Path, tmp_path: Path) -> None:
    """The user's side, which has no reward: every rollout says so, and none is trained on."""
    overrides = (ONE, CONTEXT, STOP, "environment.env={ id = 'user-sim' }", "environment.train_seat='user'")
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder, converse), *overrides)
    assert (step["rows"], set(step["dropped"])) == ([], {"bad reward"})
    assert "scoring: the environment gave no reward" in (tmp_path / "logs" / "rollout.log").read_text()


async def test_a_field_for_attempts_that_is_not_there(qwen3_folder: Path, tmp_path: Path) -> None:
    overrides = ("environment.env={ id = 'user-sim' }", "environment.attempts_field='tries'")
    async with FakeEngine() as engine, worker(engine, qwen3_folder, tmp_path, *overrides) as rollouts:
        with pytest.raises(EnvironmentPackageError, match="no field 'tries'") as caught:
            await rollouts.preflight()
    assert "done_marker" in caught.value.next_step
