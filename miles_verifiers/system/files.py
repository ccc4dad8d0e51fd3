"""Files that are either whole or not there. A leaf that every room may use."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from miles_verifiers.errors import HostError

_OF_THE_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})


def disk_error(error: BaseException) -> HostError | None:
    """`error` as what the user can mend, where it says that the disk took no more; else None.

    Safetensors and torch wrap the system's error in classes of their own, so the text counts as well as the number.
    """
    of_the_disk = isinstance(error, OSError) and error.errno in _OF_THE_DISK
    if not of_the_disk and os.strerror(errno.ENOSPC) not in str(error):
        return None
    reason = error.strerror if isinstance(error, OSError) else os.strerror(errno.ENOSPC)
    return HostError(
        f"the disk took no more: {reason}",
        where=str(getattr(error, "filename", None) or "the run directory, the cache or the temporary folder"),
        next_step="free some space; the same command goes on where it stopped",
    )


@contextmanager
def disk_errors_named() -> Iterator[None]:
    """Within the block an error of the disk that nobody expected is raised as HostError; others pass."""
    try:
        yield
    except OSError as error:
        named = disk_error(error)
        if named is None:
            raise
        raise named from error


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; when the block ends well, that file is on disk and has taken `path`'s place.

    When the block raises, or the process is killed, `path` is as it was before. The name beside it is always the same, so
    that what a killed process left is replaced by the next attempt: one writer per file. Missing folders are made.

    Raises HostError where the file cannot be written (no space, no permission).
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except OSError as error:
        _remove(aside)
        raise HostError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=str(path.parent),
            next_step="free disk space there, allow writing, or choose another folder",
        ) from error
    except BaseException:
        _remove(aside)
        raise


def write_text(path: Path, text: str) -> None:
    """Replaces the whole file, as UTF-8; see `written_aside`."""
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hash(folder: Path) -> str:
    """SHA-256 over names and contents of a source folder; caches, hidden files and build leftovers do not count."""
    digest = hashlib.sha256()
    for path in sorted(_source_files(folder)):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(bytes.fromhex(sha256(path)))
    return digest.hexdigest()


def _source_files(folder: Path) -> Iterable[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if name != "__pycache__" and not name.startswith(".") and not name.endswith(".egg-info")
        ]
        yield from (Path(root) / name for name in names if not name.endswith(".pyc") and not name.startswith("."))


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on disk: a rename alone survives no power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(aside: Path) -> None:
    # The reason why writing failed matters more than that of a failing removal.
    try:
        aside.unlink(missing_ok=True)
    except OSError:
        return
