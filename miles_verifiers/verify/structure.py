"""Rules on what is there: files, counts, groups, and the shape of every sample."""

from __future__ import annotations

import math
from collections.abc import Iterator

from miles_verifiers.record.metrics import METRIC_FIELDS
from miles_verifiers.record.samples import STATUSES
from miles_verifiers.rollout.causes import EQUAL_REWARDS
from miles_verifiers.verify.rule import Problem, Rule, rule
from miles_verifiers.verify.run import Run, sequences

_REASON_LENGTH = 300
"""Characters of a rollout's error that a finding quotes; the dump has all of it."""


@rule()
def readable(run: Run) -> Iterator[Problem]:
    """Every file of the run can be read."""
    for where, message in run.unreadable:
        yield Problem(where, message)
    if run.torn:
        yield Problem("metrics.jsonl", f"an interruption left a torn last line: {run.torn[:60]!r}", "warning")


@rule()
def rollout_files(run: Run) -> Iterator[Problem]:
    """There is one rollout file for each training step, numbered from 0."""
    expected = set(range(run.num_steps))
    found = {rollout.step for rollout in run.rollouts}
    for step in sorted(expected - found):
        yield Problem(f"dump/rollout/{step:06d}.parquet", "missing or unreadable")
    for rollout in run.rollouts:
        if rollout.step not in expected:
            yield Problem(rollout.name, f"the run has {run.num_steps} steps, counted from 0")


@rule()
def metrics_records(run: Run) -> Iterator[Problem]:
    """metrics.jsonl has one whole record per training step, in order."""
    steps = [record["step"] for record in run.metrics]
    expected = list(range(run.num_steps))
    if steps != expected:
        yield Problem("metrics.jsonl", f"records of steps {steps}, expected {expected}")
    for record in run.metrics:
        missing = [name for name in METRIC_FIELDS if name not in record]
        if missing:
            yield Problem(f"metrics.jsonl step {record['step']}", f"without {', '.join(missing)}")


@rule()
def sample_counts(run: Run) -> Iterator[Problem]:
    """Every step has rollout_batch_size x n_samples_per_prompt samples, but for the last one where tasks ran out."""
    expected = run.config.samples_per_step
    for rollout in run.rollouts:
        count = len(rollout.samples)
        if count != expected and not (run.ran_out and rollout.step == run.num_steps - 1 and 0 < count < expected):
            yield Problem(rollout.name, f"{count} samples, expected {expected}")


@rule()
def full_steps(run: Run) -> Iterator[Problem]:
    """Every step was filled in time."""
    for record in run.metrics:
        if record.get("ending") not in ("full", "tasks ran out"):
            yield Problem(f"metrics.jsonl step {record['step']}", f"ending is {record.get('ending')!r}")


@rule()
def dropped_groups(run: Run) -> Iterator[Problem]:
    """No group was dropped because its rollouts failed; those that a filter dropped do not count."""
    for record in run.metrics:
        dropped = record.get("dropped_groups")
        for cause, count in dropped.items() if isinstance(dropped, dict) else ():
            if cause != EQUAL_REWARDS and not cause.startswith("filter"):
                yield Problem(f"metrics.jsonl step {record['step']}", f"{count} group(s) dropped: {cause}")


@rule()
def groups(run: Run) -> Iterator[Problem]:
    """Every group has n_samples_per_prompt samples of one task, all of one step."""
    size = run.config.rollout.n_samples_per_prompt
    seen: dict[int, str] = {}
    for rollout in run.rollouts:
        for index, samples in rollout.groups().items():
            where = f"{rollout.name} group {index}"
            tasks = sorted({sample.task_index for sample in samples})
            if len(samples) != size:
                yield Problem(where, f"{len(samples)} samples, expected {size}")
            if len(tasks) != 1:
                yield Problem(where, f"samples of several tasks: {tasks}")
            if index in seen:
                yield Problem(where, f"the same group is in {seen[index]}")
            seen[index] = rollout.name


@rule()
def sample_order(run: Run) -> Iterator[Problem]:
    """The samples' indices increase over the whole run, none is there twice."""
    before: int | None = None
    for where, sample in run.samples():
        if before is not None and sample.index <= before:
            yield Problem(where, f"index {sample.index} after {before}")
        before = sample.index


@rule()
def statuses(run: Run) -> Iterator[Problem]:
    """Every sample has a known status."""
    for where, sample in run.samples():
        if sample.status not in STATUSES:
            yield Problem(where, f"status {sample.status!r} is none of {', '.join(STATUSES)}")


