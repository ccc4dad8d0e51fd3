"""What goes into a venv: locked packages, and an environment's package with what it still lacks."""

from __future__ import annotations

import re
from pathlib import Path

import uv

from miles_verifiers.errors import EnvironmentPackageError, InstallError
from miles_verifiers.provision import hub
from miles_verifiers.provision.recipes import Recipe, locked_versions, without
from miles_verifiers.system import process, progress

INSTALL_TIMEOUT_S = 1800.0
TRIED = ("verifiers", "renderers")
"""What an environment's package may not move away from the lock: the rollouts were tried with these versions."""
_NEWS = re.compile(r"(Downloading|Downloaded|Preparing|Prepared|Building|Built|Installed|Bytecode)")


def install_locks(recipe: Recipe, venv: Path, log: Path, offline: bool) -> None:
    have = set(recipe.below.distributions) if recipe.fill and recipe.below is not None else set()
    wanted = ""
    for lock in recipe.locks:
        wanted += without(lock, have)
        have |= set(locked_versions(lock))
    requirements = venv / "requirements.txt"
    requirements.write_text(wanted, encoding="utf-8")
    if locked_versions(requirements):
        arguments: list[str | Path] = ["pip", "install", "--no-deps", "--require-hashes"]
        arguments += _bytecode(recipe)
        run_uv([*arguments, "--python", _python(venv), "-r", requirements], recipe, log, offline)


def install_package(recipe: Recipe, venv: Path, log: Path, offline: bool) -> None:
    """Raises EnvironmentPackageError, with package, interpreter, command and the last lines, where that fails."""
    assert recipe.package is not None
    excludes, constraints = venv / "excludes.txt", venv / "constraints.txt"
    left_out = (set(recipe.protected) | set(recipe.exclude)) - set(recipe.allow_shadow)
    excludes.write_text("".join(f"{name}\n" for name in sorted(left_out)), encoding="utf-8")
    constraints.write_text(_pins(recipe), encoding="utf-8")
    package = recipe.package
    if package.source.kind == "hub":
        hub.install(package.requirement, venv, excludes=excludes, constraints=constraints, log=log, offline=offline)
        return
    target = ["--editable", package.requirement] if package.editable else [package.requirement]
    arguments: list[str | Path] = [
        "pip",
        "install",
        "--python",
        _python(venv),
        "--excludes",
        excludes,
        "--constraints",
        constraints,
    ]
    try:
        run_uv([*arguments, *_bytecode(recipe), *target], recipe, log, offline)
    except InstallError as error:
        raise EnvironmentPackageError(
            f"the environment's package {package.label} cannot be installed: " + " | ".join(error.tail[-6:]),
            where=f"{recipe.python.executable}: {error.where}",
            next_step="mend the package or environment.source"
            + ("; without --offline missing packages are fetched" if offline else ""),
        ) from None


def run_uv(arguments: list[str | Path], recipe: Recipe, log: Path, offline: bool) -> None:
    """One uv command. Raises InstallError with its last lines."""

    def show(line: str) -> None:
        text = line.strip()
        if _NEWS.match(text):
            progress.report(f"venv {recipe.role}: {text}")

    progress.report(f"venv {recipe.role}: uv {arguments[0]}")
    options = ["--offline"] if offline else []
    process.run(
        [uv.find_uv_bin(), *arguments, *options],
        what=f"uv {arguments[0]} for the venv {recipe.role}",
        timeout=INSTALL_TIMEOUT_S,
        log=log,
        on_line=show,
        error=InstallError,
        next_step="the cache lacks what the last lines name: run once without --offline"
        if offline
        else "see the last lines; check the network, or configure uv's index",
    )


def _bytecode(recipe: Recipe) -> list[str]:
    # SGLang starts in 35 s with bytecode and in 95 s without. What lies over our stack is small: the parts that are imported
    # get theirs at the first import. Over an image that may not happen, since it would reach the image's packages as well.
    return ["--compile-bytecode"] if recipe.below is None or recipe.frozen else []


def _pins(recipe: Recipe) -> str:
    versions: dict[str, str] = {}
    for lock in recipe.locks:
        versions |= locked_versions(lock)
    return "".join(f"{name}=={versions[name]}\n" for name in TRIED if name in versions)


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"
