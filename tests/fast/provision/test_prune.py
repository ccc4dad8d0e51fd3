"""The cache: what may go, what stays and why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from miles_verifiers import cli
from miles_verifiers.provision import prune
from miles_verifiers.provision.cache import USED, locked, mark_used
from miles_verifiers.provision.venvs import OVERLAY


def entry(cache: Path, name: str, *, days: float, kind: str = "venvs", over: Path | None = None) -> Path:
    folder = cache / kind / name
    site_packages = folder / "lib" / "python3.11" / "site-packages"
    site_packages.mkdir(parents=True)
    (folder / "data").write_bytes(b"x" * 100_000)
    if over is not None:
        below = over / "lib" / "python3.11" / "site-packages"
        (site_packages / OVERLAY).write_text(f"import site; site.addsitedir({str(below)!r})\n")
    mark_used(folder)
    used = time.time() - days * 86400
    os.utime(folder / USED, (used, used))
    return folder


def kept(cache: Path, days: float = 30) -> dict[str, str]:
    return {each.path.name: each.kept for each in prune.entries(cache, days=days)}


def test_what_was_not_used_lately_may_go_and_what_others_need_stays(tmp_path: Path) -> None:
    base = entry(tmp_path, "stack-cpu-1", days=90)
    entry(tmp_path, "stack-cpu-2", days=90)
    entry(tmp_path, "env-1", days=1, over=base)
    entry(tmp_path, "env-2", days=90, over=base)
    entry(tmp_path, "old", days=90, kind="models")
    assert kept(tmp_path) == {
        "env-1": "used within 30 days",
        "env-2": "",
        "stack-cpu-1": "others lie over it",
        "stack-cpu-2": "",
        "old": "",
    }
    assert set(kept(tmp_path, days=0).values()) == {""}


def test_what_a_process_runs_from_stays(tmp_path: Path) -> None:
    folder = entry(tmp_path, "env-1", days=90)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (tmp_path / "link").symlink_to(folder)  # as a run directory links to it
    with subprocess.Popen(
        [tmp_path / "link" / "bin" / "python", "-I", "-c", "input()"], stdin=subprocess.PIPE
    ) as child:
        assert kept(tmp_path, days=0) == {"env-1": "in use"}
        child.communicate(b"\n", timeout=30)
    assert kept(tmp_path, days=0) == {"env-1": ""}


def test_what_a_killed_builder_left_goes_and_what_is_being_built_stays(tmp_path: Path) -> None:
    entry(tmp_path, ".building-env-1-abcd1234", days=0)
    entry(tmp_path, ".qwen-1.part", days=0, kind="models")
    assert set(kept(tmp_path).values()) == {""}
    with locked(tmp_path / "venvs" / "env-1", what="env-1"):
        assert kept(tmp_path) == {".building-env-1-abcd1234": "being built", ".qwen-1.part": ""}


def test_removing_takes_the_lock(tmp_path: Path) -> None:
    folder = entry(tmp_path, "env-1", days=90)
    (found,) = prune.entries(tmp_path, days=30)
    assert found.bytes > 90_000
    with locked(folder, what="env-1"):
        assert not prune.remove(found)
    assert folder.exists()
    assert prune.remove(found)
    assert [p.name for p in folder.parent.iterdir() if p.is_dir()] == []


@pytest.mark.parametrize(("arguments", "stays"), [(["list"], True), (["prune", "--dry-run"], True), (["prune"], False)])
def test_the_command(
    arguments: list[str],
    stays: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MILES_VERIFIERS_CACHE", str(tmp_path))
    monkeypatch.setattr(cli.process, "adopt_orphans", lambda: None)
    monkeypatch.setattr(cli.process, "end_descendants", lambda: None)
    folder = entry(tmp_path, "env-1", days=90)
    recent = entry(tmp_path, "env-2", days=1)
    assert cli.main(["cache", *arguments]) == 0
    assert folder.exists() is stays
    assert recent.exists()
    assert "venvs/env-1" in capsys.readouterr().out
