"""Broken files, groups, samples, tokens and rewards."""

from __future__ import annotations

import math

from broken import GROUP_2, ROW_3, STEP_1, Cases, row_0, row_3
from factories import ENGINE, Draft, sample

from miles_verifiers.record.samples import WeightSpan

CASES = Cases()
case = CASES.case


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
