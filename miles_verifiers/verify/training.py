"""Rules on training: which weights sampled, how far engine and trainer are apart, whether the weights moved, learning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from miles_verifiers.record.manifest import WEIGHTS_AFTER, WEIGHTS_BEFORE
from miles_verifiers.record.samples import Sample, TokenSequence
from miles_verifiers.statistics import fisher_greater
from miles_verifiers.verify.rule import Problem, Rule, rule
from miles_verifiers.verify.run import Rollout, Run, sequences

_REPORTED_TOLERANCE = 1e-6
"""Nats. The trainer averages float32 numbers of size 1 to 10, whose last bit is about 1e-7 to 1e-6."""
_POSITIVE_TOLERANCE = 1e-6
"""A log-prob of a sure token may come out above 0 by the last bit where softmax is computed in parts."""
_WINDOW = 5
_LEVEL = 0.01


def token_differences(samples: list[Sample]) -> list[float]:
    """|engine - trainer| in nats of every trained token, over the usable samples' sequences that have both log-probs."""
    return [
        abs(engine - trainer)
        for sample in samples
        if sample.usable
        for own in sample.sequences
        if len(own.train_log_probs) == len(own.rollout_log_probs) == len(own.loss_mask)
        for engine, trainer, mask in zip(own.rollout_log_probs, own.train_log_probs, own.loss_mask, strict=True)
        if mask
    ]


def mismatch_mean(rollout: Rollout) -> float | None:
    """Mean of `token_differences`, None where there is nothing to compare."""
    return _mean(token_differences(rollout.samples))


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _comparable(run: Run, rollout: Rollout) -> list[Sample]:
    """Without the groups that an earlier step left over: its weights sampled them, so engine and trainer rightly differ."""
    if run.config.rollout.surplus_groups == "rerun":
        return rollout.samples
    now = str(rollout.step)
    return [sample for sample in rollout.samples if _versions(sample.sequences) <= {now}]


def _versions(sequences: Iterable[TokenSequence]) -> set[str]:
    return {span.version for sequence in sequences for span in sequence.weight_versions}


@rule()
def weight_versions(run: Run) -> Iterator[Problem]:
    """Every sampled token of step k was made by weight version k, or an earlier one where surplus_groups is "keep"."""
    for rollout in run.rollouts:
        first = 0 if run.config.rollout.surplus_groups == "keep" else rollout.step
        allowed = {str(version) for version in range(first, rollout.step + 1)}
        for where, _, sequence in sequences(rollout.placed()):
            strange = sorted(_versions([sequence]) - allowed)
            counted, trained = sum(span.count for span in sequence.weight_versions), sum(sequence.loss_mask)
            if strange:
                yield Problem(where, f"weight versions {strange}, expected '{rollout.step}'")
            if counted != trained:
                yield Problem(where, f"weight versions of {counted} tokens, {trained} are trained")


@rule()
def train_log_probs(run: Run) -> Iterator[Problem]:
    """Every sequence that training may use has the trainer's log-probs, finite and at most 0."""
    for where, sample, sequence in sequences(run.samples()):
        values = sequence.train_log_probs
        if len(values) != sequence.response_length and (values or sample.usable):
            yield Problem(where, f"{len(values)} train_log_probs, response_length is {sequence.response_length}")
        bad = [value for value in values if not value <= _POSITIVE_TOLERANCE or not math.isfinite(value)]
        if bad:
            yield Problem(where, f"train_log_probs has {bad[0]}")


@rule()
def mismatch_gate(run: Run) -> Iterator[Problem]:
    """At every step the mean |engine - trainer| log-prob of the tokens that its weights sampled is at most max_mismatch_mean."""
    limit = run.config.verify.max_mismatch_mean
    for rollout in run.rollouts:
        comparable = _comparable(run, rollout)
        mean = _mean(token_differences(comparable))
        if mean is None and rollout.samples and not comparable:
            continue  # all of it was left over
        if mean is None:
            yield Problem(rollout.name, "no token has the log-probs of both engine and trainer")
        elif not mean <= limit:
            yield Problem(rollout.name, f"mean mismatch {mean:.3g} nats, max_mismatch_mean is {limit:.3g}")


@rule()
def mismatch_reported(run: Run) -> Iterator[Problem]:
    """The mismatch in metrics.jsonl is that of the dumped log-probs."""
    for rollout in run.rollouts:
        record = run.metrics_of(rollout.step)
        differences = token_differences(rollout.samples)
        if record is None or not differences:
            continue
        actual = {"mismatch_mean": mismatch_mean(rollout), "mismatch_max": max(differences)}
        for name, value in actual.items():
            if not _close(record.get(name), value, _REPORTED_TOLERANCE):
                yield Problem(
                    f"metrics.jsonl step {rollout.step}", f"{name} = {record.get(name)}, the dump has {value}"
                )


