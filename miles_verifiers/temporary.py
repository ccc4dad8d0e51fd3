"""A run's temporary folder, with a short path, which does not outlive a run that was killed: the next one removes it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "mv-"
_LOCK = ".lock"
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
            shutil.rmtree(folder, ignore_errors=True)


def sweep(parent: Path = _SHORT) -> None:
    """Remove the folders of runs that are no more. Another user's are left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            known = (folder / _LOCK).is_file() and folder.lstat().st_uid == os.getuid()
            if known:
                with FileLock(folder / _LOCK, timeout=0):
                    shutil.rmtree(folder, ignore_errors=True)
        except (Timeout, OSError):
            continue  # somebody lives in it, or removes it as well
