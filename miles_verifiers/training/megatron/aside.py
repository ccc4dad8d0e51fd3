"""Folders that appear whole or not at all: written aside under a hidden name, then renamed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles_verifiers.errors import HostError
from miles_verifiers.system import files

_POLL_S = 0.2


def aside_of(target: Path) -> Path:
    """Where `target` is being written: hidden, in the same folder, so that the rename stays on one file system."""
    return target.with_name(f".{target.name}.partial")


def begin(target: Path) -> Path:
    """A fresh empty folder to write `target` into; what a killed process left there is removed."""
    folder = aside_of(target)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise HostError(
            f"cannot write here: {error.strerror}",
            where=str(folder),
            next_step="check the path, permissions and free space",
        ) from None
    return folder


def publish(target: Path) -> None:
    """Put the folder written aside in the place of `target`, replacing a former one."""
    folder, former = aside_of(target), target.with_name(f".{target.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    folder.rename(target)
    files.sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def discard(target: Path) -> None:
    """Give up what was being written."""
    shutil.rmtree(aside_of(target), ignore_errors=True)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """Write into the yielded folder; it becomes `target` at the end of the block, and is removed if the block raises."""
    folder = begin(target)
    try:
        yield folder
    except BaseException:
        discard(target)
        raise
    publish(target)


@contextmanager
def locked(folder: Path, timeout: float) -> Iterator[None]:
    """Hold `folder` against other processes; waits up to `timeout` seconds, then raises HostError.

    The lock lies on the folder itself, so it leaves no file and ends with its process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + timeout
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise HostError(
                        f"another process has been writing here for over {timeout:.0f} s",
                        where=str(folder),
                        next_step="wait for it to end, or stop it, then run again",
                    ) from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    files.write_text(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")
