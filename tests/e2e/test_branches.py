"""The real job on rollouts that fork: engine and trainer agree on every sequence of them, and no sampled token is left out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from projects import project

from miles_verifiers.record import dump
from miles_verifiers.record.metrics import read_metrics
from miles_verifiers.verify import verify

CONFIG = """
[model]
source = "tiny:qwen3"

[environment]
source = "{source}"
verifiers = "0.2.0"
taskset = {{ id = "fork-env" }}
history = "keep"

[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 4
rollout_max_response_len = 24
eval_interval = 4
n_samples_per_eval_prompt = 2

[training]
num_steps = 2
max_tokens_per_gpu = 256
"""


@pytest.mark.timeout(600)
def test_rollouts_that_fork_are_trained_on_whole(tmp_path: Path) -> None:
    code = (Path(__file__).parent / "fork_env.py").read_text()
    source = project(tmp_path / "fork", "fork-env", "verifiers==0.2.0", code=code)
    (tmp_path / "config.toml").write_text(CONFIG.format(source=source))
    run = tmp_path / "run"
    command = [sys.executable, "-P", "-m", "miles_verifiers", "e2e", "--profile", "cpu", "--run-dir", str(run)]
    done = subprocess.run(
        [*command, "--config", str(tmp_path / "config.toml")],
        env=dict(os.environ), capture_output=True, text=True, timeout=550, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for kind in ("rollout", "eval"):
        samples = [sample for path in dump.rollout_files(run, kind).values() for sample in dump.read_rollout(path)]
        # A third fork where the answer, which is no text of this tokenizer, was not found again.
        assert all(sample.turns == 4 and len(sample.forks) in (2, 3) for sample in samples)
        assert all(sample.sampled_tokens == sample.generated_tokens for sample in samples)
    assert all(record["samples"] == 8 and record["forks"] >= 16 for record in read_metrics(run))

    # Control: the trainer's log-probs of one fork are those of another token, and the gate sees it.
    path = dump.rollout_files(run)[1]
    samples = dump.read_rollout(path)
    log_probs = next(sample for sample in samples if sample.usable).forks[0].train_log_probs
    log_probs[0] -= 1.0
    dump.write_rollout(run, 1, samples)
    assert "mismatch_gate" in verify(run).failed
