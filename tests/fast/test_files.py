"""A file is whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_verifiers.errors import HostError
from miles_verifiers.files import write_text, written_aside


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
