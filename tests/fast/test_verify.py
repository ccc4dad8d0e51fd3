"""Every rule, against a run on disk that breaks it and nothing else (or names what else it must break)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from factories import ENGINE, PROMPT, TRAINER, Draft, evaluated_run, fork, forked_run, good_run, sample

from miles_verifiers import verify as verification
from miles_verifiers.errors import VerificationFailed
from miles_verifiers.samples import Fork, Sample, WeightSpan
from miles_verifiers.verify import Report, verify


def judged(draft: Draft, run_dir: Path) -> Report:
    return verify(draft.write(run_dir))


def test_a_good_run_passes_every_rule(tmp_path: Path) -> None:
    report = judged(good_run(), tmp_path / "run")
    assert report.findings == []
    unasked = {"learning", "evaluation_files", "evaluation_weights", "evaluation_figures"}
    assert report.summary == f"verify: {len(verification.RULES) - len(unasked)} rules passed"
    assert {result.name for result in report.rules if result.status == "not asked for"} == unasked
    report.raise_if_failed()


def test_a_good_run_with_evaluations_passes_every_rule(tmp_path: Path) -> None:
    report = judged(evaluated_run(), tmp_path / "run")
    assert report.findings == []
    assert [result.name for result in report.rules if result.status == "not asked for"] == ["learning"]


def test_a_run_may_end_when_its_tasks_do(tmp_path: Path) -> None:
    draft = good_run()
    draft.configure(training={"num_steps": 9})
    del draft.steps[1][4:]
    draft.metrics[1].update(
        ending="tasks ran out", samples=4, groups=1, sampled_tokens=8, pass_rate=0.5, reward_mean=0.75
    )
    assert judged(draft, tmp_path / "run").findings == []


def test_groups_left_over_by_the_step_before_may_be_kept(tmp_path: Path) -> None:
    """Their log-probs are those of other weights than the trainer's: the gate looks at the others alone."""
    draft = good_run()
    for member in draft.steps[1][:4]:
        member.weight_versions = [WeightSpan("0", 2)]
        member.train_log_probs = [-1.5, -0.25]
    draft.metrics[1].update(mismatch_mean=(4 * 1.0 + 4 * 2e-5) / 16, mismatch_max=1.0)
    draft.configure(rollout={"surplus_groups": "keep"})
    assert judged(draft, tmp_path / "kept").findings == []
    # Control: a run that says that it keeps none may have none.
    draft.configure(rollout={"surplus_groups": "rerun"})
    assert set(judged(draft, tmp_path / "run").failed) == {"weight_versions", "mismatch_gate"}


# Each case: what is done to the good run, the rules that must fail (all others must pass), the place that is named.
Case = tuple[Callable[[Draft], Any], set[str], str]
CASES: dict[str, Case] = {}


def case(rules: str, where: str) -> Callable[[Callable[[Draft], Any]], Callable[[Draft], Any]]:
    def keep(change: Callable[[Draft], Any]) -> Callable[[Draft], Any]:
        CASES[change.__name__] = (change, set(rules.split()), where)
        return change

    return keep


ROW_3 = "dump/rollout/000001.parquet row 3"
GROUP_2 = "dump/rollout/000001.parquet group 2"
STEP_1 = "metrics.jsonl step 1"


def row_3(draft: Draft) -> Sample:
    """Of the second step: it did not pass, and is in group 2, where two others did."""
    return draft.steps[1][3]


def row_0(draft: Draft) -> Sample:
    """Of the second step: it passed, and shares most_concise with row 1."""
    return draft.steps[1][0]


@case("rollout_files metrics_records", "dump/rollout/000002.parquet")
def a_step_is_missing_at_the_end(draft: Draft) -> None:
    draft.configure(training={"num_steps": 3})


@case("rollout_files", "dump/rollout/000002.parquet")
def a_step_too_many(draft: Draft) -> None:
    draft.steps.append([sample(16 + k, 2, row) for k, row in enumerate(_rows(draft))])


def _rows(draft: Draft) -> list[tuple[float, ...]]:
    return [
        (s.metrics["passed"], s.rewards["correct"], s.rewards["most_concise"], s.rewards["fastest"], s.advantage or 0.0)
        for s in draft.steps[0]
    ]


