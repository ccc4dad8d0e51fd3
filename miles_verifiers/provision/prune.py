"""What the cache holds, and what of it may go.

An entry goes when it was not used for some days, and it is not in use: nobody builds it, no process runs from it, and no venv
that stays lies over it. What killed builders left goes at once. Everything here can be made again by `prepare`.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from miles_verifiers.provision.cache import USED, lock_file
from miles_verifiers.provision.venvs import OVERLAY

KINDS = ("venvs", "models")
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Entry:
    path: Path
    days: float
    """Since it was used last."""
    bytes: int
    """That removing it gives back: files of its own, not those that it shares with uv's cache by hard links."""
    kept: str = ""
    """Why it stays; empty where it may go."""

    def row(self) -> list[str]:
        size = f"{self.bytes / 1e6:.0f} MB"
        return [f"{self.path.parent.name}/{self.path.name}", size, f"{self.days:.1f}", self.kept or "may go"]


def entries(cache: Path, *, days: float) -> list[Entry]:
    """Everything in the cache; what was used less than `days` ago stays."""
    running = list(_interpreters())
    found = [_entry(path, days, running) for path in _paths(cache)]
    # A venv that stays needs what it lies over.
    needed = {base for entry in found if entry.kept for base in _below(entry.path)}
    return [
        Entry(each.path, each.days, each.bytes, "others lie over it")
        if not each.kept and each.path.resolve() in needed
        else each
        for each in found
    ]


def remove(entry: Entry) -> bool:
    """Remove one entry; False where it is being built at this moment. A removal that is killed leaves no half entry."""
    assert not entry.kept
    if entry.path.name.startswith("."):
        shutil.rmtree(entry.path, ignore_errors=True)
        return True
    lock = FileLock(lock_file(entry.path))
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return False
    try:
        # Renamed first: under its own name it is whole or absent.
        aside = entry.path.with_name(f".removed-{entry.path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        entry.path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    finally:
        lock.release()
    return True


def _paths(cache: Path) -> Iterator[Path]:
    for kind in KINDS:
        with contextlib.suppress(OSError):
            yield from sorted(path for path in (cache / kind).iterdir() if path.is_dir())


def _entry(path: Path, days: float, running: list[Path]) -> Entry:
    marked = path / USED
    age = (time.time() - (marked if marked.exists() else path).stat().st_mtime) / _DAY_S
    kept = ""
    if path.name.startswith("."):
        # A builder's or a remover's; a builder holds its entry's lock.
        kept = "" if _is_abandoned(path) else "being built"
    elif any(each.is_relative_to(path.resolve()) for each in running):
        kept = "in use"
    elif age < days:
        kept = f"used within {days:g} days"
    return Entry(path, max(0.0, age), _own_bytes(path), kept)


def _is_abandoned(path: Path) -> bool:
    name = path.name.removeprefix(".building-").removeprefix(".removed-").removeprefix(".").removesuffix(".part")
    if path.name.startswith(".building-"):
        name = name.rpartition("-")[0]
    lock = FileLock(lock_file(path.with_name(name)))
    try:
        lock.acquire(timeout=0)
    except (Timeout, OSError):
        return False
    lock.release()
    return True


def _interpreters() -> Iterator[Path]:
    """What all processes run from: their commands as they were called (a venv's Python is a link, which the kernel follows),
    and of Ray's workers, which write their title over the command, the libraries that they have loaded."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            command = process.cmdline()[0]
            if command.startswith("ray::"):
                yield from (Path(each.path) for each in process.memory_maps() if each.path.endswith(".so"))
            elif command.startswith("/"):
                yield Path(command).parent.resolve() / Path(command).name


def _below(venv: Path) -> Iterator[Path]:
    for file in venv.glob(f"lib/python*/site-packages/{OVERLAY}"):
        for line in file.read_text(encoding="utf-8").splitlines():
            # import site; site.addsitedir('/cache/venvs/stack-cpu-1/lib/python3.11/site-packages')
            folder = Path(line.partition("('")[2].rpartition("')")[0])
            if len(folder.parents) > 2:
                yield folder.parents[2].resolve()


def _own_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            total += status.st_blocks * 512 if status.st_nlink == 1 else 0
    return total
