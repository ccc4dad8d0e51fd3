"""A small good run, made by hand: two steps of two groups of four samples, numbers that can be checked by eye.

`Draft` keeps everything in memory until `write`, so that a test can break exactly one thing first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import tomli_w

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.record import dump
from miles_verifiers.record.manifest import Manifest
from miles_verifiers.record.samples import Fork, Sample, WeightSpan

VOCAB_SIZE = 32
PROMPT = [1, 5, 6]
ENGINE = [-0.5, -0.25]
TRAINER = [-0.5 + 2e-5, -0.25]
"""The mean |difference| to ENGINE is 1e-5, the largest 2e-5."""

# One group as the environment scores it: passed, correct, most_concise, fastest; then the advantage against the group's
# mean, which is 0.5 where one sample wins everything and 0.5 where two tie on one reward and one is faster.
ONE_WINNER = [(1, 1.0, 0.5, 0.5, 1.5), (0, 0.0, 0.0, 0.0, -0.5), (0, 0.0, 0.0, 0.0, -0.5), (0, 0.0, 0.0, 0.0, -0.5)]
TWO_TIED = [(1, 1.0, 0.25, 0.5, 1.0), (1, 1.0, 0.25, 0.0, 0.5), (0, 0.0, 0.0, 0.0, -0.75), (0, 0.0, 0.0, 0.0, -0.75)]
NONE_PASSED = [(0, 0.0, 0.0, 0.0, 0.0)] * 4


def config_table(**sections: dict[str, Any]) -> dict[str, Any]:
    """A configuration of two steps; `training={"num_steps": 10}` changes single fields."""
    table: dict[str, Any] = {
        "profile": "cpu",
        "model": {"source": "path:/models/small"},
        "environment": {"source": "environments/golf"},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 8},
        "training": {"num_steps": 2, "normalize_advantages": False},
        "verify": {
            "reward_names": ["correct", "most_concise", "fastest"],
            "group_share_rewards": {"most_concise": 0.5, "fastest": 0.5},
        },
    }
    for section, fields in sections.items():
        table[section] = {**table[section], **fields}
    return table


def sample(index: int = 0, step: int = 0, row: tuple[float, ...] = ONE_WINNER[0]) -> Sample:
    """A completed single-turn sample; `row` is one line of the tables above."""
    passed, correct, concise, fastest, advantage = row
    return Sample(
        group_index=index // 4,
        index=index,
        task_index=index // 4 % 2,
        tokens=[*PROMPT, 20 + index % 4, 2],
        response_length=2,
        loss_mask=[1, 1],
        rollout_log_probs=list(ENGINE),
        train_log_probs=list(TRAINER),
        reward=correct + concise + fastest,
        rewards={"correct": correct, "most_concise": concise, "fastest": fastest},
        metrics={"passed": passed, "latency": 0.125},
        advantage=advantage,
        status="completed",
        stop_condition="agent_completed",
        weight_versions=[WeightSpan(str(step), 2)],
        generated_tokens=2,
        renderer="default",
        environment="golf",
        seed=7,
        prompt="Print hello.",
        response="print('hello')",
        timings={"generation": 0.5, "total": 0.75},
    )


def fork(step: int = 0) -> Fork:
    """Two further sampled tokens of any sample above: asked anew after its first two ids."""
    return Fork(
        tokens=[*PROMPT[:2], 7, 24, 25, 2],
        response_length=3,
        loss_mask=[1, 0, 1],
        rollout_log_probs=[ENGINE[0], 0.0, ENGINE[1]],
        train_log_probs=[TRAINER[0], -3.0, TRAINER[1]],
        weight_versions=[WeightSpan(str(step), 2)],
        shared_length=2,
    )


def metrics_record(step: int, *, pass_rate: float, reward_mean: float) -> dict[str, Any]:
    return {
        "step": step,
        "samples": 8,
        "groups": 2,
        "trained_groups": 2,
        "flat_groups": 0,
        "failed": 0,
        "reward_mean": reward_mean,
        "pass_rate": pass_rate,
        "response_length_mean": 2.0,
        "sampled_tokens": 16,
        "forks": 0,
        "ending": "full",
        "dropped_groups": {},
        "causes": {},
        "retried": {},
        "loss": -0.01,
        "grad_norm": 1.25,
        "clip_fraction": 0.0,
        "mismatch_mean": 1e-5,
        "mismatch_max": 2e-5,
        "mismatch_k3": 1e-10,
        "weight_delta": 3e-5,
        "optimizer_steps": 1,
        "weight_version": step + 1,
        "tokens_per_second": 53.0,
        "seconds": {"rollout": 6.0, "train": 5.0, "sync": 0.5, "save": 1.0},
    }


@dataclass
class Draft:
    """A run before it is written: `table` is the configuration, `steps` the samples by step."""

    table: dict[str, Any]
    steps: list[list[Sample]]
    metrics: list[dict[str, Any]]
    weights: dict[str, str]
    model: dict[str, Any]
    evaluations: dict[int, list[Sample]] = field(default_factory=dict)
    """By the step that they were made before."""
    eval_metrics: list[dict[str, Any]] = field(default_factory=list)

    def write(self, run_dir: Path) -> Path:
        """Writes past the checks of `dump`, as a foreign or a broken program would."""
        model = run_dir / "models" / "small"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(self.model))
        (run_dir / "config.toml").write_text(tomli_w.dumps(self.table))
        records = [*self.metrics, *self.eval_metrics]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        manifest = Manifest.create(run_dir, profile="cpu", config_hash="0")
        for when, digest in self.weights.items():
            manifest.record_weights(when, digest)
        for kind, files in (("rollout", dict(enumerate(self.steps))), ("eval", self.evaluations)):
            folder = run_dir / "dump" / kind
            folder.mkdir(parents=True)
            for step, samples in files.items():
                pq.write_table(dump.to_table(samples), folder / f"{step:06d}.parquet")
        return run_dir

    def configure(self, **sections: dict[str, Any]) -> None:
        for section, fields in sections.items():
            self.table[section] = {**self.table[section], **fields}

    @property
    def config(self) -> RunConfig:
        return loading.validate(self.table, where="the test")


def good_run() -> Draft:
    """Step 0 has one winner in each group (2 of 8 passed), step 1 one group with a tie and one winner (3 of 8)."""
    layout = [[ONE_WINNER, ONE_WINNER], [TWO_TIED, ONE_WINNER]]
    steps = [_step(step, groups) for step, groups in enumerate(layout)]
    metrics = [
        metrics_record(0, pass_rate=2 / 8, reward_mean=0.5),
        metrics_record(1, pass_rate=3 / 8, reward_mean=0.625),
    ]
    return Draft(config_table(), steps, metrics, {"before": "aa", "after": "bb"}, {"vocab_size": VOCAB_SIZE})


def forked_run() -> Draft:
    """The good run, of which two rollouts of step 1 forked, one of them twice. The mean mismatch stays what it was."""
    draft = good_run()
    for number, forks in ((3, 1), (6, 2)):
        member = draft.steps[1][number]
        member.forks = [fork(step=1) for _ in range(forks)]
        member.turns, member.generated_tokens = 1 + 2 * forks, 2 + 2 * forks
    draft.metrics[1].update(sampled_tokens=22, forks=3)
    return draft


def evaluated_run() -> Draft:
    """The good run with evaluations before its first step and at its end: the groups of step 0, of which 2 of 8 passed."""
    draft = good_run()
    draft.configure(rollout={"eval_interval": 4})
    for step in (0, 2):
        draft.evaluations[step] = _step(0, [ONE_WINNER, ONE_WINNER])
        for member in draft.evaluations[step]:
            member.weight_versions = [WeightSpan(str(step), 2)]
        figures = {"tasks": 2, "n": 8, "missing": 0, "mean": 0.5, "low": 0.5, "high": 0.5, "pass_rate": 0.25}
        draft.eval_metrics.append({"step": step, "eval": {"golf": {**figures, "response_length_mean": 2.0}}})
    return draft


def learning_run(passing_groups: list[int]) -> Draft:
    """One step for each number: so many of its two groups have one winner, which is 1 of 4 samples each; the others none."""
    draft = good_run()
    draft.steps = [
        _step(step, [ONE_WINNER] * count + [NONE_PASSED] * (2 - count)) for step, count in enumerate(passing_groups)
    ]
    draft.metrics = [
        metrics_record(step, pass_rate=count / 8, reward_mean=count * 2 / 8)
        for step, count in enumerate(passing_groups)
    ]
    draft.configure(training={"num_steps": len(passing_groups)}, verify={"learning": True, "min_final_pass_rate": 0.25})
    return draft


def _step(step: int, groups: list[list[tuple[float, ...]]]) -> list[Sample]:
    rows = [row for group in groups for row in group]
    return [sample(step * len(rows) + number, step, row) for number, row in enumerate(rows)]
