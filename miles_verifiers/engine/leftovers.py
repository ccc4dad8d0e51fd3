"""What a stopped SGLang leaves on the machine, and how to remove exactly that.

SGLang 0.5.23 never removes its socket files, which lie in the temporary folder (PortArgs in sglang/srt/server_args.py), and
its shared load file `/dev/shm/sglang_loads_*` (sglang/srt/managers/load_snapshot.py). The first go with a temporary folder
of its own. The second has a random name, so the file is recognised by being mapped into the server's processes; files of
other servers are never touched.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

TEMPORARY_VARIABLE = "MILES_VERIFIERS_ENGINE_TMP"
"""Names the server's temporary folder to the server itself, which removes it when it is orphaned."""
_PREFIXES = ("/dev/shm/sglang_loads_", "/dev/shm/sgl_shm_", "/dev/shm/sem.mp-")  # noqa: S108 - names, nothing is created


def shared_memory(pid: int) -> set[Path]:
    """Files of SGLang in shared memory that process `pid` or one below it has mapped; empty where it is gone."""
    found: set[Path] = set()
    for process in _tree(pid):
        # A process of the tree may end at any moment.
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
            found |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if _ours(line)}
    return found


def remove(files: Iterable[Path], temporary: Path | None) -> None:
    """Remove `files` and the folder `temporary`; what is gone already is fine."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()
    if temporary is not None:
        shutil.rmtree(temporary, ignore_errors=True)


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _ours(line: str) -> bool:
    # "address perms offset dev inode path"; an unlinked file reads "path (deleted)".
    return any(prefix in line for prefix in _PREFIXES) and not line.endswith("(deleted)")