@case("metrics_records weights_changed", "metrics.jsonl")
def no_metrics(draft: Draft) -> None:
    draft.metrics.clear()


@case("metrics_records", "metrics.jsonl")
def a_record_twice(draft: Draft) -> None:
    draft.metrics.append(draft.metrics[1])


@case("metrics_records", STEP_1)
def a_record_without_a_field(draft: Draft) -> None:
    del draft.metrics[1]["loss"]


@case("sample_counts metrics_agree", "dump/rollout/000001.parquet")
def a_group_is_missing(draft: Draft) -> None:
    del draft.steps[1][4:]


@case("full_steps", STEP_1)
def a_step_that_ran_out_of_time(draft: Draft) -> None:
    draft.metrics[1]["ending"] = "deadline"


@case("dropped_groups", STEP_1)
def a_group_whose_rollouts_failed(draft: Draft) -> None:
    draft.metrics[0]["dropped_groups"] = {"equal rewards": 3, "filter: too easy": 1}
    draft.metrics[1]["dropped_groups"] = {"group deadline": 1}


@case("rollout_files sample_counts metrics_agree", "dump/rollout/000001.parquet")
def the_tasks_ran_out_in_the_first_step(draft: Draft) -> None:
    draft.metrics[0]["ending"] = "tasks ran out"
    del draft.metrics[1]
    del draft.steps[0][4:]
    del draft.steps[1][4:]


@case("groups", GROUP_2)
def groups_of_three_and_five(draft: Draft) -> None:
    # Where no group passes, moving a sample changes no share, sum or advantage.
    draft.steps = [[sample(k + 8 * step, step, (0, 0.0, 0.0, 0.0, 0.0)) for k in range(8)] for step in range(2)]
    for record in draft.metrics:
        record.update(pass_rate=0.0, reward_mean=0.0)
    draft.configure(verify={"min_passed": 0})
    row_3(draft).group_index = 3


@case("groups", GROUP_2)
def two_tasks_in_a_group(draft: Draft) -> None:
    row_3(draft).task_index = 1


@case("groups", "dump/rollout/000001.parquet group 0")
def a_group_in_two_steps(draft: Draft) -> None:
    for member in draft.steps[1][:4]:
        member.group_index = 0


@case("sample_order", ROW_3)
def an_index_twice(draft: Draft) -> None:
    row_3(draft).index = draft.steps[1][2].index


@case("sample_order", "dump/rollout/000001.parquet row 0")
def a_step_counts_from_zero_again(draft: Draft) -> None:
    for number, member in enumerate(draft.steps[1]):
        member.index = number


@case("statuses advantages", ROW_3)
def an_unknown_status(draft: Draft) -> None:
    row_3(draft).status = "done"  # type: ignore[assignment]


@case("no_errors", ROW_3)
def an_error_beside_a_good_status(draft: Draft) -> None:
    row_3(draft).error = "HarnessError: connection refused"


@case("no_errors metrics_agree", ROW_3)
def a_failed_sample(draft: Draft) -> None:
    failed = row_3(draft)
    failed.status, failed.error = "failed", "the program hung"
    failed.reward, failed.rewards, failed.metrics = None, {}, {}
    failed.tokens, failed.loss_mask, failed.rollout_log_probs, failed.train_log_probs = [], [], [], []
    failed.response_length, failed.weight_versions = 0, []
    # The other three: rewards 1.75, 1.25, 0, mean 1.
    failed.advantage = None
    for member, advantage in zip(draft.steps[1][:3], (0.75, 0.25, -1.0), strict=True):
        member.advantage = advantage


@case("no_errors metrics_agree advantages", ROW_3)
def an_aborted_sample_keeps_its_advantage(draft: Draft) -> None:
    row_3(draft).status = "aborted"


@case("some_completed", "")
def everything_truncated(draft: Draft) -> None:
    for step in draft.steps:
        for member in step:
            member.status = "truncated"


@case("lengths train_log_probs metrics_agree", ROW_3)
def a_loss_mask_too_short(draft: Draft) -> None:
    member = row_3(draft)
    member.response_length, member.loss_mask, member.weight_versions = 1, [1], [WeightSpan("1", 1)]


@case("lengths", ROW_3)
def a_log_prob_is_missing(draft: Draft) -> None:
    row_3(draft).rollout_log_probs = [ENGINE[0]]


@case("lengths prompts", ROW_3)
def a_response_longer_than_the_tokens(draft: Draft) -> None:
    row_3(draft).tokens = [2]


@case("loss_masks trained_once metrics_agree", ROW_3)
def a_mask_of_two(draft: Draft) -> None:
    row_3(draft).loss_mask = [2, 1]
    row_3(draft).weight_versions = [WeightSpan("1", 3)]


@case("loss_masks rollout_log_probs advantages metrics_agree", ROW_3)
def completed_without_a_sampled_token(draft: Draft) -> None:
    row_3(draft).loss_mask = [0, 0]
    row_3(draft).weight_versions = []


@case("prompts", ROW_3)
def no_prompt(draft: Draft) -> None:
    row_3(draft).tokens = row_3(draft).tokens[-2:]


@case("vocabulary", ROW_3)
def an_id_one_too_large(draft: Draft) -> None:
    row_3(draft).tokens[-1] = 32


@case("vocabulary", ROW_3)
def a_negative_id(draft: Draft) -> None:
    row_3(draft).tokens[0] = -1


@case("rollout_log_probs mismatch_gate mismatch_reported", ROW_3)
def a_log_prob_above_zero(draft: Draft) -> None:
    row_3(draft).rollout_log_probs[1] = 0.25


@case("rollout_log_probs mismatch_gate mismatch_reported", ROW_3)
def a_log_prob_that_is_not_a_number(draft: Draft) -> None:
    row_3(draft).rollout_log_probs[1] = math.nan


@case("rollout_log_probs mismatch_gate mismatch_reported", ROW_3)
def a_log_prob_of_minus_infinity(draft: Draft) -> None:
    row_3(draft).rollout_log_probs[1] = -math.inf


@case("rollout_log_probs", ROW_3)
def a_log_prob_on_an_environment_token(draft: Draft) -> None:
    for member in draft.steps[1]:  # all of them, so that the reported means stay those of the dump
        member.loss_mask, member.weight_versions = [1, 0], [WeightSpan("1", 1)]
        member.rollout_log_probs[1] = member.train_log_probs[1] = 0.0
    draft.metrics[1].update(mismatch_mean=2e-5, sampled_tokens=8)
    row_3(draft).rollout_log_probs[1] = -0.25


@case("finite_rewards metrics_agree reward_sums", ROW_3)
def a_reward_that_is_not_a_number(draft: Draft) -> None:
    row_3(draft).reward = math.nan


@case("finite_rewards metrics_agree advantages", ROW_3)
def unscored_but_completed(draft: Draft) -> None:
    row_3(draft).reward = None


@case("finite_rewards", ROW_3)
def a_metric_that_is_not_finite(draft: Draft) -> None:
    row_3(draft).metrics["latency"] = math.inf


@case("reward_names", ROW_3)
def a_reward_is_missing(draft: Draft) -> None:
    del row_3(draft).rewards["correct"]


@case("reward_names", ROW_3)
def a_reward_that_nobody_knows(draft: Draft) -> None:
    row_3(draft).rewards["shortest"] = 0.0


@case("reward_names", ROW_3)
def a_reward_that_the_first_sample_has_not(draft: Draft) -> None:
    draft.configure(verify={"reward_names": []})
    row_3(draft).rewards["shortest"] = 0.0


@case("reward_names", "dump/rollout/000001.parquet row 5")
def rewards_of_another_environment(draft: Draft) -> None:
    # Of two environments each has its own names; within one they are the same.
    draft.table["environments"] = [{"source": "environments/other"}]
    draft.configure(verify={"group_share_rewards": {}, "reward_names": []})
    for member in draft.steps[1][4:]:
        member.environment, member.rewards = "other", {"right": member.reward or 0.0}
    draft.steps[1][4].rewards = {"wrong": draft.steps[1][4].reward or 0.0}
    draft.steps[1][4], draft.steps[1][5] = draft.steps[1][5], draft.steps[1][4]
    draft.steps[1][4].index, draft.steps[1][5].index = 12, 13


@case("reward_sums advantages metrics_agree", ROW_3)
def a_reward_beside_the_sum(draft: Draft) -> None:
    row_3(draft).reward = 0.5


@case("reward_sums", "dump/rollout/000000.parquet row 0")
def not_the_reward_of_the_key(draft: Draft) -> None:
    draft.configure(rollout={"reward_key": "correct"})


@case("reward_sums metrics_agree advantages", "dump/rollout/000001.parquet")
def a_reward_from_nowhere_under_shuffle(draft: Draft) -> None:
    draft.configure(rollout={"reward_control": "shuffle"})
    row_3(draft).reward = 0.5


@case("pass_metric", ROW_3)
def half_passed(draft: Draft) -> None:
    row_3(draft).metrics["passed"] = 0.5


@case("pass_metric", ROW_3)
def no_word_on_passing(draft: Draft) -> None:
    del row_3(draft).metrics["passed"]


@case("some_passed", "")
def fewer_passed_than_demanded(draft: Draft) -> None:
    draft.configure(verify={"min_passed": 6})


@case("group_shares metrics_agree", GROUP_2)
def a_winner_that_did_not_pass(draft: Draft) -> None:
    row_0(draft).metrics["passed"] = 0


@case("group_shares", GROUP_2)
def a_tie_shared_unequally(draft: Draft) -> None:
    first, second = draft.steps[1][:2]
    first.rewards |= {"most_concise": 0.375, "fastest": 0.375}
    second.rewards |= {"most_concise": 0.125, "fastest": 0.125}


@case("group_shares reward_sums", GROUP_2)
def shares_that_do_not_make_the_whole(draft: Draft) -> None:
    row_0(draft).rewards["fastest"] = 0.25


@case("group_shares metrics_agree", "dump/rollout/000001.parquet group 3")
def a_share_though_nobody_passed(draft: Draft) -> None:
    for member in draft.steps[1][4:]:
        member.metrics["passed"] = 0


@case("advantages", GROUP_2)
def an_advantage_from_elsewhere(draft: Draft) -> None:
    row_3(draft).advantage = 0.75


@case("advantages", GROUP_2)
def no_advantage(draft: Draft) -> None:
    row_3(draft).advantage = None


@case("advantages", GROUP_2)
def advantages_of_the_other_estimator(draft: Draft) -> None:
    draft.configure(training={"normalize_advantages": True})


@case("weight_versions", ROW_3)
def sampled_by_stale_weights(draft: Draft) -> None:
    row_3(draft).weight_versions = [WeightSpan("0", 1), WeightSpan("1", 1)]


@case("weight_versions", ROW_3)
def a_token_without_a_weight_version(draft: Draft) -> None:
    row_3(draft).weight_versions = [WeightSpan("1", 1)]


@case("train_log_probs", ROW_3)
def the_trainer_did_not_see_it(draft: Draft) -> None:
    row_3(draft).train_log_probs = []


@case("train_log_probs mismatch_gate mismatch_reported", ROW_3)
def a_trainer_log_prob_above_zero(draft: Draft) -> None:
    row_3(draft).train_log_probs[0] = 0.5


@case("train_log_probs mismatch_gate mismatch_reported", ROW_3)
def a_trainer_log_prob_that_is_not_a_number(draft: Draft) -> None:
    row_3(draft).train_log_probs[0] = math.nan


@case("mismatch_gate", "dump/rollout/000001.parquet")
def stale_engine_honestly_reported(draft: Draft) -> None:
    for member in draft.steps[1]:
        member.train_log_probs = [-0.7, -0.4]
    draft.metrics[1].update(mismatch_mean=0.175, mismatch_max=0.2)


@case("mismatch_gate train_log_probs", "dump/rollout/000001.parquet")
def nothing_to_compare(draft: Draft) -> None:
    for member in draft.steps[1]:
        member.train_log_probs = []