@rule()
def no_errors(run: Run) -> Iterator[Problem]:
    """No rollout ended with an error."""
    for where, sample in run.samples():
        if sample.error or sample.status in ("failed", "aborted"):
            reason = sample.error or sample.stop_condition or "no reason recorded"
            yield Problem(where, f"{sample.status}: {reason[:_REASON_LENGTH]}")


@rule()
def some_completed(run: Run) -> Iterator[Problem]:
    """At least one rollout came to its end by itself."""
    if not any(sample.status == "completed" for _, sample in run.samples()):
        yield Problem("", "no sample has the status completed: is rollout_max_response_len too small?")


@rule()
def lengths(run: Run) -> Iterator[Problem]:
    """Log-probs, loss mask and response have one length, and the response lies within the tokens."""
    for where, _, sequence in sequences(run.samples()):
        length = sequence.response_length
        for name, values in (("loss_mask", sequence.loss_mask), ("rollout_log_probs", sequence.rollout_log_probs)):
            if len(values) != length:
                yield Problem(where, f"{len(values)} entries in {name}, response_length is {length}")
        if not 0 <= length <= len(sequence.tokens):
            yield Problem(where, f"response_length {length} with {len(sequence.tokens)} tokens")


@rule()
def loss_masks(run: Run) -> Iterator[Problem]:
    """The loss mask is 0 or 1, and every sequence of a completed rollout trains a token."""
    for where, sample, sequence in sequences(run.samples()):
        others = sorted(set(sequence.loss_mask) - {0, 1})
        if others:
            yield Problem(where, f"loss_mask has {others}")
        if sample.status == "completed" and not any(sequence.loss_mask):
            yield Problem(where, "completed without a sampled token")


@rule()
def trained_once(run: Run) -> Iterator[Problem]:
    """No sampled token is trained twice: forks train nothing that they share, and none trains what no engine sampled."""
    for where, sample in run.samples():
        if sample.sampled_tokens > sample.generated_tokens:
            yield Problem(
                where, f"{sample.sampled_tokens} trained tokens, the engine sampled {sample.generated_tokens}"
            )
        for number, fork in enumerate(sample.forks, start=1):
            shared, place = fork.shared_length, f"{where} fork {number}"
            if not any(fork.tokens[:shared] == earlier.tokens[:shared] for earlier in sample.sequences[:number]):
                yield Problem(place, f"its first {shared} tokens are those of no sequence before it")
            repeated = sum(fork.loss_mask[: max(0, shared - (len(fork.tokens) - fork.response_length))])
            if repeated:
                yield Problem(place, f"{repeated} of its first {shared} tokens are trained again")


@rule()
def prompts(run: Run) -> Iterator[Problem]:
    """Every sequence starts with at least one prompt token."""
    for where, sample, sequence in sequences(run.samples()):
        # A rollout that failed before its first request has no tokens at all.
        if (sequence.tokens or sample.usable) and sequence.response_length >= len(sequence.tokens):
            yield Problem(where, f"the response is all of the {len(sequence.tokens)} tokens")


@rule()
def vocabulary(run: Run) -> Iterator[Problem]:
    """Every token id is in the model's vocabulary."""
    if run.vocab_size is None:
        yield Problem("", "the model's vocabulary size is not known")
        return
    for where, _, sequence in sequences(run.samples()):
        outside = [token for token in sequence.tokens if not 0 <= token < run.vocab_size]
        if outside:
            yield Problem(where, f"{len(outside)} ids outside 0..{run.vocab_size - 1}, the first is {outside[0]}")


@rule()
def rollout_log_probs(run: Run) -> Iterator[Problem]:
    """The engine's log-probs are finite and at most 0, and exactly 0 where the token is not trained."""
    for where, _, sequence in sequences(run.samples()):
        for position, value in enumerate(sequence.rollout_log_probs):
            if not math.isfinite(value) or value > 0:
                yield Problem(where, f"rollout_log_probs[{position}] = {value}")
                break
        # Lengths that differ are the finding of another rule.
        for position, (value, mask) in enumerate(zip(sequence.rollout_log_probs, sequence.loss_mask, strict=False)):
            if mask == 0 and value != 0:
                yield Problem(where, f"rollout_log_probs[{position}] = {value} for a token that is not trained")
                break


RULES: tuple[Rule, ...] = (
    readable,
    rollout_files,
    metrics_records,
    sample_counts,
    full_steps,
    dropped_groups,
    groups,
    sample_order,
    statuses,
    no_errors,
    some_completed,
    lengths,
    loss_masks,
    trained_once,
    prompts,
    vocabulary,
    rollout_log_probs,
)
