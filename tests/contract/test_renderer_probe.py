"""The renderer is asked at start what a later turn keeps of an earlier one, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_verifiers.errors import ConfigError
from miles_verifiers.provision.models import tiny
from miles_verifiers.rollout.renderers import choose_renderer


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write(folder)
    return folder


def test_a_renderer_that_keeps_what_was_sampled(tiny_folder: Path) -> None:
    choice = choose_renderer("auto", tiny_folder, "keep")
    assert (choice.name, choice.turns.extends, choice.turns.lost) == ("qwen3", "bridge", ())
    assert choice.settings == {"thinking_retention": "all"}
    assert "rendered anew" not in choice.line()


@pytest.mark.parametrize("name", ["qwen3", "default"])
def test_a_template_loses_what_the_model_would_not_write_again(tiny_folder: Path, name: str) -> None:
    choice = choose_renderer(name, tiny_folder)
    assert choice.turns.extends == "none"
    assert "a reply in another split" in choice.turns.lost
    assert "a plain reply" not in choice.turns.lost
    assert "such a rollout forks (environment.history)" in choice.line()


def test_a_template_that_numbers_its_turns_loses_everything(unknown_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "numbered"
    folder.mkdir()
    for file in unknown_folder.iterdir():
        text = file.read_text(encoding="utf-8")
        folder.joinpath(file.name).write_text(
            text.replace("{%- for m in messages %}", "{{- messages | length }}{%- for m in messages %}")
        )
    choice = choose_renderer("default", folder)
    assert "a plain reply" in choice.turns.lost


def test_history_that_a_renderer_cannot_keep_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="default does not fit") as caught:
        choose_renderer("default", tiny_folder, "keep")
    assert "environment.history" in caught.value.next_step