@case("mismatch_reported", STEP_1)
def a_flattering_mismatch(draft: Draft) -> None:
    draft.metrics[1]["mismatch_mean"] = 4e-6


@case("mismatch_reported", STEP_1)
def no_mismatch_reported(draft: Draft) -> None:
    draft.metrics[1]["mismatch_max"] = None


@case("metrics_agree", STEP_1)
def a_flattering_pass_rate(draft: Draft) -> None:
    draft.metrics[1]["pass_rate"] = 0.5


@case("metrics_agree", STEP_1)
def the_weight_version_did_not_move(draft: Draft) -> None:
    draft.metrics[1]["weight_version"] = 1


@case("weights_changed", STEP_1)
def a_step_that_moved_nothing(draft: Draft) -> None:
    draft.metrics[1]["weight_delta"] = 0.0


@case("weights_changed", STEP_1)
def weights_moved_by_no_step(draft: Draft) -> None:
    draft.metrics[1]["optimizer_steps"] = 0


@case("weights_changed", "metrics.jsonl")
def no_step_at_all(draft: Draft) -> None:
    for record in draft.metrics:
        record.update(optimizer_steps=0, weight_delta=0.0)


@case("weight_hashes", "manifest.json")
def the_same_weights_as_before(draft: Draft) -> None:
    draft.weights["after"] = draft.weights["before"]


@case("weight_hashes", "manifest.json")
def no_hash_of_the_trained_weights(draft: Draft) -> None:
    del draft.weights["after"]


@case("learning", "")
def too_few_steps_to_learn(draft: Draft) -> None:
    draft.configure(verify={"learning": True})


def evaluated(draft: Draft) -> Sample:
    """Makes the run one with evaluations; returns a sample of the last of them."""
    other = evaluated_run()
    draft.evaluations, draft.eval_metrics = other.evaluations, other.eval_metrics
    draft.configure(rollout={"eval_interval": 4})
    return draft.evaluations[2][0]


EVAL_2 = "metrics.jsonl evaluation before step 2"


@case("evaluation_files", "dump/eval")
def no_evaluation_at_the_end(draft: Draft) -> None:
    evaluated(draft)
    del draft.evaluations[2], draft.eval_metrics[1]


@case("evaluation_files", "dump/eval")
def an_evaluation_that_nobody_asked_for(draft: Draft) -> None:
    evaluated(draft)
    draft.configure(rollout={"skip_eval_before_train": True})


@case("evaluation_files", "metrics.jsonl")
def an_evaluation_recorded_twice(draft: Draft) -> None:
    evaluated(draft)
    draft.eval_metrics.append(draft.eval_metrics[1])


@case("evaluation_weights", "dump/eval/000002.parquet row 0")
def evaluated_on_stale_weights(draft: Draft) -> None:
    evaluated(draft).weight_versions = [WeightSpan("0", 2)]


@case("evaluation_figures", EVAL_2)
def a_flattering_evaluation(draft: Draft) -> None:
    evaluated(draft)
    draft.eval_metrics[1]["eval"]["golf"]["mean"] = 0.75


@case("evaluation_figures", EVAL_2)
def missing_samples_that_count_as_zero(draft: Draft) -> None:
    evaluated(draft).reward = None


@case("evaluation_figures", EVAL_2)
def an_evaluation_of_another_environment(draft: Draft) -> None:
    evaluated(draft).environment = "other"


FORK = f"{ROW_3} fork 1"


def forked(draft: Draft) -> Fork:
    """Makes the run one with forks; returns the only one of row 3."""
    other = forked_run()
    draft.steps, draft.metrics = other.steps, other.metrics
    (only,) = row_3(draft).forks
    return only


@case("trained_once metrics_agree", ROW_3)
def a_reply_that_the_trunk_and_a_fork_train(draft: Draft) -> None:
    """The fork's first reply is the sample's own, trained again; the fork says that it shares no more than the prompt."""
    other = forked(draft)
    own = row_3(draft)
    other.tokens, other.shared_length = [*own.tokens, 7, 25, 2], len(PROMPT)
    other.response_length, other.loss_mask = 5, [1, 1, 0, 1, 1]
    other.rollout_log_probs, other.train_log_probs = [*ENGINE, 0.0, *ENGINE], [*TRAINER, -3.0, *TRAINER]
    other.weight_versions = [WeightSpan("1", 4)]


