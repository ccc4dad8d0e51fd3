"""Equal transcripts, equal rewards: both code golf environments against one table, code_golf_transcripts.json.

Each Verifiers plays the table's groups with the environment made for it (code_golf_v1 for 0.2.x, code_golf from 0.3 on), through
its own scoring. What both agree with is the table, so they agree with each other. `{answer}` stands for a program that prints
what the task asks for. A null is a share that depends on the machine; all shares of a kind add up to 0.5, or to 0.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from rollouts import GOLF, SUBSETS, Speaker, per_api, rows_of

KINDS = ("correct", "most_concise", "fastest")
GROUPS: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("code_golf_transcripts.json").read_text(encoding="utf-8")
)


async def played(group: dict[str, Any], folder: Path, tmp_path: Path) -> list[dict[str, float]]:
    """The rewards of each of the group's replies, as a step of a run would have them."""
    answer = f"print({SUBSETS['default'][0].expected!r})"
    replies = [reply.replace("{answer}", answer) for reply in group["replies"]]
    overrides = (
        f"rollout.n_samples_per_prompt={len(replies)}",
        "rollout.rollout_batch_size=1",
        "rollout.max_concurrency=1",
        "rollout.rollout_max_context_len=2048",
    )
    speaker = Speaker(folder, lambda prompt, count: replies[count])
    rows = await rows_of(folder, tmp_path, speaker, *overrides, taskset=f"{{ id = '{GOLF}' }}")
    assert [row["response"] for row in rows] == replies, "each reply in its place"
    assert [row["reward"] for row in rows] == pytest.approx([sum(row["rewards"].values()) for row in rows])
    return [row["rewards"] for row in rows]


def differences(group: dict[str, Any], rewards: list[dict[str, float]]) -> list[str]:
    """Where rewards are not those of the table."""
    found = [
        f"{kind} of reply {i}: {reward[kind]} instead of {group[kind][i]}"
        for i, reward in enumerate(rewards)
        for kind in KINDS
        if group[kind][i] is not None and reward[kind] != pytest.approx(group[kind][i])
    ]
    found += [f"reply {i} has {sorted(reward)}" for i, reward in enumerate(rewards) if set(reward) != set(KINDS)]
    for kind in KINDS[1:]:
        total = sum(reward[kind] for reward in rewards)
        if total != pytest.approx(0.5 if any(group["correct"]) else 0.0):
            found.append(f"the shares of {kind} add up to {total}")
    return found


@pytest.mark.parametrize("group", GROUPS, ids=[group["name"] for group in GROUPS])
async def test_the_table(group: dict[str, Any], qwen3_folder: Path, tmp_path: Path) -> None:
    assert differences(group, await played(group, qwen3_folder, tmp_path)) == []


async def test_an_environment_that_scores_otherwise_differs(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: ties are not shared."""
    module = importlib.import_module(per_api("code_golf_v1.taskset", "code_golf.env"))
    monkeypatch.setattr(
        module,
        "shares",
        lambda costs, passed: [float(ok and cost == min(costs)) for cost, ok in zip(costs, passed, strict=True)],
    )
    ties = next(group for group in GROUPS if "share" in group["name"])
    found = differences(ties, await played(ties, qwen3_folder, tmp_path))
    assert "most_concise of reply 0: 0.5 instead of 0.25" in found
    assert "the shares of most_concise add up to 1.0" in found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_reward_is_compared(kind: str) -> None:
    """Control."""
    group = GROUPS[0]
    rewards = [{name: group[name][i] for name in KINDS} for i in range(len(group["replies"]))]
    assert differences(group, rewards) == []
    rewards[1][kind] += 0.1
    assert any(kind in difference for difference in differences(group, rewards))
