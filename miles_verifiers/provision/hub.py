"""Environments of Prime's hub, through the prime command.

prime is a tool of its own with its own venv: it is called by the path that uv reports, told by VIRTUAL_ENV into which
interpreter it installs (it would take its own venv otherwise), and its exit code proves nothing: prime 0.6.19 ends with 0
when a build failed. What it installed is looked up afterwards.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import uv

from miles_verifiers.errors import EnvironmentPackageError, InstallError
from miles_verifiers.provision.recipes import normalised
from miles_verifiers.system import process, progress

_TIMEOUT_S = 900.0
_HOW_TO_GET_IT = "uv tool install 'prime==0.6.19' --with 'prime-sandboxes<0.3' --with 'verifiers==0.2.0'"
"""prime 0.6.19 alone resolves a newer prime-sandboxes, with which it does not start."""


def find_prime() -> Path | None:
    """The prime command: where uv puts tools, else on PATH."""
    folder = tool_folder()
    if folder is not None and os.access(folder / "prime", os.X_OK):
        return folder / "prime"
    found = shutil.which("prime")
    return Path(found) if found else None


def tool_folder() -> Path | None:
    """Where uv puts the commands of its tools; None where uv does not say."""
    try:
        done = subprocess.run(
            [uv.find_uv_bin(), "tool", "dir", "--bin"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Path(done.stdout.strip())


def install(requirement: str, venv: Path, *, excludes: Path, constraints: Path, log: Path, offline: bool) -> None:
    """`owner/name[@version]` into `venv`. Raises EnvironmentPackageError where it is not there afterwards."""
    if offline:
        raise EnvironmentPackageError(
            f"offline, and {requirement} is not in the cache", next_step="run prepare once without --offline"
        )
    prime = find_prime()
    if prime is None:
        raise EnvironmentPackageError(
            f"{requirement} is on Prime's hub, and there is no prime command",
            where=str(tool_folder() or "uv tool dir --bin"),
            next_step=f"install it: {_HOW_TO_GET_IT}; or write ./{requirement} if a folder was meant",
        )
    name = requirement.partition("/")[2].partition("@")[0]
    command: list[str | Path] = [prime, "env", "install", requirement]
    progress.report(f"prime env install {requirement}")
    tail: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mv-prime-") as elsewhere:
        # In an empty folder: prime would prefer the .venv of a project that it finds around it.
        try:
            tail = process.run(
                command,
                what="prime env install",
                timeout=_TIMEOUT_S,
                log=log,
                env=_environment(venv, excludes, constraints),
                cwd=Path(elsewhere),
                error=InstallError,
            )
        except InstallError as error:
            tail = [error.what, *error.tail]
    if version_in(venv, name) is None:
        raise EnvironmentPackageError(
            f"prime did not install {name}: " + (" | ".join(tail[-12:]) or "it printed nothing"),
            where=f"{venv / 'bin' / 'python'}: {' '.join(map(str, command))}",
            next_step=f"see {log}; is the name right, and are you logged in (prime login)?",
        )


def version_in(venv: Path, name: str) -> str | None:
    """The version of a distribution in the venv's own folder, not of one that is seen behind it."""
    folders = [str(path) for path in venv.glob("lib/python*/site-packages")]
    found = {normalised(each.metadata["Name"]): each.version for each in importlib.metadata.distributions(path=folders)}
    return found.get(normalised(name))


def _environment(venv: Path, excludes: Path, constraints: Path) -> dict[str, str]:
    env = process.child_environment()
    # It counts before VIRTUAL_ENV.
    env.pop("UV_PROJECT_ENVIRONMENT", None)
    # prime calls uv by name; these are uv's own variables for the options of the same names.
    path = os.pathsep.join([str(Path(uv.find_uv_bin()).parent), str(venv / "bin"), env.get("PATH", os.defpath)])
    return env | {
        "VIRTUAL_ENV": str(venv),
        "PATH": path,
        "UV_EXCLUDE": str(excludes),
        "UV_CONSTRAINT": str(constraints),
    }
