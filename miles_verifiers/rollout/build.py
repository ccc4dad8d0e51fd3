"""What building an environment has in common in both generations of Verifiers' API."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.rollout.look import loaders, refuse_classic

log = logging.getLogger(__name__)


def check_api(name: str) -> None:
    """Raises EnvironmentPackageError where `name` is a package of Verifiers' classic API, and what importing it raises."""
    refuse_classic(name, loaders().import_taskset(name))


def not_built(name: str, error: Exception, next_step: str) -> EnvironmentPackageError:
    """The error for whatever an environment's own code raises while it is imported and built."""
    return EnvironmentPackageError(
        f"the environment cannot be built: {type(error).__name__}: {error}",
        where=f"environment {name}, interpreter {sys.executable}",
        next_step=next_step,
    )


def take_tasks(name: str, tasks: Iterable[Any], limit: int | None) -> list[Any]:
    """A taskset's tasks, the first `limit` of an endless one. Raises EnvironmentPackageError where there are none."""
    where = f"environment {name}"
    try:
        taken = list(itertools.islice(tasks, limit))
    except Exception as error:
        raise EnvironmentPackageError(
            f"the taskset cannot be loaded: {type(error).__name__}: {error}", where=where
        ) from error
    if not taken:
        raise EnvironmentPackageError("the taskset is empty", where=where)
    if limit is not None:
        log.info("the taskset has no end: its first %d tasks are used (environment.endless_tasks)", len(taken))
    return taken


def keep_workdirs_in_tempdir() -> None:
    """Rollouts' working folders go where TMPDIR says.

    Verifiers writes /tmp in 0.2.x and the home folder in 0.3.1 and 0.4.0 (verifiers/v1/runtimes/subprocess.py).
    """

    async def start(self: Any) -> None:
        self.workdir = Path(tempfile.gettempdir()) / self.name
        self.workdir.mkdir()
        self.info.id = str(self.workdir)

    SubprocessRuntime.start = start
