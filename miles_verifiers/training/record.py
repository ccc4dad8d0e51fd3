"""What metrics.jsonl records of a training step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.grpo import AdvantageCounts
from miles_verifiers.record.metrics import EVAL_KEY
from miles_verifiers.rollout.evaluation import Evaluation
from miles_verifiers.training.steps import StepRollouts


def step_record(
    step: int,
    batch: StepRollouts,
    counts: AdvantageCounts,
    result: dict[str, Any],
    seconds: dict[str, float],
    config: RunConfig,
) -> dict[str, Any]:
    """The fields of metrics.METRIC_FIELDS; `result` are those of the trainer's StepResult."""
    samples = batch.samples
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    passed = [sample.metrics.get(config.verify.pass_metric, 0.0) for sample in samples]
    sampled = sum(sample.sampled_tokens for sample in samples)
    trained = (
        "loss",
        "grad_norm",
        "clip_fraction",
        "mismatch_mean",
        "mismatch_max",
        "mismatch_k3",
        "weight_delta",
        "optimizer_steps",
    )
    return {
        "step": step,
        "samples": len(samples),
        "groups": counts.groups,
        "trained_groups": counts.trained_groups,
        "flat_groups": counts.flat_groups,
        "failed": sum(sample.status in ("failed", "aborted") for sample in samples),
        "reward_mean": _mean(rewards) if rewards else None,  # unscored is not zero
        "pass_rate": _mean(passed),
        "response_length_mean": _mean([float(sample.response_length) for sample in samples]),
        "sampled_tokens": sampled,
        "forks": sum(len(sample.forks) for sample in samples),
        "ending": batch.ending,
        "dropped_groups": batch.dropped,
        "causes": batch.causes,
        "retried": batch.retried,
        **{name: result[name] for name in trained},
        "weight_version": step + 1,
        "tokens_per_second": round(sampled / max(seconds["rollout"], 1e-9), 2),
        "seconds": {**seconds, **{f"train_{stage}": round(value, 3) for stage, value in result["seconds"].items()}},
    }


def eval_record(step: int, results: dict[str, Evaluation], causes: dict[str, int], seconds: float) -> dict[str, Any]:
    """The record of an evaluation made before step `step`; metrics.EVAL_KEY tells it from a step's."""
    return {
        "step": step,
        EVAL_KEY: {name: asdict(result) for name, result in results.items()},
        "causes": causes,
        "seconds": {"evaluation": round(seconds, 3)},
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