@rule()
def metrics_agree(run: Run) -> Iterator[Problem]:
    """Counts, pass rate, mean reward and weight version in metrics.jsonl are those of the dump."""
    for rollout in run.rollouts:
        record = run.metrics_of(rollout.step)
        if record is None:
            continue
        for name, value in _expected_metrics(run, rollout).items():
            if not _close(record.get(name), value, _REPORTED_TOLERANCE):
                yield Problem(
                    f"metrics.jsonl step {rollout.step}", f"{name} = {record.get(name)}, the dump gives {value}"
                )


def _expected_metrics(run: Run, rollout: Rollout) -> dict[str, float | None]:
    samples = rollout.samples
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "samples": len(samples),
        "groups": len(rollout.groups()),
        "failed": sum(sample.status in ("failed", "aborted") for sample in samples),
        "sampled_tokens": sum(sample.sampled_tokens for sample in samples),
        "forks": sum(len(sample.forks) for sample in samples),
        "pass_rate": sum(run.passed(sample) for sample in samples) / len(samples) if samples else None,
        "reward_mean": math.fsum(rewards) / len(rewards) if rewards else None,
        "weight_version": rollout.step + 1,
    }


def _close(reported: Any, value: float | None, tolerance: float) -> bool:
    if value is None or not isinstance(reported, int | float):
        return reported is None and value is None
    return abs(reported - value) <= tolerance


@rule()
def weights_changed(run: Run) -> Iterator[Problem]:
    """Weights moved at every step with an optimizer step and at no other, and at least once in the run."""
    moved = False
    for record in run.metrics:
        steps, delta = record.get("optimizer_steps"), record.get("weight_delta")
        if not isinstance(steps, int) or not isinstance(delta, int | float):
            yield Problem(f"metrics.jsonl step {record['step']}", f"optimizer_steps = {steps}, weight_delta = {delta}")
        elif (steps > 0) != (delta > 0):
            yield Problem(f"metrics.jsonl step {record['step']}", f"weight_delta = {delta} by {steps} optimizer steps")
        else:
            moved = moved or steps > 0
    if not moved:
        yield Problem("metrics.jsonl", "no optimizer step moved the weights: all groups may have had equal rewards")


@rule()
def weight_hashes(run: Run) -> Iterator[Problem]:
    """The weights after training are not those before it, by their hashes in the manifest."""
    weights = run.manifest.weights if run.manifest else {}
    before, after = weights.get(WEIGHTS_BEFORE), weights.get(WEIGHTS_AFTER)
    if not before or not after:
        yield Problem("manifest.json", f"weights has before = {before}, after = {after}")
    elif before == after:
        yield Problem("manifest.json", "the weights after training have the hash of those before it")


@rule(asked=lambda run: run.config.verify.learning)
def learning(run: Run) -> Iterator[Problem]:
    """The last five steps pass at min_final_pass_rate or more, and significantly more often than the first five."""
    if len(run.rollouts) < 2 * _WINDOW:
        yield Problem("", f"{len(run.rollouts)} steps, learning is judged on {2 * _WINDOW} or more")
        return
    first, first_total = pass_count(run, run.rollouts[:_WINDOW])
    last, last_total = pass_count(run, run.rollouts[-_WINDOW:])
    where = f"{run.rollouts[-_WINDOW].name} and later"
    demanded = run.config.verify.min_final_pass_rate
    if last < demanded * last_total or not last_total:
        yield Problem(where, f"{last} of {last_total} passed, min_final_pass_rate is {demanded}")
    p = fisher_greater(first, first_total, last, last_total)
    if p >= _LEVEL:
        counts = f"{first} of {first_total} passed in the first {_WINDOW} steps, {last} of {last_total} in the last"
        yield Problem(where, f"{counts}: p = {p:.2g}, not below {_LEVEL}")


def pass_count(run: Run, rollouts: list[Rollout]) -> tuple[int, int]:
    """(samples that passed, all samples) of some steps."""
    samples = [sample for rollout in rollouts for sample in rollout.samples]
    return sum(run.passed(sample) for sample in samples), len(samples)


RULES: tuple[Rule, ...] = (
    weight_versions,
    train_log_probs,
    mismatch_gate,
    mismatch_reported,
    metrics_agree,
    weights_changed,
    weight_hashes,
    learning,
)
