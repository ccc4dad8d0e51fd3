"""Good runs of every kind pass: controls, several turns, flat groups; and learning is told from chance."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import Draft, forked_run, good_run, learning_run, sample

from miles_verifiers import verify as verification
from miles_verifiers.grpo import assign_advantages
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.verify import Report, verify


def judged(draft: Draft, run_dir: Path) -> Report:
    return verify(draft.write(run_dir))


def test_normalized_advantages_are_recomputed_as_such(tmp_path: Path) -> None:
    draft = good_run()
    draft.configure(training={"normalize_advantages": True})
    for step in draft.steps:
        assign_advantages(step, normalize=True)
    # By hand: rewards 2, 0, 0, 0 have mean 0.5 and sample standard deviation 1.
    assert draft.steps[0][0].advantage == pytest.approx(1.5, abs=1e-5)
    assert judged(draft, tmp_path / "run").ok


def test_shuffled_rewards_are_a_good_run_of_the_control(tmp_path: Path) -> None:
    draft = good_run()
    first, second = draft.steps[1][0], draft.steps[1][7]
    first.reward, second.reward = second.reward, first.reward
    assign_advantages(draft.steps[1], normalize=False)
    draft.configure(rollout={"reward_control": "shuffle"})
    assert judged(draft, tmp_path / "control").ok
    # Without the control, the same dump is wrong.
    draft.configure(rollout={"reward_control": "none"})
    assert judged(draft, tmp_path / "run").failed == ["reward_sums"]


def test_a_run_trained_on_one_named_reward(tmp_path: Path) -> None:
    draft = good_run()
    draft.configure(rollout={"reward_key": "correct"})
    for step, record in zip(draft.steps, draft.metrics, strict=True):
        for member in step:
            member.reward = member.rewards["correct"]
        assign_advantages(step, normalize=False)
        record["reward_mean"] = record["pass_rate"]
    assert judged(draft, tmp_path / "run").ok


def test_a_multi_turn_sample_with_environment_tokens(tmp_path: Path) -> None:
    draft = good_run()
    member = draft.steps[1][3]
    member.tokens = [1, 5, 6, 20, 9, 9, 21, 2]
    member.response_length, member.loss_mask = 5, [1, 0, 0, 1, 1]
    member.rollout_log_probs, member.train_log_probs = [-0.5, 0.0, 0.0, -0.25, -0.25], [-0.5, -3.0, -4.0, -0.25, -0.25]
    member.weight_versions, member.generated_tokens = [WeightSpan("1", 3)], 3
    draft.metrics[1]["sampled_tokens"] = 17
    # 17 sampled tokens in this step now, seven of them 2e-5 apart.
    draft.metrics[1]["mismatch_mean"] = 7 * 2e-5 / 17
    assert judged(draft, tmp_path / "run").ok


def test_forks(tmp_path: Path) -> None:
    report = judged(forked_run(), tmp_path / "run")
    assert report.findings == []
    assert (report.figures["sampled_tokens"], report.figures["forks"]) == (16 + 22, 3)


def test_flat_groups_make_no_optimizer_step_and_that_is_fine(tmp_path: Path) -> None:
    draft = good_run()
    draft.steps[1] = [sample(8 + k, 1, (0, 0.0, 0.0, 0.0, 0.0)) for k in range(8)]
    draft.metrics[1].update(pass_rate=0.0, reward_mean=0.0, optimizer_steps=0, weight_delta=0.0, loss=None)
    assert judged(draft, tmp_path / "run").ok


def test_learning_is_seen(tmp_path: Path) -> None:
    report = judged(learning_run([0, 0, 0, 0, 0, 2, 2, 2, 2, 2]), tmp_path / "run")
    assert report.findings == []
    asked = [rule for rule in verification.RULES if not rule.name.startswith("evaluation_")]
    assert report.summary == f"verify: {len(asked)} rules passed"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1, 1, 1, 1, 1, 2, 2, 2, 2, 2], "p = "),  # 5 of 40, then 10 of 40: better, but chance does that
        ([2, 2, 2, 2, 2, 0, 0, 0, 0, 0], "min_final_pass_rate"),
        ([0, 0, 0, 0, 0, 2, 2, 2, 2, 1], "min_final_pass_rate"),  # 9 of 40 is significant but below 0.25
        ([2, 2, 2, 2, 2, 2, 2, 2, 2], "9 steps"),
    ],
)
def test_no_learning_is_seen(groups: list[int], message: str, tmp_path: Path) -> None:
    report = judged(learning_run(groups), tmp_path / "run")
    assert "learning" in report.failed
    assert any(message in finding.message for finding in report.findings)


def test_unlearning_does_not_count_as_change(tmp_path: Path) -> None:
    draft = learning_run([2, 2, 2, 2, 2, 0, 0, 0, 0, 0])
    draft.configure(verify={"min_final_pass_rate": 0.0})
    (finding,) = judged(draft, tmp_path / "run").findings
    assert finding.rule == "learning"
    assert finding.message.endswith("p = 1, not below 0.01")