@case("trained_once metrics_agree", FORK)
def a_fork_that_trains_what_it_shares(draft: Draft) -> None:
    other = forked(draft)
    own = row_3(draft)
    other.tokens, other.shared_length = [*own.tokens, 7, 25, 2], len(own.tokens)
    other.response_length, other.loss_mask = 5, [1, 1, 0, 1, 1]
    other.rollout_log_probs, other.train_log_probs = [*ENGINE, 0.0, *ENGINE], [*TRAINER, -3.0, *TRAINER]
    other.weight_versions = [WeightSpan("1", 4)]
    own.generated_tokens = 99


@case("trained_once metrics_agree", ROW_3)
def the_same_fork_twice(draft: Draft) -> None:
    row_3(draft).forks = [forked(draft)] * 2


@case("trained_once", FORK)
def a_fork_of_another_sample(draft: Draft) -> None:
    forked(draft).tokens[1] = 9


@case("metrics_agree", STEP_1)
def a_fork_is_lost(draft: Draft) -> None:
    forked(draft)
    row_3(draft).forks = []
    draft.metrics[1]["mismatch_mean"] = 1e-5


@case("lengths", FORK)
def a_fork_without_a_log_prob(draft: Draft) -> None:
    forked(draft).rollout_log_probs.pop()


@case("loss_masks rollout_log_probs metrics_agree", FORK)
def a_fork_that_trains_nothing(draft: Draft) -> None:
    other = forked(draft)
    other.loss_mask, other.weight_versions = [0, 0, 0], []


@case("prompts trained_once", FORK)
def a_fork_without_a_prompt(draft: Draft) -> None:
    other = forked(draft)
    other.tokens = other.tokens[-3:]


@case("vocabulary", FORK)
def an_id_of_a_fork_too_large(draft: Draft) -> None:
    forked(draft).tokens[-1] = 32


@case("rollout_log_probs", FORK)
def a_log_prob_where_a_fork_trains_nothing(draft: Draft) -> None:
    forked(draft).rollout_log_probs[1] = -0.25


@case("weight_versions", FORK)
def a_fork_sampled_by_stale_weights(draft: Draft) -> None:
    forked(draft).weight_versions = [WeightSpan("0", 2)]


@case("weight_versions", FORK)
def a_token_of_a_fork_without_a_weight_version(draft: Draft) -> None:
    forked(draft).weight_versions = [WeightSpan("1", 1)]


@case("train_log_probs", FORK)
def a_fork_that_the_trainer_did_not_see(draft: Draft) -> None:
    forked(draft).train_log_probs = []


@case("mismatch_gate mismatch_reported", "dump/rollout/000001.parquet")
def a_fork_scored_by_other_weights(draft: Draft) -> None:
    forked(draft).train_log_probs[0] = -2.5


@case("evaluation_weights", "dump/eval/000002.parquet row 0 fork 1")
def a_fork_evaluated_on_stale_weights(draft: Draft) -> None:
    evaluated(draft).forks = [fork(step=0)]


@pytest.mark.parametrize("name", CASES)
def test_a_broken_run_fails_exactly_the_rules_that_it_breaks(name: str, tmp_path: Path) -> None:
    change, rules, where = CASES[name]
    draft = good_run()
    change(draft)
    report = judged(draft, tmp_path / "run")
    assert set(report.failed) == rules, report.as_text()
    assert where in {finding.where for finding in report.findings}
    assert not any("the rule itself failed" in finding.message for finding in report.findings)
    with pytest.raises(VerificationFailed, match=f"{len(rules)} of "):
        report.raise_if_failed()


def test_every_rule_has_a_case_that_breaks_it() -> None:
    broken = set().union(*(rules for _, rules, _ in CASES.values()))
    assert broken | {"readable"} == {rule.name for rule in verification.RULES}
    assert len({rule.name for rule in verification.RULES}) == len(verification.RULES)
