"""Venvs over an interpreter: real uv, real interpreters, nothing fetched."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from projects import project

from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.errors import EnvironmentPackageError, HostError
from miles_verifiers.provision import venvs
from miles_verifiers.provision.environments import Package, resolve
from miles_verifiers.provision.recipes import Recipe, locked_versions, without
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
def recipe(here: Interpreter) -> Recipe:
    return Recipe("role", here, below=here)


def build(recipe: Recipe, tmp_path: Path) -> Path:
    return venvs.ensure(recipe, tmp_path / "cache", log=tmp_path / "log", offline=True)


def package_of(folder: Path, tmp_path: Path, *, editable: bool = False) -> Package:
    section = EnvironmentSection(source=str(folder), editable=editable)
    return resolve(section, tmp_path / "cache", log=tmp_path / "log", offline=True)


def evaluate(venv: Path, expression: str) -> str:
    code = f"import sys, miles_verifiers, psutil; print({expression})"
    done = subprocess.run(
        [venvs.python_of(venv), "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_a_venv_holds_this_package_and_sees_what_lies_below(recipe: Recipe, here: Interpreter, tmp_path: Path) -> None:
    venv = build(recipe, tmp_path)
    assert Path(evaluate(venv, "miles_verifiers.__file__")).is_relative_to(venv)
    assert Path(evaluate(venv, "psutil.__file__")).is_relative_to(here.prefix)
    assert Path(evaluate(venv, "sys.prefix")) == venv


def test_the_entry_point_that_sglang_looks_for_is_found_in_it(recipe: Recipe, tmp_path: Path) -> None:
    found = evaluate(
        build(recipe, tmp_path),
        "[e.value for e in __import__('importlib.metadata').metadata.entry_points(group='sglang.srt.platforms')][0]",
    )
    assert found == "miles_verifiers.engine.platform:activate"


def test_a_venv_is_built_once_and_found_again(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build(recipe, tmp_path)
    monkeypatch.setattr(venvs, "_build", lambda *_: pytest.fail("built twice"))
    assert build(recipe, tmp_path) == first


def test_two_at_once_build_one(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    real = venvs._build

    def counting(recipe: Recipe, target: Path, log: Path, offline: bool) -> None:
        built.append(target)
        real(recipe, target, log, offline)

    monkeypatch.setattr(venvs, "_build", counting)
    threads = [threading.Thread(target=build, args=(recipe, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(built) == 1


@pytest.mark.parametrize("change", ["lock", "package", "role", "protected", "exclude", "allow_shadow", "first"])
def test_a_changed_recipe_has_another_key(recipe: Recipe, tmp_path: Path, change: str) -> None:
    lock, folder = tmp_path / "lock.txt", project(tmp_path / "package", "x")
    lock.write_text("a==1\n")
    full = dataclasses.replace(recipe, locks=(lock,), package=package_of(folder, tmp_path))
    before = full.key()
    assert full.key() == before
    if change == "lock":
        lock.write_text("a==2\n")
    elif change == "package":
        (folder / "x.py").write_text("changed = True\n")
        full = dataclasses.replace(full, package=package_of(folder, tmp_path))
    elif change == "role":
        full = dataclasses.replace(full, role="other")
    else:
        value = (tmp_path,) if change == "first" else ("torch",)
        full = dataclasses.replace(full, **{change: value})
    assert full.key() != before


def test_a_killed_build_leaves_nothing_that_looks_finished(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(venvs, "_copy_ourselves", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(recipe, tmp_path)
    assert [p.name for p in (tmp_path / "cache" / "venvs").iterdir() if not p.name.endswith(".lock")] == []


def test_what_a_killed_builder_left_is_cleared_away(recipe: Recipe, tmp_path: Path) -> None:
    left = tmp_path / "cache" / "venvs" / f".building-role-{recipe.key()}-dead"
    left.mkdir(parents=True)
    build(recipe, tmp_path)
    assert not left.exists()


def test_a_package_that_shadows_the_stack_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentPackageError, match="would shadow packages of the stack: miles-verifiers") as caught:
        build(dataclasses.replace(recipe, protected=("miles-verifiers",)), tmp_path)
    assert str(recipe.python.executable) in caught.value.where
    build(dataclasses.replace(recipe, protected=("miles-verifiers",), allow_shadow=("miles-verifiers",)), tmp_path)


def test_a_version_that_the_stack_does_not_have_is_refused_with_who_asks_for_it(
    recipe: Recipe, here: Interpreter, tmp_path: Path
) -> None:
    folder = project(tmp_path / "package", "picky-env", "psutil<1", "pluggy")
    picky = dataclasses.replace(recipe, package=package_of(folder, tmp_path), protected=("psutil", "pluggy"))
    with pytest.raises(EnvironmentPackageError, match="needs other versions than the stack has: psutil") as caught:
        build(picky, tmp_path)
    text = str(caught.value)
    assert f"the stack has {here.distributions['psutil']}; required by picky-env: psutil<1" in text
    assert "pluggy" not in text
    assert 'environment.exclude = ["psutil"]' in text
    assert 'environment.allow_shadow = ["psutil"]' in text
    assert not any((tmp_path / "cache" / "venvs").glob("role-*"))
    venv = build(dataclasses.replace(picky, exclude=("psutil",)), tmp_path)
    assert Path(evaluate(venv, "psutil.__file__")).is_relative_to(here.prefix)


def test_an_editable_package_is_read_where_it_is(recipe: Recipe, tmp_path: Path) -> None:
    folder = project(tmp_path / "package", "own-env", code="value = 1\n")
    copied = dataclasses.replace(recipe, package=package_of(folder, tmp_path))
    editable = dataclasses.replace(recipe, package=package_of(folder, tmp_path, editable=True))
    key = editable.key()
    first, linked = build(copied, tmp_path), build(editable, tmp_path)
    (folder / "own_env.py").write_text("value = 2\n")
    assert evaluate(first, "__import__('own_env').value") == "1"
    assert evaluate(linked, "__import__('own_env').value") == "2"
    assert dataclasses.replace(recipe, package=package_of(folder, tmp_path, editable=True)).key() == key
    # Not the wheel that uv built before and keeps: only the module changed, its version and pyproject.toml did not.
    again = build(dataclasses.replace(recipe, package=package_of(folder, tmp_path)), tmp_path)
    assert again != first
    assert evaluate(again, "__import__('own_env').value") == "2"


def test_a_package_cannot_move_verifiers_away_from_its_lock(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("verifiers==0.2.0\n")
    monkeypatch.setattr(venvs, "install_locks", lambda *_: None)
    folder = project(tmp_path / "package", "new-env", "verifiers>=0.3")
    with pytest.raises(EnvironmentPackageError, match=r"verifiers==0\.2\.0") as caught:
        build(dataclasses.replace(recipe, locks=(lock,), package=package_of(folder, tmp_path)), tmp_path)
    for part in ("new-env", "uv", "pip install", str(folder)):
        assert part in str(caught.value)


def test_what_is_put_first_comes_before_everything_else(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "psutil.py").write_text("mine = True\n")
    venv = build(dataclasses.replace(recipe, first=(tmp_path / "first",)), tmp_path)
    assert evaluate(venv, "psutil.mine") == "True"


def test_no_disk_space_is_said_before_anything_is_made(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(HostError, match="GB are free"):
        build(dataclasses.replace(recipe, disk_bytes=10**18), tmp_path)


def test_a_broken_environment_package_is_the_users_error(recipe: Recipe, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project\n")
    with pytest.raises(EnvironmentPackageError, match="cannot be installed") as caught:
        build(dataclasses.replace(recipe, package=package_of(folder, tmp_path)), tmp_path)
    assert str(folder) in caught.value.where


def test_names_in_a_lock_and_a_lock_without_some(tmp_path: Path) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text(LOCK)
    assert locked_versions(lock) == {"alpha": "1.0", "beta-two": "2.0"}
    assert without(lock, {"beta-two"}) == LOCK.partition("Beta")[0]
    assert without(lock, {"alpha"}) == "# made by a tool\n" + LOCK[LOCK.index("Beta") :]
