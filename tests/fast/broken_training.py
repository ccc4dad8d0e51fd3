"""Broken advantages, weights, log-probs, metrics and evaluations."""

from __future__ import annotations

import math

from broken import EVAL_2, GROUP_2, ROW_3, STEP_1, Cases, evaluated, row_3
from factories import Draft

from miles_verifiers.record.samples import WeightSpan

CASES = Cases()
case = CASES.case


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
