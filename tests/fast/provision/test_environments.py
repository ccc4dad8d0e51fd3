"""Where an environment's package comes from: the forms, git revisions, Prime's hub. Real git and uv; a prime of our own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from projects import project

from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.provision import environments, hub, venvs
from miles_verifiers.provision.environments import Package, Source, parse
from miles_verifiers.provision.recipes import Recipe
from miles_verifiers.provision.stack import probe


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("math-env==0.1.2", Source("registry", "math-env", "0.1.2")),
        ("pypi:math-env==0.1.2", Source("registry", "math-env", "0.1.2")),
        ("primeintellect/gsm8k", Source("hub", "primeintellect/gsm8k")),
        ("primeintellect/gsm8k@0.1.3", Source("hub", "primeintellect/gsm8k", "0.1.3")),
        ("git+https://host/r.git@v1", Source("git", "https://host/r.git", "v1")),
        ("git+ssh://git@host/r.git@a/b", Source("git", "ssh://git@host/r.git", "a/b")),
        ("git+file:///r@v1#subdirectory=envs/x", Source("git", "file:///r", "v1", "envs/x")),
    ],
)
def test_the_forms_of_a_source(text: str, source: Source) -> None:
    assert parse(text) == source


def test_a_folder_is_found_in_the_project_and_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project(tmp_path / "some" / "env", "env")
    monkeypatch.chdir(tmp_path)
    for text in (str(folder), "./some/env", f"path:{folder}", "some/env"):
        assert parse(text) == Source("folder", str(folder))
    assert parse("environments/code_golf_v1").kind == "folder"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("git+https://host/r.git", "a revision is needed"),
        ("git+nowhere", "no git source"),
        ("environments/missing", "environments/code_golf_v1"),
        ("./missing", "no pyproject.toml"),
        ("a/b/c", "OWNER/NAME"),
        ("name==", "NAME==VERSION"),
        ("", "NAME==VERSION"),
    ],
)
def test_what_is_no_source_is_said_with_the_forms(text: str, says: str) -> None:
    with pytest.raises(EnvironmentPackageError) as caught:
        parse(text)
    assert says in str(caught.value)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a project in `envs/x`, tagged v1 (annotated)."""
    folder = tmp_path / "repository"
    project(folder / "envs" / "x", "git-env", code="value = 1\n")
    git(folder, "init", "-q", "-b", "main")
    commit(folder, "first")
    git(folder, "tag", "-a", "v1", "-m", "v1")
    return folder


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)


def resolve(source: str, tmp_path: Path, *, offline: bool = False) -> Package:
    return environments.resolve(
        EnvironmentSection(source=source), tmp_path / "cache", log=tmp_path / "log", offline=offline
    )


@pytest.mark.parametrize("revision", ["v1", "main", "HEAD"])
def test_a_git_revision_becomes_the_commit_that_it_names_now(repository: Path, tmp_path: Path, revision: str) -> None:
    source = f"git+file://{repository}@{revision}#subdirectory=envs/x"
    first = resolve(source, tmp_path)
    assert first.requirement == f"git+file://{repository}@{git(repository, 'rev-parse', 'HEAD')}#subdirectory=envs/x"
    (repository / "envs" / "x" / "git_env.py").write_text("value = 2\n")
    commit(repository, "second")
    moved = resolve(source, tmp_path)
    assert (moved.key != first.key) is (revision != "v1"), "a branch moves on, a tag does not"
    repository.rename(repository.with_name("gone"))
    assert resolve(source, tmp_path, offline=True) == moved, "offline: what it named when it was looked up last"


def test_a_revision_that_is_not_there(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentPackageError, match="no tag or branch 'v9'"):
        resolve(f"git+file://{repository}@v9", tmp_path)
    with pytest.raises(EnvironmentPackageError, match="cannot be reached"):
        resolve(f"git+file://{tmp_path}/nowhere@v1", tmp_path)
    with pytest.raises(EnvironmentPackageError, match="offline, and the revision v1 was never looked up"):
        resolve(f"git+file://{repository}@v1", tmp_path, offline=True)


