"""The real job, killed at random points and started again: bit for bit what it would have been.

Real engine, real trainer, a tiny model: tokens, log-probs of both, rewards, advantages and the weights at the end are equal to
those of a run that nobody killed. Groups are oversampled, and some are dropped. Part of `nox -s faults`.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from projects import project
from running import Run

from miles_verifiers.record import dump
from miles_verifiers.record.manifest import Manifest
from miles_verifiers.record.samples import as_row
from miles_verifiers.training.loop import TRACKER

STEPS = 6
KILLS = 3
CONFIG = """
[environment]
source = "{source}"
verifiers = "0.2.0"
taskset = {{ id = "parity-env" }}

[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 3
over_sampling_batch_size = 3
surplus_groups = "{surplus}"
equal_rewards = "drop"

[engine]
enable_deterministic_inference = true

[training]
lr = 1e-3
save_interval = 2
"""


def rows(folder: Path) -> list[list[dict[str, Any]]]:
    """The samples of each step, without the times that they took."""
    steps = [
        [as_row(sample) for sample in dump.read_rollout(path)] for _, path in sorted(dump.rollout_files(folder).items())
    ]
    return [[{name: value for name, value in row.items() if name != "timings"} for row in step] for step in steps]


def weights(folder: Path) -> dict[str, str]:
    """Hashes of the weights before the first step and after the last."""
    return dict(Manifest.load(folder).weights)


def wait_for_a_checkpoint(run: Run, folder: Path) -> int:
    """Until the run has the weights of a checkpoint in its engine; returns the checkpoint's step."""
    run.wait_for("weights, version")
    deadline = time.monotonic() + 120
    while not (tracker := folder / "checkpoints" / TRACKER).exists():
        assert run.process.poll() is None, run.text
        assert time.monotonic() < deadline, run.text
        time.sleep(0.02)
    done = int(tracker.read_text())
    assert done < STEPS, "it came too late"
    return done


def forget_the_place(folder: Path, step: int) -> None:
    """Take the place in the row of tasks out of the checkpoint of `step`."""
    note = folder / "checkpoints" / f"iter_{step:07d}" / "miles_verifiers.json"
    value = json.loads(note.read_text())
    assert value["extra"].pop("rollouts")
    note.write_text(json.dumps(value))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_killed_at_random_points_it_ends_bit_for_bit_the_same(tmp_path: Path, surplus: str) -> None:
    code = (Path(__file__).parent / "parity_env.py").read_text()
    source = project(tmp_path / "parity", "parity-env", "verifiers==0.2.0", code=code)
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(source=source, surplus=surplus))
    settings = (f"training.num_steps={STEPS}", "rollout.rollout_max_response_len=96")
    options = ("--config", str(config), *(part for setting in settings for part in ("--set", setting)))

    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run = Run(whole, *options)
    run.wait_for("step 1: rollouts")
    begun = time.monotonic()
    assert run.end(timeout=300) == 0, run.text
    seconds = time.monotonic() - begun
    expected = rows(whole)
    assert len(expected) == STEPS
    assert any(row["advantage"] for step in expected for row in step), "the control: there was something to learn"
    assert weights(whole)["before"] != weights(whole)["after"]

    points = random.Random(surplus)
    for number in range(KILLS):
        run = Run(folder, *options)
        run.wait_for(": rollouts")
        time.sleep(points.uniform(0.0, 0.3 * seconds))
        assert run.process.poll() is None, f"kill {number} came too late"
        run.kill()
    run = Run(folder, *options)
    done = wait_for_a_checkpoint(run, folder)
    run.kill()
    control = tmp_path / "control"
    shutil.copytree(folder, control, symlinks=True)

    run = Run(folder, *options)
    assert run.end(timeout=300) == 0, run.text
    assert rows(folder) == expected
    assert weights(folder) == weights(whole)

    # The control: a checkpoint that forgot where the run stood leads elsewhere.
    forget_the_place(control, done)
    run = Run(control, *options)
    assert run.end(timeout=300) == 0, run.text
    assert rows(control)[:done] == expected[:done]
    assert rows(control)[done:] != expected[done:]
    assert weights(control)["after"] != weights(whole)["after"]
