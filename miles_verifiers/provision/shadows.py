"""The guard against shadows: no venv over the stack may hold a package of the stack, or need another version of it.

What the stack provides lies behind a venv's own packages. A second torch in front of the first would be imported by the
rollouts, fill the disk, and fail far from its cause. Installing leaves such packages out; that may not leave out either
what their requirers said about versions, so both are looked at after every install.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.provision.recipes import Recipe, normalised

_FAMILIES = (
    "nvidia-",
    "cuda-",
    "sgl-",
    "flash-attn",
    "flashinfer",
    "transformer-engine",
    "apex",
    "mbridge",
    "megatron-",
)
"""Beginnings of names of compiled packages that belong to one build of torch; protected where the stack has them."""


@dataclass(frozen=True, slots=True)
class Clash:
    """`name` is in the venv in version `held`, or is asked for (`required_by`) in a version that the stack's is not."""

    name: str
    stack: str
    held: str
    required_by: tuple[str, ...]

    def __str__(self) -> str:
        own = f"{self.name} {self.held}" if self.held else self.name
        who = f"required by {', '.join(self.required_by)}" if self.required_by else "named in the lock"
        return f"{own} (the stack has {self.stack or 'none'}; {who})"


def refuse(recipe: Recipe, site_packages: Path, python: Path) -> None:
    """Raises EnvironmentPackageError where the venv at `site_packages` holds or needs what the stack must provide."""
    found = clashes(recipe, site_packages)
    if not found:
        return
    names = ", ".join(f'"{clash.name}"' for clash in found)
    held = any(clash.held for clash in found)
    raise EnvironmentPackageError(
        f"the venv {recipe.label} {'would shadow packages of the stack' if held else 'needs other versions than the stack has'}: "
        + "; ".join(map(str, found)),
        where=str(python),
        next_step=f"change what the package asks for; or set environment.exclude = [{names}] to use the stack's version "
        f"all the same; or environment.allow_shadow = [{names}] to give this environment a copy of its own",
    )


def clashes(recipe: Recipe, site_packages: Path) -> list[Clash]:
    below = recipe.below.distributions if recipe.below is not None else {}
    protected = set(recipe.protected) | {name for name in below if name.startswith(_FAMILIES)}
    protected -= set(recipe.allow_shadow)
    own = {
        normalised(each.metadata["Name"]): each for each in importlib.metadata.distributions(path=[str(site_packages)])
    }
    asked: dict[str, list[str]] = {}
    unmet: dict[str, list[str]] = {}
    for holder, distribution in own.items():
        for requirement in _requirements(distribution):
            name = normalised(requirement.name)
            text = f"{holder}: {requirement.name}{requirement.specifier}"
            asked.setdefault(name, []).append(text)
            if not requirement.specifier.contains(below.get(name, "0"), prereleases=True):
                unmet.setdefault(name, []).append(text)
    held = [
        Clash(name, below.get(name, ""), own[name].version, tuple(asked.get(name, ())))
        for name in sorted(protected & set(own))
    ]
    needed = [
        Clash(name, below[name], "", tuple(unmet[name]))
        for name in sorted(protected & set(unmet) & set(below) - set(own) - set(recipe.exclude))
    ]
    return held + needed


def _requirements(distribution: importlib.metadata.Distribution) -> Iterator[Requirement]:
    for line in distribution.requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # an old release's metadata; nothing can be concluded from it
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement
