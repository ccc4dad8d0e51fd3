"""Venvs, built from recipes: aside, under a lock, then renamed; found again by the hash of their recipe.

A venv lies *over* the stack: a `.pth` file names the stack's site-packages, so that its packages are seen behind the
venv's own. That works over a system Python and over another venv alike, which `--system-site-packages` does not (it shows
the base interpreter's packages only), and it changes nothing in what lies below.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import uv

from miles_verifiers import process, progress, resources
from miles_verifiers.errors import EnvironmentPackageError, HostError, InstallError
from miles_verifiers.provision.cache import locked
from miles_verifiers.provision.stack import Interpreter, probe

LAYOUT = "2"
"""Part of every key; raise it when the way venvs are built changes."""
INSTALL_TIMEOUT_S = 1800.0
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what is in a venv."""

    role: str
    python: Interpreter
    """The interpreter that the venv starts."""
    below: Interpreter | None = None
    """Whose site-packages are seen behind the venv's own."""
    locks: tuple[Path, ...] = ()
    """Hashed requirements; of what two of them name, the first one's version is taken."""
    fill: bool = False
    """Whether packages that `below` provides, in any version, are left out."""
    package: Path | None = None
    """A folder with a Python project, installed with the dependencies that are still missing."""
    excludes: Path | None = None
    """Names that `package` must not bring, one a line."""
    with_ourselves: bool = True
    """Whether this package is copied in."""
    disk_bytes: int = 0
    """What it needs at most, for the check before anything is fetched."""
    forbidden: tuple[str, ...] = field(default=())
    """Distributions that the venv may not hold itself: they would shadow those of `below`."""

    def key(self) -> str:
        digest = hashlib.sha256()

        def add(*parts: str) -> None:
            digest.update("\0".join((*parts, "")).encode())

        add(LAYOUT, self.role, str(self.python.executable), str(self.python.version))
        if self.below is not None:
            add(
                "below",
                *map(str, self.below.site_packages),
                *(f"{k}={v}" for k, v in sorted(self.below.distributions.items())),
            )
        for file in (*self.locks, self.excludes):
            if file is not None:
                add(file.name, file.read_text(encoding="utf-8"), str(self.fill))
        ours = [own_package(), *_own_data()] if self.with_ourselves else []
        for folder in (self.package, *ours):
            if folder is not None:
                add("folder", folder.name, folder_hash(folder))
        return digest.hexdigest()[:12]


def ensure(recipe: Recipe, cache: Path, *, log: Path, offline: bool = False) -> Path:
    """The venv of `recipe`, built if it is not there yet; returns its folder.

    Two processes that want the same venv build it once. Raises HostError (disk), InstallError (uv's last lines), or
    EnvironmentPackageError where the environment's own package cannot be built.
    """
    target = cache / "venvs" / f"{recipe.role}-{recipe.key()}"
    if target.is_dir():
        return target
    with locked(target, what=f"venv {recipe.role}"):
        if not target.is_dir():
            _check_disk(target.parent, recipe)
            _build(recipe, target, log, offline)
    return target


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def own_package() -> Path:
    return Path(__file__).resolve().parent.parent


def _own_data() -> list[Path]:
    return [resources.root() / name for name in ("profiles", "locks", "environments")]


def folder_hash(folder: Path) -> str:
    """Hash over names and contents of a source folder, caches left out."""
    digest = hashlib.sha256()
    for path in sorted(_source_files(folder)):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def locked_names(lock: Path) -> list[str]:
    """Normalised names in a hashed requirements file."""
    found = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return [normalised(name) for name in found]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _source_files(folder: Path) -> Iterable[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            d for d in folders if d != "__pycache__" and not d.startswith(".") and not d.endswith(".egg-info")
        ]
        yield from (Path(root) / f for f in files if not f.endswith(".pyc") and not f.startswith("."))


