"""The command line: exit codes, messages, and that bad input starts nothing."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from miles_verifiers import cli
from miles_verifiers.config import loading
from miles_verifiers.errors import ComponentError, Interrupted
from miles_verifiers.job import phases
from miles_verifiers.system import process


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # They are for a process of its own: pytest would adopt other tests' orphans, and kill its own children.
    monkeypatch.setattr(process, "adopt_orphans", lambda: None)
    monkeypatch.setattr(process, "end_descendants", lambda: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILES_VERIFIERS_CACHE", str(tmp_path / "cache"))
    for name in (cli.RUN_DIR_VARIABLE, cli.MODEL_DIR_VARIABLE, cli.MEGATRON_VARIABLE, cli.ENVIRONMENT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def made(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["e2e", "--profile", "nope"], ["unknown profile 'nope'", "take one of: cpu, cpu-learn, h200-2gpu"]),
        (["e2e", "--profile", "cpu", "--config", "no.toml"], ["no such configuration file", "no.toml"]),
        (["e2e", "--profile", "cpu", "--set", "nonsense"], ["not of the form section.field=value"]),
        (["e2e", "--profile", "cpu", "--set", "training.lrr=1"], ["training.lrr"]),
        (["e2e", "--profile", "cpu", "--set", "training.lr='x'"], ["training.lr", "number"]),
        (["e2e", "--profile", "cpu", "--steps", "0"], ["training.num_steps"]),
        (["e2e", "--profile", "cpu", "--set", "model.source=ftp:x"], ["ftp:x", "pypi:"]),
        (["e2e", "--profile", "cpu", "--set", "environment.source=nowhere"], ["nowhere", "environments/code_golf_v1"]),
        (["e2e", "--profile", "cpu", "--set", "environment.verifiers=9.9.0"], ["no lock for Verifiers 9.9.0", "0.2.0"]),
        (["e2e", "--profile", "cpu", "--set", "model.source=path:empty"], ["empty", "config.json"]),
        (["e2e", "--profile", "cpu", "--set", "environment.source=git+https://h/r"], ["a revision is needed"]),
        (["e2e", "--profile", "cpu", "--set", "training.megatron_path=empty"], ["empty", "megatron/core/__init__.py"]),
        (["verify"], ["there is no run yet"]),
        (["verify", "nowhere"], ["nowhere"]),
    ],
)
def test_bad_input_is_exit_code_2_with_a_message_and_makes_nothing(
    arguments: list[str], says: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert all(part in text for part in says), text
    assert "Traceback" not in text
    assert made(tmp_path) == []


def test_a_profile_for_gpus_without_a_gpu_names_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miles_verifiers.provision.stack.find_gpus", list)
    assert cli.main(["e2e", "--profile", "h200-2gpu"]) == 2
    text = capsys.readouterr().err
    assert "2 NVIDIA GPU(s) (0 found)" in text
    assert "--profile cpu" in text
    assert made(tmp_path) == []


@pytest.mark.parametrize("profile", ["cpu", "cpu-learn", "h200-2gpu"])
def test_a_dry_run_prints_every_phase_and_makes_nothing(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["e2e", "--profile", profile, "--dry-run"]) == 0
    text = capsys.readouterr().out
    for phase in phases.PHASES:
        assert f"\n{phase}: " in "\n" + text
    for word in ("interpreter", "command", "environment", "makes", "env-verifiers-0.2.0.txt", "HF_HUB_OFFLINE=1"):
        assert word in text
    assert ("stack-cpu.txt" in text) is (profile != "h200-2gpu")
    assert made(tmp_path) == []


def test_the_gpu_profile_has_the_originals_values() -> None:
    settings = loading.load("h200-2gpu")
    assert settings.model.source == "hf:Qwen/Qwen3-0.6B"
    assert (settings.rollout.rollout_batch_size, settings.rollout.n_samples_per_prompt) == (3, 4)
    assert (settings.rollout.rollout_max_response_len, settings.rollout.rollout_max_context_len) == (512, 2048)
    assert settings.rollout.rollout_temperature == 0.8
    training = settings.training
    assert (training.global_batch_size, training.max_tokens_per_gpu, training.colocate) == (12, 4096, True)
    assert (training.eps_clip, training.eps_clip_high, training.entropy_coef) == (0.2, 0.28, 0.0)
    assert (training.lr, training.weight_decay, training.adam_beta1, training.adam_beta2) == (1e-6, 0.1, 0.9, 0.98)
    assert settings.engine.mem_fraction_static == 0.6


@pytest.mark.parametrize(
    ("error", "code"),
    [(ComponentError("a part broke", next_step="mend it"), 3), (Interrupted("interrupted by SIGINT"), 130)],
)
def test_what_fails_inside_becomes_a_message_and_its_exit_code(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_self: phases.Job) -> None:
        raise error

    monkeypatch.setattr(phases.Job, "prepare", fail)
    assert cli.main(["prepare", "--profile", "cpu"]) == code
    assert str(error).splitlines()[0] in capsys.readouterr().err


def test_the_users_variables_reach_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[phases.Job] = []
    monkeypatch.setattr(phases.Job, "prepare", lambda opened: seen.append(opened))
    monkeypatch.setattr(phases, "check_model_folder", lambda _: None)
    (tmp_path / "verifiers.toml").write_text('max_turns = 3\n[taskset]\nsubset = "original"\n[harness]\nid = "null"\n')
    monkeypatch.setenv(cli.MODEL_DIR_VARIABLE, str(tmp_path / "my-model"))
    monkeypatch.setenv(cli.RUN_DIR_VARIABLE, str(tmp_path / "my-run"))
    (tmp_path / "Megatron-LM" / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "Megatron-LM" / "megatron" / "core" / "__init__.py").touch()
    monkeypatch.setenv(cli.MEGATRON_VARIABLE, "Megatron-LM")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setenv(cli.ENVIRONMENT_VARIABLE, str(tmp_path / "verifiers.toml"))
    assert cli.main(["prepare", "--profile", "cpu"]) == 0
    (opened,) = seen
    assert opened.config.model.source == f"path:{tmp_path / 'my-model'}"
    assert opened.run.path == tmp_path / "my-run"
    assert opened.config.training.megatron_path == str(tmp_path / "Megatron-LM")
    assert "PYTHONPATH=/mine is left out of every child" in capsys.readouterr().err
    assert opened.config.environment.taskset == {"id": "code-golf-v1", "subset": "original"}
    assert (opened.config.environment.harness, opened.config.environment.max_turns) == ("null", 3)


def test_a_verifiers_file_with_keys_of_no_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verifiers.toml").write_text("timeout = 3\n")
    monkeypatch.setenv(cli.ENVIRONMENT_VARIABLE, str(tmp_path / "verifiers.toml"))
    assert cli.main(["prepare", "--profile", "cpu"]) == 2


def test_doctor_says_what_is_there_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    findings = json.loads(capsys.readouterr().out)
    assert {"python", "profile", "stack", "GPU", "uv", "disk", "memory"} <= {
        each["what"] for each in findings["findings"]
    }
    assert code == (0 if findings["ok"] else 2)


def test_a_run_directory_keeps_the_whole_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases.Job, "prepare", lambda _: None)
    assert cli.main(["prepare", "--profile", "cpu", "--steps", "7", "--run-dir", "r"]) == 0
    assert loading.read(tmp_path / "r" / "config.toml") == loading.load("cpu", overrides=["training.num_steps=7"])
    assert tomllib.loads((tmp_path / "r" / "config.toml").read_text())["training"]["num_steps"] == 7
