"""Killed at any moment and started again, a run trains on the groups that it would have trained on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_run
import pytest
import tomli_w
from factories import config_table

from miles_verifiers.errors import RolloutError
from miles_verifiers.record import dump
from miles_verifiers.record.metrics import load_metrics
from miles_verifiers.record.samples import as_row
from miles_verifiers.training.loop import TRACKER, Loop

KILLS = 20
STEPS = 6


def prepared(folder: Path, num_steps: int = STEPS, **rollout: Any) -> Path:
    """A run directory in which groups fail, are filtered, oversampled, retried and evaluated."""
    table = config_table(
        environment={"taskset": {"id": "fake"}},
        rollout={
            "rollout_batch_size": 3,
            "n_samples_per_prompt": 2,
            "over_sampling_batch_size": 5,
            "equal_rewards": "drop",
            "rollout_retries": 1,
            "max_dropped_groups": 200,
            "max_concurrency": 4,
            "eval_interval": 3,
            **rollout,
        },
        training={"num_steps": num_steps, "save_interval": 2},
    )
    table["engine"] = {"enable_deterministic_inference": True}
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(tomli_w.dumps(table))
    return folder


def trained(folder: Path, kind: Any = "rollout") -> list[dict[str, Any]]:
    """Every sample of the run, without the times that it took."""
    rows = [as_row(sample) for path in dump.rollout_files(folder, kind).values() for sample in dump.read_rollout(path)]
    return [{name: value for name, value in row.items() if name != "timings"} for row in rows]


def recorded(folder: Path) -> list[dict[str, Any]]:
    file = load_metrics(folder)
    timed = ("seconds", "tokens_per_second")
    return [
        {name: value for name, value in record.items() if name not in timed}
        for record in [*file.records, *file.evaluations]
    ]


def outcome(folder: Path) -> tuple[Any, ...]:
    newest = (folder / "checkpoints" / TRACKER).read_text()
    checkpoint = folder / "checkpoints" / f"iter_{int(newest):07d}" / "state.json"
    state = checkpoint.read_text()
    return trained(folder), trained(folder, "eval"), recorded(folder), newest, _without_times(state)


def _without_times(state: str) -> Any:
    value = json.loads(state)
    for cursor in value["extra"]["rollouts"].values():
        for group in cursor["kept"]:
            for row in group["samples"]:
                del row["timings"]
    return value


class Zygote:
    """fake_run as a program, whose children are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, fake_run.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip

        assert self._line("ready") == []

    def run(self, folder: Path, kill_after: float | None = None) -> int:
        """The exit status of a run in `folder`: 0 at its end, -9 where it was killed before."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kill_after or 30.0} {folder}\n")
        self._process.stdin.flush()
        return int(self._line("ended")[0])

    def _line(self, what: str) -> list[str]:
        assert self._process.stdout is not None
        first, *rest = self._process.stdout.readline().split() or ["nothing"]
        assert first == what
        return rest

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_killed_at_random_points_it_trains_on_the_same_groups(tmp_path: Path, zygote: Zygote, surplus: str) -> None:
    whole = prepared(tmp_path / "whole", surplus_groups=surplus)
    begun = time.monotonic()
    assert zygote.run(whole) == 0
    seconds = time.monotonic() - begun
    expected = outcome(whole)
    assert len(expected[0]) == STEPS * 6
    assert any(record.get("dropped_groups") for record in expected[2])
    assert any(record.get("retried") for record in expected[2])

    rng, killed, runs = random.Random(surplus), 0, 0
    while killed < KILLS:
        folder = prepared(tmp_path / f"killed-{runs}", surplus_groups=surplus)
        runs += 1
        while killed < KILLS:
            status = zygote.run(folder, kill_after=rng.uniform(0.0, 0.6 * seconds))
            if status == 0:
                break
            assert status == -signal.SIGKILL
            killed += 1
        else:
            assert zygote.run(folder) == 0
        assert outcome(folder) == expected


def test_keeping_makes_a_buffer_and_rerunning_none(tmp_path: Path) -> None:
    """Control: the killed runs above would prove little if there were never anything to remember."""
    kept = {}
    for surplus in ("rerun", "keep"):
        folder = prepared(tmp_path / surplus, surplus_groups=surplus)
        fake_run.run(folder, pace=0.0)
        versions = {
            int(span["version"]) - step
            for step, path in dump.rollout_files(folder).items()
            for sample in dump.read_rollout(path)
            for span in as_row(sample)["weight_versions"]
        }
        kept[surplus] = versions
    assert kept["rerun"] == {0}
    assert 0 in kept["keep"]
    assert min(kept["keep"]) < 0


def test_forks_come_with_their_samples_to_the_trainer_the_dump_and_the_checkpoint(tmp_path: Path) -> None:
    """The runs above have some, also in groups that a step left over."""
    folder = prepared(tmp_path / "run", surplus_groups="keep")
    fake_run.run(folder, pace=0.0)
    for kind in ("rollout", "eval"):
        forks = [fork for row in trained(folder, kind) for fork in row["forks"]]
        assert {tuple(fork["tokens"]) for fork in forks} == {(5, 6, 90, 91, 2)}
        assert {tuple(fork["train_log_probs"]) for fork in forks} == {(-0.5, -0.1, -0.2) if kind == "rollout" else ()}
    kept = 0
    for record, (step, path) in zip(load_metrics(folder).records, dump.rollout_files(folder).items(), strict=True):
        samples = dump.read_rollout(path)
        forks_of_step = [fork for sample in samples for fork in sample.forks]
        assert record["forks"] == len(forks_of_step)
        assert record["sampled_tokens"] == 2 * len(samples) + 3 * len(forks_of_step)
        kept += sum(fork.weight_versions[0].version < str(step) for fork in forks_of_step)
    assert kept > 0  # these were part of a checkpoint


@pytest.mark.parametrize("surplus", ["rerun", "keep"])
def test_without_the_cursor_a_resumed_run_would_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surplus: str
) -> None:
    """Control: a checkpoint that forgets where the run stood leads to other groups."""
    whole = prepared(tmp_path / "whole", surplus_groups=surplus)
    fake_run.run(whole, pace=0.0)
    stopped = prepared(tmp_path / "stopped", surplus_groups=surplus)
    note = Loop._note
    monkeypatch.setattr(Loop, "_note", lambda self, step, cursors: note(self, step, {}))
    original = Loop._step

    def until_five(self: Loop, step: int, batch: Any) -> None:
        if step == 5:
            raise KeyboardInterrupt
        original(self, step, batch)

    monkeypatch.setattr(Loop, "_step", until_five)
    with pytest.raises(KeyboardInterrupt):
        fake_run.run(stopped, pace=0.0)
    monkeypatch.setattr(Loop, "_step", original)
    fake_run.run(stopped, pace=0.0)
    assert trained(stopped)[: 4 * 6] == trained(whole)[: 4 * 6]
    assert trained(stopped) != trained(whole)


def test_when_tasks_run_out_the_run_ends_with_what_was_kept(tmp_path: Path) -> None:
    folder = prepared(tmp_path / "run", num_epoch=2, num_steps=50)
    figures = fake_run.run(folder, pace=0.0)
    records = load_metrics(folder).records
    assert [record["ending"] for record in records] == ["full"] * (len(records) - 1) + ["tasks ran out"]
    assert figures["made"].startswith(f"{len(records)} step(s)")
    tasks = sum(record["groups"] + sum(record["dropped_groups"].values()) for record in records)
    assert tasks <= 14
    # Started again it has nothing to do, and says the same.
    before = outcome(folder)
    fake_run.run(folder, pace=0.0)
    assert outcome(folder) == before


def test_at_the_bound_it_stops_with_the_causes_and_goes_on_with_what_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = prepared(tmp_path / "run", num_steps=3, max_dropped_groups=4, over_sampling_batch_size=3)
    broken = {"on": False}
    trace = fake_run.FakeBackend._trace

    def maybe_broken(self: Any, number: int) -> Any:
        made = trace(self, number)
        if broken["on"] and number % 5:
            made.rewards = {"right": float("nan")}
        return made

    monkeypatch.setattr(fake_run.FakeBackend, "_trace", maybe_broken)
    step = Loop._step

    def then_broken(self: Loop, number: int, batch: Any) -> None:
        step(self, number, batch)
        broken["on"] = True

    monkeypatch.setattr(Loop, "_step", then_broken)
    with pytest.raises(RolloutError, match="more than 4 groups in a row were dropped") as caught:
        fake_run.run(folder, pace=0.0)
    assert "groups dropped, by cause:" in str(caught.value)
    assert "bad reward" in str(caught.value)
    assert len(dump.rollout_files(folder)) == 1
    monkeypatch.setattr(Loop, "_step", step)
    broken["on"] = False
    fake_run.run(folder, pace=0.0)
    assert len(trained(folder)) == 3 * 6
    assert {record["ending"] for record in load_metrics(folder).records} == {"full"}
