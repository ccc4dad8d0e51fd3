"""A file is whole or not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from miles_verifiers.errors import HostError
from miles_verifiers.system.files import disk_error, disk_errors_named, write_text, written_aside


def test_the_file_appears_only_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    with written_aside(path) as aside:
        aside.write_text("new")
        assert not path.exists()
        assert aside.parent == path.parent
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failing_writer_changes_nothing(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_text(path, "old")

    def fail_half_way() -> None:
        with written_aside(path) as aside:
            aside.write_text("half")
            raise error

    with pytest.raises(error):
        fail_half_way()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    (tmp_path / ".file.txt.tmp").write_text("something much longer than the new text")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_place_is_an_error_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file where a folder should be")
    with pytest.raises(HostError) as caught:
        write_text(tmp_path / "folder" / "file.txt", "text")
    assert caught.value.exit_code == 2
    assert caught.value.next_step


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run.log"),
        RuntimeError("PytorchStreamWriter failed writing file data/3: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_known_whoever_reports_it(error: Exception) -> None:
    named = disk_error(error)
    assert named is not None
    assert "No space left on device" in named.what
    assert "goes on where it stopped" in named.next_step


def test_other_errors_are_not_the_disks() -> None:
    assert disk_error(OSError(errno.ECONNREFUSED, "Connection refused")) is None
    assert disk_error(ValueError("shape [3] is not [4]")) is None
    with pytest.raises(ConnectionRefusedError), disk_errors_named():
        raise ConnectionRefusedError


def test_an_unexpected_write_to_a_full_disk_is_named() -> None:
    with pytest.raises(HostError, match="No space left"), disk_errors_named(), open("/dev/full", "w") as full:  # noqa: PTH123
        full.write("x")
