"""Rules on evaluations: that those of the configuration were made, with the right weights, and that their figures are true."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from miles_verifiers.record.metrics import EVAL_KEY
from miles_verifiers.rollout.evaluation import evaluation_due, summary
from miles_verifiers.verify.rule import Problem, Rule, rule
from miles_verifiers.verify.run import Run, sequences

_TOLERANCE = 1e-9
"""The figures are computed anew from the same numbers, which the dump keeps exactly."""


def _asked(run: Run) -> bool:
    return run.config.rollout.eval_interval is not None


@rule(asked=_asked)
def evaluation_files(run: Run) -> Iterator[Problem]:
    """Every evaluation that is due has one file and one record, and there are no others."""
    due = {step for step in range(run.num_steps) if evaluation_due(run.config.rollout, step)} | {run.num_steps}
    files = [evaluation.step for evaluation in run.evaluations]
    records = [record["step"] for record in run.eval_metrics]
    if files != sorted(due):
        yield Problem("dump/eval", f"evaluations before steps {files}, expected {sorted(due)}")
    if records != sorted(due):
        yield Problem("metrics.jsonl", f"records of evaluations before steps {records}, expected {sorted(due)}")


@rule(asked=_asked)
def evaluation_weights(run: Run) -> Iterator[Problem]:
    """Every sampled token of an evaluation before step k was made by weight version k."""
    for evaluation in run.evaluations:
        for where, _, sequence in sequences(evaluation.placed()):
            strange = sorted({span.version for span in sequence.weight_versions} - {str(evaluation.step)})
            if strange:
                yield Problem(where, f"weight versions {strange}, expected '{evaluation.step}'")


@rule(asked=_asked)
def evaluation_figures(run: Run) -> Iterator[Problem]:
    """The figures of each evaluation in metrics.jsonl are those that its samples give."""
    records = {record["step"]: record[EVAL_KEY] for record in run.eval_metrics}
    for evaluation in run.evaluations:
        reported = records.get(evaluation.step)
        if not isinstance(reported, dict):
            continue  # the finding of another rule
        for label in sorted({sample.environment for sample in evaluation.samples} | reported.keys()):
            samples = [sample for sample in evaluation.samples if sample.environment == label]
            told = reported.get(label)
            for name, value in asdict(summary(samples, run.config.verify.pass_metric)).items():
                given = told.get(name) if isinstance(told, dict) else None
                if not _same(given, value):
                    where = f"metrics.jsonl evaluation before step {evaluation.step}"
                    yield Problem(where, f"{label}: {name} = {given}, the dump gives {value}")


def _same(given: object, value: float | None) -> bool:
    if value is None or not isinstance(given, int | float):
        return given is None and value is None
    return abs(given - value) <= _TOLERANCE * max(1.0, abs(value))


RULES: tuple[Rule, ...] = (evaluation_files, evaluation_weights, evaluation_figures)
