"""The first look at an environment after it was installed: in its own interpreter, its taskset must load."""

from __future__ import annotations

import json
from pathlib import Path

from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.errors import EnvironmentPackageError, ProcessFailed
from miles_verifiers.provision.environments import Package
from miles_verifiers.record.manifest import fingerprint
from miles_verifiers.system import environ, process
from miles_verifiers.system.files import folder_hash, write_text

_TIMEOUT_S = 180.0


def look_at(
    environment: EnvironmentSection, package: Package, python: Path, *, log: Path, offline: bool = False
) -> None:
    """Import the environment and load its taskset, once per venv and taskset; a stamp in the venv remembers.

    Raises EnvironmentPackageError with the package, its interpreter, the command, and the last lines.
    """
    # The venv's key covers the package; of an editable one it does not cover the code.
    code = folder_hash(Path(package.source.place)) if package.editable else ""
    stamp = python.parent.parent / "looks" / f"{fingerprint(environment.taskset, code)[:16]}.json"
    if stamp.is_file():
        return
    argv: list[str | Path] = [python, "-P", "-m", "miles_verifiers.rollout.look", json.dumps(environment.taskset)]
    # The one moment at which a taskset may fetch its data: rollouts are offline.
    env = environ.allowed(process.child_environment(), environment.pass_variables)
    if offline:
        env["HF_HUB_OFFLINE"] = "1"
    try:
        lines = process.run(argv, what="loading the taskset", timeout=_TIMEOUT_S, log=log, env=env)
    except (ProcessFailed, EnvironmentPackageError) as error:
        last = " | ".join(error.tail[-4:]) if isinstance(error, ProcessFailed) and error.tail else error.what
        raise EnvironmentPackageError(
            f"the environment {package.label} does not load: {last}",
            where=f"interpreter {python}, command {' '.join(map(str, argv))}",
            next_step="mend the package, name what it lacks in its dependencies, or correct environment.taskset; "
            f"the whole output is in {log}",
        ) from None
    write_text(stamp, lines[-1] + "\n")
