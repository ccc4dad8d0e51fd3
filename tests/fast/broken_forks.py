"""Broken rollouts that fork."""

from __future__ import annotations

from broken import ROW_3, STEP_1, Cases, evaluated, row_3
from factories import ENGINE, PROMPT, TRAINER, Draft, fork, forked_run

from miles_verifiers.record.samples import Fork, WeightSpan

FORK = f"{ROW_3} fork 1"
CASES = Cases()
case = CASES.case


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
