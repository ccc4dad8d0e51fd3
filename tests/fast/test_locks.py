"""Every version of Verifiers that can be configured has a lock, made from a group of pyproject.toml, within known bounds."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from miles_verifiers.provision.recipes import locked_versions, normalised
from miles_verifiers.provision.roles import locks, protected
from miles_verifiers.system import resources

VERSIONS = sorted(path.stem.removeprefix("env-verifiers-") for path in locks().glob("env-verifiers-*.txt"))
WORKS = {
    # renderers 0.1.11 removed what 0.2.x needs, and mcp 2 too: imports pass, every rollout fails.
    "0.2.0": {"renderers": ">=0.1.8,<0.1.11", "mcp": "<2", "openai": "<3"},
    "0.2.1": {"renderers": ">=0.1.8,<0.1.11", "mcp": "<2", "openai": ">=2.9,<3"},
    "0.3.1": {"renderers": ">=0.1.10,!=0.1.11,<0.1.13", "mcp": "<2", "openai": ">=2.9,<3"},
    "0.4.0": {"renderers": "==0.1.12", "openai": ">=2.54,<3"},
}


@pytest.fixture(scope="module")
def groups() -> dict[str, list[str]]:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, list[str]] = tomllib.loads(text)["dependency-groups"]
    return found


def test_each_group_has_a_lock_and_each_lock_a_group(groups: dict[str, list[str]]) -> None:
    of_groups = sorted(name.removeprefix("env-verifiers-").replace("-", ".") for name in groups if "verifiers" in name)
    assert sorted(WORKS) == VERSIONS == of_groups
    noxfile = ast.parse((Path(__file__).parents[2] / "noxfile.py").read_text(encoding="utf-8"))
    (named,) = (
        node.value
        for node in noxfile.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "VERIFIERS"
    )
    assert sorted(ast.literal_eval(named)) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lock_holds_what_its_group_asks_for_and_nothing_of_the_stack(
    version: str, groups: dict[str, list[str]]
) -> None:
    locked = locked_versions(locks() / f"env-verifiers-{version}.txt")
    for text in groups[f"env-verifiers-{version.replace('.', '-')}"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[normalised(requirement.name)]), text
    for name, bounds in WORKS[version].items():
        assert SpecifierSet(bounds).contains(locked[name]), f"{name} {locked[name]} is not within {bounds}"
    assert locked["verifiers"] == version
    assert not set(locked) & set(protected())


def test_no_lock_names_an_index() -> None:
    for lock in (resources.root() / "locks").glob("*.txt"):
        assert "://" not in lock.read_text(encoding="utf-8"), lock.name
