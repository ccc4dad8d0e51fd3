"""Figures of a run, for its report: they inform, the rules decide."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from miles_verifiers.rollout.evaluation import summary
from miles_verifiers.statistics import wilson_interval
from miles_verifiers.verify.run import Run
from miles_verifiers.verify.training import mismatch_mean, pass_count


def figures_of(run: Run) -> dict[str, Any]:
    """Counts, pass rates with the 95 % interval of the whole, and the mismatch by step in nats; plain JSON values."""
    samples = [sample for _, sample in run.samples()]
    passed, total = pass_count(run, run.rollouts)
    return {
        "steps": len(run.rollouts),
        "samples": total,
        "statuses": dict(sorted(Counter(sample.status for sample in samples).items())),
        "sampled_tokens": sum(sample.sampled_tokens for sample in samples),
        "forks": sum(len(sample.forks) for sample in samples),
        "passed": passed,
        "pass_rate_interval": list(wilson_interval(passed, total)),
        "pass_rate_by_step": [_rate(*pass_count(run, [rollout])) for rollout in run.rollouts],
        "evaluations": _evaluations(run),
        "mismatch_mean_by_step": [_finite(mismatch_mean(rollout)) for rollout in run.rollouts],
    }


def _evaluations(run: Run) -> dict[str, list[float | None]]:
    """Mean rewards in order of the evaluations, by environment."""
    means: dict[str, list[float | None]] = {}
    for evaluation in run.evaluations:
        for label in sorted({sample.environment for sample in evaluation.samples}):
            own = [sample for sample in evaluation.samples if sample.environment == label]
            means.setdefault(label, []).append(_finite(summary(own, run.config.verify.pass_metric).mean))
    return means


def _rate(passed: int, total: int) -> float | None:
    return passed / total if total else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
