"""`python -P -m miles_verifiers.engine.launch ARGUMENTS`: runs `sglang.launch_server ARGUMENTS` in this process.

It adds two things to SGLang's own start:
- The server goes when the process that started it is gone, also when that one was killed. SGLang has this for its children
  (kill_itself_when_parent_died in sglang/srt/utils/common.py, 0.5.23), not for itself. The kernel's parent-death signal
  counts the *thread* that started us, which may end long before its process, so the parent's pid is watched instead.
- Without a GPU the scheduler and the detokenizer are forked instead of spawned: 13 s of imports and 1 GB of memory are then
  shared. SGLang spawns because CUDA does not survive a fork (_set_envs_and_config in sglang/srt/entrypoints/engine.py).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

from miles_verifiers.engine import leftovers
from miles_verifiers.system.process import PARENT_VARIABLE

_POLL_S = 0.5


def main() -> None:
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is not None:
        threading.Thread(target=_end_with, args=(int(parent),), daemon=True, name="parent-watch").start()
    if wants_cpu(sys.argv[1:]):
        _fork_children()
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _end_with(parent: int) -> None:
    """Return never; end this process and its children as soon as `parent` is not our parent any more."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    temporary = os.environ.get(leftovers.TEMPORARY_VARIABLE)
    leftovers.remove(leftovers.shared_memory(os.getpid()), Path(temporary) if temporary else None)
    # We lead the session that the server made for us, so the group is exactly SGLang's processes.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def wants_cpu(arguments: list[str]) -> bool:
    return "--device=cpu" in arguments or ("--device", "cpu") in itertools.pairwise(arguments)


def _fork_children() -> None:
    """Have SGLang's request for `spawn` give `fork`.

    At that moment the process has run imports only: no tensor arithmetic, and no thread but the idle one above.
    """
    original = multiprocessing.set_start_method

    def set_start_method(method: str | None, force: bool = False) -> None:
        original("fork" if method == "spawn" else method, force=force)

    multiprocessing.set_start_method = set_start_method  # type: ignore[method-assign, unused-ignore]
    # Python 3.12 and newer warn of forking beside any thread; ours only sleeps.
    warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)


if __name__ == "__main__":
    main()
