"""`doctor`: what this machine has, what is missing, and the next step for each problem."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import uv

from miles_verifiers import process
from miles_verifiers.errors import MilesVerifiersError
from miles_verifiers.provision.roles import base_recipe
from miles_verifiers.provision.stack import candidate_python, find_gpus, pick_profile, probe
from miles_verifiers.rundir import cache_root

_DISK_GB = 14
_MEMORY_GB = 12


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    found: str
    problem: str = ""
    """Empty, or the next step."""


@dataclass(frozen=True, slots=True)
class Findings:
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return not any(finding.problem for finding in self.findings)

    def rows(self) -> list[list[str]]:
        return [[finding.what, finding.found, finding.problem or "ok"] for finding in self.findings]

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "findings": [asdict(finding) for finding in self.findings]}


def examine() -> Findings:
    """Looks only; makes nothing. A look that fails is a finding itself."""
    looks: list[Callable[[], Finding]] = [
        _python,
        _profile,
        _stack,
        _gpu,
        _uv,
        _disk,
        _memory,
        _shared_memory,
        _variables,
    ]
    return Findings([_safely(look) for look in looks])


def _safely(look: Callable[[], Finding]) -> Finding:
    name = look.__name__.strip("_").replace("_", " ")
    try:
        return look()
    except MilesVerifiersError as error:
        return Finding(name, error.what, error.next_step or error.where or "see the message")
    except OSError as error:
        return Finding(name, str(error), "look at the path that it names")


def _python() -> Finding:
    managed = probe(Path(sys.executable)).externally_managed
    note = ", externally managed: only venvs of our own are installed into" if managed else ""
    return Finding("python", f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.executable}{note}")


def _profile() -> Finding:
    name, why = pick_profile()
    return Finding("profile", f"{name}: {why}")


def _stack() -> Finding:
    image = probe(candidate_python())
    if not image.missing:
        return Finding("stack", f"the image's, {image.executable}: " + _versions(image.stack_versions))
    recipe = base_recipe()
    venv = cache_root() / "venvs" / f"{recipe.role}-{recipe.key()}"
    if not venv.is_dir():
        return Finding("stack", f"not there yet; `prepare` makes {venv}")
    return Finding("stack", f"{venv}: " + _versions(probe(venv / "bin" / "python").stack_versions))


def _gpu() -> Finding:
    return Finding("GPU", ", ".join(find_gpus()) or "none: the job runs on the CPU")


def _uv() -> Finding:
    return Finding("uv", uv.find_uv_bin())


def _disk() -> Finding:
    free = {}
    for name, path in (("cache", cache_root()), ("runs", Path.cwd())):
        there = next(p for p in (path, *path.parents) if p.exists())
        free[f"{name} {path}"] = shutil.disk_usage(there).free / 1e9
    short = [name for name, gigabytes in free.items() if gigabytes < _DISK_GB]
    found = ", ".join(f"{name}: {gigabytes:.0f} GB free" for name, gigabytes in free.items())
    return Finding("disk", found, f"free {_DISK_GB} GB, or set MILES_VERIFIERS_CACHE / --run-dir" if short else "")


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB available, {os.cpu_count()} cores"
    return Finding("memory", found, f"the job needs {_MEMORY_GB} GB" if memory.available / 1e9 < _MEMORY_GB else "")


def _shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free / 1e9  # noqa: S108 - looked at, not written to
    return Finding(
        "shared memory",
        f"{free:.1f} GB free",
        "Ray wants 1 GB: start the container with --shm-size=1g" if free < 1 else "",
    )


def _variables() -> Finding:
    dropped = sorted(process.redirections())
    ours = [name for name in os.environ if name.startswith(("MILES_", "VERIFIERS_CONFIG"))]
    found = f"set for us: {', '.join(sorted(ours)) or 'none'}"
    return Finding("variables", found + (f"; not passed on to roles: {', '.join(dropped)}" if dropped else ""))


def _versions(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
