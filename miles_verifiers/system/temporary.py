"""A run's temporary folder, with a short path, which does not outlive a run that was killed: the next one removes it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "mv-"
_LOCK = ".miles-verifiers-run"
"""Held by the run that lives in the folder. The folder's name has to be short, so this is what tells it from others'."""
_UNFINISHED_S = 3600.0
"""Age from which a folder that has no name yet is one whose making was cut off."""
_SHORT = Path("/tmp")  # noqa: S108 - mkdtemp makes a folder of our own in it


@contextmanager
def short_folder() -> Iterator[str]:
    """A folder whose path leaves room for Ray's sockets: their addresses may have 107 characters. Removed in the end."""
    parent = _SHORT if os.access(_SHORT, os.W_OK) else Path(tempfile.gettempdir())
    sweep(parent)
    # Under its name only once it is locked: whoever sees the name can tell whether somebody lives in it.
    made = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=parent))
    folder = parent / made.name[1:]
    with FileLock(made / _LOCK):
        made.rename(folder)
        try:
            yield str(folder)
        finally:
            with suppress(OSError):
                _remove(folder)


def sweep(parent: Path = _SHORT) -> None:
    """Remove the folders of runs that are no more. Another user's are left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(Timeout, OSError):  # somebody lives in it, or removes it as well
            if _is_ours(folder) and (folder / _LOCK).is_file():
                with FileLock(folder / _LOCK, timeout=0):
                    _remove(folder)
    for folder in parent.glob(f".{_PREFIX}*"):
        with suppress(OSError):
            if _is_ours(folder) and folder.stat().st_mtime < time.time() - _UNFINISHED_S:
                (folder / _LOCK).unlink(missing_ok=True)
                folder.rmdir()


def _is_ours(folder: Path) -> bool:
    return not folder.is_symlink() and folder.is_dir() and folder.stat().st_uid == os.getuid()


def _remove(folder: Path) -> None:
    """Its lock last: where something cannot be removed yet, the folder is still known for what it is."""
    for entry in folder.iterdir():
        if entry.name != _LOCK:
            shutil.rmtree(entry, ignore_errors=True)  # does nothing to a file
            with suppress(OSError):
                entry.unlink()
    if [entry.name for entry in folder.iterdir()] == [_LOCK]:
        shutil.rmtree(folder, ignore_errors=True)