def test_only_a_folder_is_editable(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentPackageError, match="only a folder can be editable"):
        environments.resolve(
            EnvironmentSection(source="x==1", editable=True), tmp_path, log=tmp_path / "log", offline=True
        )


def test_a_package_is_installed_from_git(repository: Path, tmp_path: Path) -> None:
    here = probe(Path(sys.executable))
    package = resolve(f"git+file://{repository}@v1#subdirectory=envs/x", tmp_path)
    venv = venvs.ensure(
        Recipe("role", here, below=here, package=package), tmp_path / "cache", log=tmp_path / "log", offline=False
    )
    assert hub.version_in(venv, "git-env") == "0.1.0"


PRIME = """\
#!{python}
# A prime command that behaves as the real one where that matters here: it installs with the uv on PATH, where
# VIRTUAL_ENV says, and its exit code is 0 whatever happened.
import os, subprocess, sys
print("prime", *sys.argv[1:])
assert sys.argv[1:3] == ["env", "install"], sys.argv
name = sys.argv[3].partition("/")[2].partition("@")[0]
print("excluding", open(os.environ["UV_EXCLUDE"]).read().split(), "in", os.getcwd())
python = os.path.join(os.environ["VIRTUAL_ENV"], "bin", "python")
subprocess.run(["uv", "pip", "install", "--offline", "--python", python, os.path.join({hub!r}, name)])
"""


@pytest.fixture
def prime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prime command in uv's tool folder, and the folder of projects that it takes for its hub."""
    tools, projects = tmp_path / "tools", tmp_path / "hub"
    tools.mkdir()
    monkeypatch.setenv("UV_TOOL_BIN_DIR", str(tools))
    (tools / "prime").write_text(PRIME.format(python=sys.executable, hub=str(projects)))
    (tools / "prime").chmod(0o755)
    return projects


def from_hub(name: str, tmp_path: Path, *, offline: bool = False) -> Path:
    here = probe(Path(sys.executable))
    recipe = Recipe("role", here, below=here, package=resolve(name, tmp_path), protected=("psutil",))
    return venvs.ensure(recipe, tmp_path / "cache", log=tmp_path / "log", offline=offline)


def test_a_package_is_installed_from_the_hub_into_its_venv(
    prime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(prime / "good-env", "good-env", "psutil")
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere/else")
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", "/somewhere/else")
    venv = from_hub("someone/good-env@0.1.0", tmp_path)
    assert hub.version_in(venv, "good-env") == "0.1.0"
    assert hub.version_in(venv, "psutil") is None
    assert "prime env install someone/good-env@0.1.0" in (tmp_path / "log").read_text()


def test_primes_exit_code_is_not_believed(prime: Path, tmp_path: Path) -> None:
    (project(prime / "bad-env", "bad-env") / "pyproject.toml").write_text("[project\n")
    with pytest.raises(EnvironmentPackageError, match="prime did not install bad-env") as caught:
        from_hub("someone/bad-env", tmp_path)
    for part in ("bin/python", "prime env install someone/bad-env", "pyproject.toml", str(tmp_path / "log")):
        assert part in str(caught.value)
    assert not list((tmp_path / "cache" / "venvs").glob("role-*"))


def test_without_prime_or_network_the_next_step_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_TOOL_BIN_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(hub.shutil, "which", lambda _: None)
    with pytest.raises(EnvironmentPackageError, match="no prime command") as caught:
        from_hub("someone/good-env", tmp_path)
    assert "uv tool install 'prime==0.6.19'" in caught.value.next_step
    with pytest.raises(EnvironmentPackageError, match="offline, and someone/good-env"):
        from_hub("someone/good-env", tmp_path, offline=True)
