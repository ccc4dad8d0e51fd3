"""The temporary folder of a run that was killed is removed by the next one, and no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles_verifiers.system import temporary
from miles_verifiers.system.temporary import short_folder, sweep

LOCK = temporary._LOCK
LIVES = (
    "import sys; from pathlib import Path; from miles_verifiers.system import temporary\n"
    "temporary._SHORT = Path(sys.argv[1])\n"
    "with temporary.short_folder() as folder: print(folder, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(temporary, "_SHORT", tmp_path)
    return tmp_path


def living(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    child = subprocess.Popen(
        [sys.executable, "-c", LIVES, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    folder = Path(child.stdout.readline().strip())
    (folder / "ray").mkdir()
    return child, folder


def test_it_is_there_and_gone_again(parent: Path) -> None:
    with short_folder() as folder:
        assert Path(folder).parent == parent
        assert Path(folder).name.startswith("mv-")
        (Path(folder) / "file").touch()
    assert list(parent.iterdir()) == []
    with pytest.raises(KeyError), short_folder():
        raise KeyError
    assert list(parent.iterdir()) == []


def test_of_a_run_that_was_killed_it_is_removed_by_the_next(parent: Path) -> None:
    child, folder = living(parent)
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=10)
    assert folder.is_dir(), "the control: nobody removed it"
    with short_folder() as own:
        assert list(parent.iterdir()) == [Path(own)]


def test_of_a_run_that_lives_it_stays(parent: Path) -> None:
    child, folder = living(parent)
    with short_folder():
        assert (folder / "ray").is_dir()
    child.communicate(timeout=10)
    assert not folder.exists()


def test_what_is_not_ours_stays(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (parent / "mv-file").touch()
    (parent / "mv-unlocked").mkdir()
    (parent / "mv-unlocked" / ".lock").touch()
    (parent / "other" / "deep").mkdir(parents=True)
    (parent / "other" / LOCK).touch()
    (parent / "mv-linked").symlink_to(parent / "other")
    before = sorted(parent.rglob("*"))
    sweep(parent)
    assert sorted(parent.rglob("*")) == before
    (parent / "mv-unlocked" / LOCK).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: 12345)
        sweep(parent)
    assert (parent / "mv-unlocked").is_dir()
    sweep(parent)
    assert not (parent / "mv-unlocked").exists(), "the control: it was the user that kept it"


def test_what_cannot_be_removed_yet_is_removed_another_time(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where children of a run that was killed still write."""
    folder = parent / "mv-left"
    (folder / "ray").mkdir(parents=True)
    (folder / LOCK).touch()

    def half(tree: Path, ignore_errors: bool) -> None:
        for entry in tree.iterdir():
            if entry.is_file():
                entry.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(temporary.shutil, "rmtree", half)
        sweep(parent)
    assert (folder / "ray").is_dir(), "the control: it was not removed"
    sweep(parent)
    assert not folder.exists()


def test_one_whose_making_was_cut_off_is_removed_after_an_hour(parent: Path) -> None:
    kept = [parent / name for name in (".mv-young", ".mv-full")]
    gone = [parent / name for name in (".mv-empty", ".mv-locked")]
    for folder in kept + gone:
        folder.mkdir()
    (parent / ".mv-locked" / LOCK).touch()
    (parent / ".mv-full" / "file").touch()
    for folder in [*gone, parent / ".mv-full"]:
        os.utime(folder, (0, 0))
    sweep(parent)
    assert sorted(parent.iterdir()) == sorted(kept)
