"""Venvs over an interpreter: real uv, real interpreters, nothing fetched."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from miles_verifiers.errors import EnvironmentPackageError, HostError, InstallError
from miles_verifiers.provision import venvs
from miles_verifiers.provision.stack import Interpreter, probe

LOCK = """\
# made by a tool
alpha==1.0 ; python_version >= "3.11" \\
    --hash=sha256:aa \\
    --hash=sha256:bb
    # via beta
Beta_Two==2.0 \\
    --hash=sha256:cc
"""


@pytest.fixture(scope="module")
def here() -> Interpreter:
    return probe(Path(sys.executable))


@pytest.fixture
def recipe(here: Interpreter) -> venvs.Recipe:
    return venvs.Recipe("role", here, below=here)


def build(recipe: venvs.Recipe, tmp_path: Path) -> Path:
    return venvs.ensure(recipe, tmp_path / "cache", log=tmp_path / "log", offline=True)


def evaluate(venv: Path, expression: str) -> str:
    code = f"import sys, miles_verifiers, psutil; print({expression})"
    done = subprocess.run(
        [venvs.python_of(venv), "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_venv_holds_this_package_and_sees_what_lies_below(
    recipe: venvs.Recipe, here: Interpreter, tmp_path: Path
) -> None:
    venv = build(recipe, tmp_path)
    assert Path(evaluate(venv, "miles_verifiers.__file__")).is_relative_to(venv)
    assert Path(evaluate(venv, "psutil.__file__")).is_relative_to(here.prefix)
    assert Path(evaluate(venv, "sys.prefix")) == venv


def test_the_entry_point_that_sglang_looks_for_is_found_in_it(recipe: venvs.Recipe, tmp_path: Path) -> None:
    found = evaluate(
        build(recipe, tmp_path),
        "[e.value for e in __import__('importlib.metadata').metadata.entry_points(group='sglang.srt.platforms')][0]",
    )
    assert found == "miles_verifiers.engine.platform:activate"


def test_a_venv_is_built_once_and_found_again(
    recipe: venvs.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build(recipe, tmp_path)
    monkeypatch.setattr(venvs, "_build", lambda *_: pytest.fail("built twice"))
    assert build(recipe, tmp_path) == first


def test_two_at_once_build_one(recipe: venvs.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    real = venvs._build

    def counting(recipe: venvs.Recipe, target: Path, log: Path, offline: bool) -> None:
        built.append(target)
        real(recipe, target, log, offline)

    monkeypatch.setattr(venvs, "_build", counting)
    threads = [threading.Thread(target=build, args=(recipe, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(built) == 1


@pytest.mark.parametrize("change", ["lock", "package", "role", "excludes"])
def test_a_changed_recipe_has_another_key(recipe: venvs.Recipe, tmp_path: Path, change: str) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    files = {"lock": tmp_path / "lock.txt", "package": folder / "pyproject.toml", "excludes": tmp_path / "x.excludes"}
    for file in files.values():
        file.write_text("a==1\n")
    full = dataclasses.replace(recipe, locks=(files["lock"],), package=folder, excludes=files["excludes"])
    before = full.key()
    assert full.key() == before
    if change == "role":
        full = dataclasses.replace(full, role="other")
    else:
        files[change].write_text("a==2\n")
    assert full.key() != before


def test_a_killed_build_leaves_nothing_that_looks_finished(
    recipe: venvs.Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venvs, "_copy_ourselves", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(recipe, tmp_path)
    assert [p.name for p in (tmp_path / "cache" / "venvs").iterdir() if not p.name.endswith(".lock")] == []


def test_what_a_killed_builder_left_is_cleared_away(recipe: venvs.Recipe, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "venvs" / f".building-role-{recipe.key()}-dead"
    left.mkdir(parents=True)
    build(recipe, tmp_path)
    assert not left.exists()


def test_a_package_that_shadows_the_stack_is_refused(recipe: venvs.Recipe, tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="would shadow packages of the stack: miles-verifiers"):
        build(dataclasses.replace(recipe, forbidden=("miles-verifiers",)), tmp_path)


def test_no_disk_space_is_said_before_anything_is_made(recipe: venvs.Recipe, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="GB are free"):
        build(dataclasses.replace(recipe, disk_bytes=10**18), tmp_path)


def test_a_broken_environment_package_is_the_users_error(recipe: venvs.Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project\n")
    with pytest.raises(EnvironmentPackageError, match="cannot be installed") as caught:
        build(dataclasses.replace(recipe, package=folder), tmp_path)
    assert str(folder) in caught.value.where


def test_names_in_a_lock_and_a_lock_without_some(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(LOCK)
    assert venvs.locked_names(lock) == ["alpha", "beta-two"]
    assert venvs.without(lock, {"beta-two"}) == LOCK.partition("Beta")[0]
    assert venvs.without(lock, {"alpha"}) == "# made by a tool\n" + LOCK[LOCK.index("Beta") :]