def _check_disk(folder: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(folder).free
    if free < recipe.disk_bytes:
        raise HostError(
            f"the venv {recipe.role} needs up to {recipe.disk_bytes / 1e9:.0f} GB, {free / 1e9:.1f} GB are free",
            where=str(folder),
            next_step="free some, or name another disk in MILES_VERIFIERS_CACHE",
        )


def _build(recipe: Recipe, target: Path, log: Path, offline: bool) -> None:
    for left in target.parent.glob(f".building-{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)  # we hold the lock: nobody else is building it
    aside = target.parent / f".building-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        _uv(
            ["venv", "--relocatable", "--no-project", "--python", recipe.python.executable, aside], recipe, log, offline
        )
        site_packages = probe(python_of(aside)).site_packages[0]
        if recipe.below is not None:
            _lay_over(site_packages, recipe.below)
        if recipe.locks:
            _install_locks(recipe, aside, log, offline)
        if recipe.package is not None:
            _install_package(recipe, aside, log, offline)
        if recipe.with_ourselves:
            _copy_ourselves(site_packages)
        _refuse_shadows(recipe, site_packages)
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _lay_over(site_packages: Path, below: Interpreter) -> None:
    # addsitedir, not the bare path: it also runs the .pth files of the stack, which editable installs rely on. The name
    # sorts last, so that the venv's own .pth files come first.
    lines = [f"import site; site.addsitedir({str(path)!r})" for path in below.site_packages]
    (site_packages / "zz_stack.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _install_locks(recipe: Recipe, venv: Path, log: Path, offline: bool) -> None:
    have = set(recipe.below.distributions) if recipe.fill and recipe.below is not None else set()
    wanted = ""
    for lock in recipe.locks:
        wanted += without(lock, have)
        have |= set(locked_names(lock))
    requirements = venv / "requirements.txt"
    requirements.write_text(wanted, encoding="utf-8")
    if locked_names(requirements):
        arguments = ["pip", "install", "--no-deps", "--require-hashes"]
        if recipe.below is None:
            # SGLang starts in 35 s with bytecode and in 95 s without. What lies over the stack is small: the parts that
            # are imported get theirs at the first import.
            arguments.append("--compile-bytecode")
        _uv([*arguments, "--python", python_of(venv), "-r", requirements], recipe, log, offline)


def without(lock: Path, names: set[str]) -> str:
    """The lock's text less the entries of `names`. An entry is its first line and the indented ones that follow."""
    kept, keep = [], True
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            keep = normalised(line.partition("==")[0]) not in names
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n"


def _install_package(recipe: Recipe, venv: Path, log: Path, offline: bool) -> None:
    assert recipe.package is not None
    arguments: list[str | Path] = ["pip", "install", "--python", python_of(venv)]
    if recipe.excludes is not None:
        arguments += ["--excludes", recipe.excludes]
    try:
        _uv([*arguments, recipe.package], recipe, log, offline)
    except InstallError as error:
        raise EnvironmentPackageError(
            "the environment's package cannot be installed: " + " | ".join(error.tail[-4:]),
            where=str(recipe.package),
            next_step=f"mend the package; the whole output is in {log}",
        ) from None


def _copy_ourselves(site_packages: Path) -> None:
    """Copy this package and its metadata: the actors then run the very code that started them, editable or not.

    The metadata carry the entry point by which SGLang finds our platform. The project's data go where a wheel has them.
    """
    shutil.copytree(own_package(), site_packages / "miles_verifiers", ignore=_IGNORED)
    for folder in _own_data():
        target = site_packages / "miles_verifiers" / "_data" / folder.name
        shutil.copytree(folder, target, ignore=_IGNORED, dirs_exist_ok=True)
    distribution = importlib.metadata.distribution("miles-verifiers")
    info = site_packages / f"miles_verifiers-{distribution.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(distribution.read_text(name) or "", encoding="utf-8")


def _refuse_shadows(recipe: Recipe, site_packages: Path) -> None:
    own = {
        normalised(d.metadata["Name"]): d.version for d in importlib.metadata.distributions(path=[str(site_packages)])
    }
    shadows = sorted(set(own) & set(recipe.forbidden))
    if shadows:
        below = recipe.below.distributions if recipe.below else {}
        listed = ", ".join(f"{name} {own[name]} (the stack has {below.get(name, 'none')})" for name in shadows)
        raise InstallError(
            f"the venv {recipe.role} would shadow packages of the stack: {listed}",
            where=str(recipe.package or recipe.locks),
            next_step="remove them from the environment's dependencies: the stack provides them",
        )


def _uv(arguments: list[str | Path], recipe: Recipe, log: Path, offline: bool) -> None:
    def show(line: str) -> None:
        text = line.strip()
        if re.match(r"(Downloading|Downloaded|Preparing|Prepared|Building|Built|Installed|Bytecode)", text):
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
        next_step="see the last lines" + ("; without --offline missing packages are fetched" if offline else ""),
    )
