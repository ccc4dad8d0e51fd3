"""The cache that all runs of a machine share: an entry (a venv, a model) is built by one process, for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from miles_verifiers.errors import ComponentError, HostError
from miles_verifiers.system import progress

LOCK_TIMEOUT_S = 2400.0


USED = ".used"
"""In every entry; its time is that of the last use."""


def mark_used(entry: Path) -> None:
    """Note that `entry` is used now, for `prune`. A cache that this user may only read is no error."""
    with suppress(OSError):
        (entry / USED).touch()


def lock_file(entry: Path) -> Path:
    """Held while `entry` is made or removed."""
    return entry.with_name(f".{entry.name}.lock")


@contextmanager
def locked(entry: Path, *, what: str) -> Iterator[None]:
    """Hold `entry` of the cache, which need not exist; its parent folder is made.

    Others wait and say so. The kernel frees the lock when its holder dies. Raises HostError where the cache cannot be
    written, ComponentError after LOCK_TIMEOUT_S.
    """
    lock = FileLock(lock_file(entry))
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress.report(f"{what}: waiting for another run that makes it")
            lock.acquire(timeout=LOCK_TIMEOUT_S, poll_interval=0.2)
    except Timeout:
        raise ComponentError(
            f"{what}: another process has been making it for {LOCK_TIMEOUT_S:.0f} s",
            where=str(lock.lock_file),
            next_step="look which process holds the lock file, and end it",
        ) from None
    except OSError as error:
        raise HostError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(entry.parent),
            next_step="name a folder of yours in MILES_VERIFIERS_CACHE",
        ) from None
    try:
        yield
    finally:
        lock.release()
