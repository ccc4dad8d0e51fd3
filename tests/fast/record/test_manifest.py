"""The manifest remembers, under a fingerprint, and is on disk after every call."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from factories import good_run

from miles_verifiers.errors import ConfigError
from miles_verifiers.record.manifest import WEIGHTS_AFTER, Manifest, fingerprint


def created(run_dir: Path) -> Manifest:
    return Manifest.create(run_dir, profile="cpu", config_hash="c0ffee", stack={"torch": "2.14.1"})


def test_every_change_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    manifest = created(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    manifest.begin("convert", "f1")
    assert Manifest.load(tmp_path).phases["convert"].finished is None
    manifest.finish("convert", made="models/x", figures={"parity": 1e-6, "files": ["a", "b"]})
    record = Manifest.load(tmp_path).phases["convert"]
    assert (record.fingerprint, record.made, record.figures) == (
        "f1",
        "models/x",
        {"parity": 1e-6, "files": ["a", "b"]},
    )
    assert record.seconds is not None
    assert 0 <= record.seconds < 60
    manifest.record_weights(WEIGHTS_AFTER, "b2")
    assert Manifest.load(tmp_path).weights == {"after": "b2"}
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_times_are_utc_in_iso_8601(tmp_path: Path) -> None:
    manifest = created(tmp_path)
    manifest.begin("convert", "f1")
    record = manifest.finish("convert")
    for moment in (manifest.created, record.started, record.finished):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", moment or "")


def test_done_means_finished_under_this_fingerprint(tmp_path: Path) -> None:
    manifest = created(tmp_path)
    assert not manifest.is_done("convert", "f1")
    manifest.begin("convert", "f1")
    assert not manifest.is_done("convert", "f1")
    assert not Manifest.load(tmp_path).is_done("convert", "f1")  # as after a killed run
    manifest.finish("convert")
    assert manifest.is_done("convert", "f1")
    assert Manifest.load(tmp_path).is_done("convert", "f1")
    assert not manifest.is_done("convert", "f2")
    assert not manifest.is_done("prepare", "f1")


def test_beginning_again_forgets_the_earlier_result(tmp_path: Path) -> None:
    manifest = created(tmp_path)
    manifest.begin("convert", "f1")
    manifest.finish("convert", made="models/x")
    manifest.begin("convert", "f1")
    assert not Manifest.load(tmp_path).is_done("convert", "f1")
    assert manifest.phases["convert"].made == ""


def test_a_phase_that_was_not_begun_cannot_be_finished(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not begun"):
        created(tmp_path).finish("convert")


def _document(run_dir: Path, **changes: Any) -> str:
    return json.dumps(json.loads(created(run_dir).model_dump_json()) | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:20], "cannot be read"),
        (lambda text: "", "cannot be read"),
        (lambda text: "[]", "not a manifest"),
        (lambda text: "{}", "not a manifest"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format 2, this program reads 1"),
        (lambda text: text.replace('"profile"', '"profil"'), "damaged at: profil, profile"),
        (lambda text: text.replace('"phases": {}', '"phases": {"convert": 1}'), r"damaged at: phases\.convert"),
    ],
)
def test_a_manifest_that_cannot_be_used_names_file_and_next_step(change: Any, message: str, tmp_path: Path) -> None:
    text = _document(tmp_path)
    assert change(text) != text
    (tmp_path / "manifest.json").write_text(change(text))
    with pytest.raises(ConfigError, match=message) as caught:
        Manifest.load(tmp_path)
    assert caught.value.where == str(tmp_path / "manifest.json")
    assert "--run-dir" in caught.value.next_step


def test_a_folder_without_a_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        Manifest.load(tmp_path)


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        Manifest.load(tmp_path)


def test_fingerprints_tell_inputs_apart_and_ignore_key_order() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert re.fullmatch("[0-9a-f]{64}", fingerprint())
    different = [
        fingerprint(),
        fingerprint(1),
        fingerprint("1"),
        fingerprint(1, 2),
        fingerprint([1, 2]),
        fingerprint(12),
    ]
    assert len(set(different)) == len(different)
    assert fingerprint(Path("a/b")) == fingerprint("a/b")
    draft = good_run()
    before = fingerprint(draft.config)
    assert before == fingerprint(draft.config)
    draft.configure(training={"lr": 2e-6})
    assert fingerprint(draft.config) != before
    with pytest.raises(TypeError, match="set has no fingerprint"):
        fingerprint({1, 2})
