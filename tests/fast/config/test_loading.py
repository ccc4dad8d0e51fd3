"""Profiles, files and overrides make one checked configuration; what is wrong is named with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
from factories import config_table

from miles_verifiers.config import loading
from miles_verifiers.errors import ConfigError


@pytest.mark.parametrize("name", loading.profile_names())
def test_every_profile_is_valid_and_says_what_to_verify(name: str) -> None:
    loaded = loading.load(name)
    assert loaded.profile == name
    assert loaded.verify.reward_names
    assert set(loaded.verify.group_share_rewards) < set(loaded.verify.reward_names)


def test_the_profiles_of_the_design_are_there() -> None:
    assert {"cpu", "h200-2gpu"} <= set(loading.profile_names())


def test_the_gpu_profile_keeps_the_values_of_the_original() -> None:
    loaded = loading.load("h200-2gpu")
    rollout, training = loaded.rollout, loaded.training
    assert loaded.model.source == "hf:Qwen/Qwen3-0.6B"
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt, loaded.samples_per_step) == (3, 4, 12)
    assert (rollout.rollout_max_response_len, rollout.rollout_max_context_len) == (512, 2048)
    assert rollout.rollout_temperature == 0.8
    assert (training.num_gpus, training.colocate, training.global_batch_size) == (2, True, 12)
    assert (training.eps_clip, training.eps_clip_high, training.entropy_coef) == (0.2, 0.28, 0.0)
    assert (training.lr, training.weight_decay, training.adam_beta1, training.adam_beta2) == (1e-6, 0.1, 0.9, 0.98)
    assert (training.max_tokens_per_gpu, training.attention_backend) == (4096, "flash")
    assert loaded.engine.mem_fraction_static == 0.6


def test_a_file_overrides_the_profile_and_the_command_line_both(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[training]\nnum_steps = 7\nlr = 3e-5\n")
    loaded = loading.load("cpu", file, ["training.num_steps=9", "model.source=tiny:qwen3"])
    assert (loaded.training.num_steps, loaded.training.lr) == (9, 3e-5)
    assert loaded.training.weight_decay == loading.load("cpu").training.weight_decay
    assert loaded.model.source == "tiny:qwen3"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("environment.taskset.subset=original", "original"),
        ('environment.taskset.subset="original"', "original"),
        ("environment.taskset.subset=[1, 2]", [1, 2]),
        ("environment.taskset.subset=true", True),
        ("environment.taskset.subset=a=b", "a=b"),
        ("environment.taskset.subset=", ""),
    ],
)
def test_overrides_are_toml_or_bare_words(override: str, value: Any) -> None:
    taskset = loading.load("cpu", overrides=[override]).environment.taskset
    assert taskset == {**loading.load("cpu").environment.taskset, "subset": value}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.num_steps"], "not of the form"),
        (["=3"], "not of the form"),
        (["training.num_steps=0"], r"training\.num_steps"),
        (["training.steps=3"], r"training\.steps: Extra inputs"),
        (["trainin.num_steps=3"], r"trainin: Extra inputs"),
        (["rollout.rollout_top_p=0.9"], "log-probs would be those of the cut"),
        (["rollout.rollout_top_k=50"], "log-probs would be those of the cut"),
        (["rollout.rollout_max_response_len=1024"], "must be below rollout_max_context_len"),
        (["rollout.n_samples_per_prompt=1"], r"rollout\.n_samples_per_prompt"),
        (["training.global_batch_size=5"], "global_batch_size = 5 must divide"),
        (["training.pipeline_model_parallel_size=2"], "only pipeline_model_parallel_size"),
        (["training.tensor_model_parallel_size=2"], "must divide num_gpus"),
        (["training.entropy_coef=0.1"], "not implemented"),
        (["model.dtype=float16"], r"model\.dtype"),
        (["training.lr=nan"], r"training\.lr"),
    ],
)
def test_bad_values_are_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        loading.load("cpu", overrides=overrides)
    assert caught.value.exit_code == 2
    assert caught.value.next_step


def test_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown profile 'gpu'") as caught:
        loading.load("gpu")
    assert caught.value.next_step.endswith(", ".join(loading.profile_names()))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    with pytest.raises(ConfigError, match="no such configuration file") as caught:
        loading.load("cpu", file)
    assert caught.value.where == str(file)
    file.write_text("[training\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        loading.load("cpu", file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        loading.load("cpu", file)
    with pytest.raises(ConfigError, match="cannot be read"):
        loading.load("cpu", tmp_path)


@pytest.mark.parametrize("name", loading.profile_names())
def test_a_run_s_config_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    loaded = loading.load(name, overrides=["training.num_steps=3"])
    file = tmp_path / "config.toml"
    file.write_text(tomli_w.dumps(loaded.model_dump(exclude_none=True)))
    assert loading.read(file) == loaded


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    loaded = loading.validate(config_table(), where="the test")
    with pytest.raises(ValueError, match="frozen"):
        loaded.training.num_steps = 5  # type: ignore[misc]


def test_an_override_does_not_reach_the_next_load() -> None:
    before = loading.load("cpu")
    loading.load("cpu", overrides=["environment.taskset.subset=original"])
    assert loading.load("cpu") == before
