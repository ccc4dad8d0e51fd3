"""What building an environment has in common in both generations of Verifiers' API."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.settings import EnvironmentSection


def checked_taskset_id(environment: EnvironmentSection) -> str:
    """`environment.taskset.id`. Raises EnvironmentPackageError unless it is the id of a package.

    An owner/name id would make Verifiers install from its hub, into this interpreter, in the middle of a run.
    """
    name = environment.taskset.get("id")
    if not isinstance(name, str) or not name or "/" in name:
        raise EnvironmentPackageError(
            f"environment.taskset.id is {name!r}",
            where=f"environment {name or environment.source}",
            next_step="give the id of an installed package",
        )
    return name


def keep_workdirs_in_tempdir() -> None:
    """Rollouts' working folders go where TMPDIR says.

    Verifiers writes /tmp in 0.2.x and the home folder in 0.3.1 and 0.4.0 (verifiers/v1/runtimes/subprocess.py).
    """

    async def start(self: Any) -> None:
        self.workdir = Path(tempfile.gettempdir()) / self.name
        self.workdir.mkdir()
        self.info.id = str(self.workdir)

    SubprocessRuntime.start = start
