"""`doctor`: what this machine has, what is missing, and the next step for each problem. Looks only; makes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import uv

from miles_verifiers.errors import HostError, MilesVerifiersError
from miles_verifiers.provision import fingerprint, host, hub
from miles_verifiers.provision.findings import Finding, Findings
from miles_verifiers.provision.roles import base_recipe
from miles_verifiers.provision.stack import Interpreter, candidate_python, pick_profile, probe
from miles_verifiers.record.rundir import cache_root


def examine() -> Findings:
    """All looks; one that fails is a finding itself."""
    looks: dict[str, Callable[[], Finding]] = {
        "python": _python,
        "profile": _profile,
        "stack": _stack,
        "GPU": host.gpu,
        "uv": _uv,
        "prime": _prime,
        "disk": host.disk,
        "memory": host.memory,
        "shared memory": host.shared_memory,
        "open files": host.open_files,
        "ports": host.ports,
        "caches": host.caches,
        "variables": host.variables,
    }
    stack = _without_fail(find_stack)
    return Findings([_safely(name, look) for name, look in looks.items()], fingerprint.of(stack) if stack else {})


def check_stack(file: Path) -> None:
    """Raises CheckFailed where the stack is not the one that `file` records, HostError where there is none."""
    stack = find_stack()
    if stack is None:
        raise HostError("there is no stack yet", where=str(cache_root()), next_step="run: miles-verifiers prepare")
    fingerprint.check(file, stack)


def find_stack() -> Interpreter | None:
    """The image's interpreter where it provides the stack, else our venv, else None."""
    image = probe(candidate_python())
    if not image.missing:
        return image
    recipe = base_recipe()
    venv = cache_root() / "venvs" / f"{recipe.role}-{recipe.key()}"
    return probe(venv / "bin" / "python") if venv.is_dir() else None


def _safely(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except MilesVerifiersError as error:
        return Finding(name, error.what, error.next_step or error.where or "see the message")
    except OSError as error:
        return Finding(name, str(error), "look at the path that it names")


def _without_fail(look: Callable[[], Interpreter | None]) -> Interpreter | None:
    try:
        return look()
    except MilesVerifiersError:
        return None  # a finding says so


def _python() -> Finding:
    found = f"{'.'.join(map(str, sys.version_info[:3]))} in {sys.executable}"
    base = probe(candidate_python())
    below = f"; below it {base.executable}" if base.executable != Path(sys.executable) else ""
    note = ", externally managed: only venvs of our own are installed into" if base.externally_managed else ""
    return Finding("python", found + below + note)


def _profile() -> Finding:
    name, why = pick_profile()
    return Finding("profile", f"{name}: {why}")


def _stack() -> Finding:
    stack = find_stack()
    if stack is None:
        return Finding("stack", "not there yet; `prepare` makes it")
    versions = ", ".join(f"{name} {version}" for name, version in stack.stack_versions.items())
    whose = "our venv" if stack.executable.is_relative_to(cache_root()) else "the image's"
    mark = fingerprint.of(stack)[fingerprint.MARK]
    return Finding("stack", f"{whose}, {stack.site_packages[0]}: {versions}; fingerprint {mark}")


def _uv() -> Finding:
    return Finding("uv", uv.find_uv_bin())


def _prime() -> Finding:
    found = hub.find_prime()
    return Finding("prime", str(found) if found else "none: only environments of Prime's hub need it")
