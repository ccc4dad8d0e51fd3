"""Recipes of venvs: all that decides what is in one, and the key that follows from it."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from miles_verifiers.provision.environments import Package
from miles_verifiers.provision.stack import Interpreter
from miles_verifiers.system import resources
from miles_verifiers.system.files import folder_hash

LAYOUT = "3"
"""Part of every key; raise it when the way venvs are built changes."""


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
    first: tuple[Path, ...] = ()
    """Folders that are imported from before anything else, the venv's own packages included."""
    package: Package | None = None
    """An environment's package, installed with the dependencies that are still missing."""
    protected: tuple[str, ...] = ()
    """Distributions that the venv may not hold itself: they would shadow those of `below`."""
    exclude: tuple[str, ...] = ()
    """Of those, the ones that `below` serves in whatever version the package asks for."""
    allow_shadow: tuple[str, ...] = ()
    """Of those, the ones that the venv may hold all the same."""
    frozen: bool = False
    """Whether not even bytecode may be written into `below`: an image's interpreter, not a venv of ours."""
    with_ourselves: bool = True
    """Whether this package is copied in."""
    disk_bytes: int = 0
    """What it needs at most, for the check before anything is fetched."""

    def key(self) -> str:
        digest = hashlib.sha256()

        def add(*parts: str) -> None:
            digest.update("\0".join((*parts, "")).encode())

        add(LAYOUT, self.role, str(self.python.executable), str(self.python.version))
        if self.below is not None:
            add(
                "below",
                str(self.frozen),
                *map(str, self.below.site_packages),
                *(f"{k}={v}" for k, v in sorted(self.below.distributions.items())),
            )
        for lock in self.locks:
            add("lock", lock.name, lock.read_text(encoding="utf-8"), str(self.fill))
        for kind in ("first", "protected", "exclude", "allow_shadow"):
            add(kind, *map(str, getattr(self, kind)))
        if self.package is not None:
            add("package", str(self.package.editable), *self.package.key)
        for folder in [own_package(), *own_data()] if self.with_ourselves else []:
            add("folder", folder.name, folder_hash(folder))
        return digest.hexdigest()[:12]

    @property
    def label(self) -> str:
        """What messages call it."""
        return f"{self.role} ({self.package.label})" if self.package is not None else self.role


def own_package() -> Path:
    return Path(__file__).resolve().parents[1]


def own_data() -> list[Path]:
    return [resources.root() / name for name in ("profiles", "locks", "environments")]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked_versions(lock: Path) -> dict[str, str]:
    """Version by normalised name in a hashed requirements file; where markers choose between several, the last one."""
    found = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    return {normalised(name): version for name, version in found}


def without(lock: Path, names: set[str]) -> str:
    """The lock's text less the entries of `names`. An entry is its first line and the indented ones that follow."""
    kept, keep = [], True
    for line in lock.read_text(encoding="utf-8").splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            keep = normalised(line.partition("==")[0]) not in names
        if keep:
            kept.append(line)
    return "\n".join(kept) + "\n"
