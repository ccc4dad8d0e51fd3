"""Figures of a run, for its report: they inform, the rules decide."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

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
        "sampled_tokens": sum(sum(sample.loss_mask) for sample in samples),
        "passed": passed,
        "pass_rate_interval": list(wilson_interval(passed, total)),
        "pass_rate_by_step": [_rate(*pass_count(run, [rollout])) for rollout in run.rollouts],
        "mismatch_mean_by_step": [_finite(mismatch_mean(rollout)) for rollout in run.rollouts],
    }


def _rate(passed: int, total: int) -> float | None:
    return passed / total if total else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
