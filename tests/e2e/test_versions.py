"""The whole job, real model and engine and all, on the oldest and the newest Verifiers. Part of `nox -s compat`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from miles_verifiers.record import dump
from miles_verifiers.record.manifest import Manifest

CONFIG = """
training.num_steps = 1
rollout.eval_interval = 1

[environment]
source = "environments/{environment}"
verifiers = "{version}"
taskset = {{ id = "{taskset}" }}
eval_tasks = 1
n_samples_per_eval_prompt = 2
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("version", "environment"), [("0.2.0", "code_golf_v1"), ("0.4.0", "code_golf")])
def test_the_whole_job(tmp_path: Path, version: str, environment: str) -> None:
    taskset = environment.replace("_", "-")
    config = CONFIG.format(version=version, environment=environment, taskset=taskset)
    (tmp_path / "config.toml").write_text(config, encoding="utf-8")
    options = ["--profile", "cpu", "--run-dir", str(tmp_path / "run"), "--config", str(tmp_path / "config.toml")]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "miles_verifiers", "e2e", *options],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    facts = Manifest.load(tmp_path / "run").phases["prepare"].figures["preflight"]["facts"]
    found = {(fact["role"], fact["what"]): fact["found"].split()[0] for fact in facts}
    assert found["env", "verifiers"] == version
    for kind in ("rollout", "eval"):
        files = dump.rollout_files(tmp_path / "run", kind)
        samples = [sample for file in files.values() for sample in dump.read_rollout(file)]
        assert {sample.environment for sample in samples} == {taskset}
        assert any(sample.usable for sample in samples)
