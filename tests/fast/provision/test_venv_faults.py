"""What goes wrong while a venv is made: real processes, real uv, nothing from outside."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from projects import project

from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.errors import EnvironmentPackageError, HostError, InstallError
from miles_verifiers.provision import environments, roles, stack, venvs
from miles_verifiers.provision.recipes import Recipe
from miles_verifiers.provision.stack import Interpreter, probe
from miles_verifiers.system.files import sha256

BUILDER = """
import sys
from pathlib import Path
from miles_verifiers.system import progress
from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.provision import environments, venvs
from miles_verifiers.provision.recipes import Recipe
from miles_verifiers.provision.stack import probe

source, folder = sys.argv[1], Path(sys.argv[2])
here = probe(Path(sys.executable))
package = environments.resolve(EnvironmentSection(source=source), folder, log=folder / "log", offline=True)
print(venvs.ensure(Recipe("role", here, below=here, package=package), folder, log=folder / "log", offline=True))
"""
SLOW = """
import time
from pathlib import Path
if not Path({quick!r}).exists():
    Path({building!r}).touch()
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def here() -> Interpreter:
    return probe(Path(sys.executable))


def builder(source: Path, cache: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", BUILDER, str(source), str(cache)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finished(cache: Path) -> list[str]:
    return [path.name for path in (cache / "venvs").glob("role-*")]


def wait_until(condition: object, timeout: float = 30) -> None:
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_build_that_was_killed_is_made_anew_and_never_taken_for_finished(tmp_path: Path) -> None:
    folder = project(tmp_path / "package", "slow-env")
    backend = folder / "one_module_backend.py"
    quick, building = tmp_path / "quick", tmp_path / "building"  # outside of the package, whose contents are its key
    backend.write_text(backend.read_text() + SLOW.format(quick=str(quick), building=str(building)))
    with builder(folder, tmp_path) as first:
        wait_until(building.exists)
        below = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=10)
    assert list((tmp_path / "venvs").glob(".building-role-*")), "the control: it was in the middle"
    assert finished(tmp_path) == []
    for left in below:  # uv and its build backend; the kernel ends them where the parent died that way, too
        if left.is_running():
            left.kill()
    quick.touch()
    with builder(folder, tmp_path) as second:
        out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert finished(tmp_path) == [Path(out.strip()).name]


def test_two_processes_at_once_build_one(tmp_path: Path) -> None:
    folder = project(tmp_path / "package", "quiet-env")
    with builder(folder, tmp_path) as one, builder(folder, tmp_path) as two:
        outputs = [each.communicate(timeout=60) for each in (one, two)]
    assert [one.returncode, two.returncode] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum(text.count("venv role: uv venv") for _, text in outputs) == 1


def test_a_wheel_that_is_not_what_the_lock_names_is_refused(
    here: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, wheels = project(tmp_path / "package", "locked"), tmp_path / "wheels"
    wheels.mkdir()
    code = f"import one_module_backend; one_module_backend.build_wheel({str(wheels)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, timeout=30)
    (wheel,) = wheels.iterdir()
    lock = tmp_path / "lock.txt"
    lock.write_text(f"locked==0.1.0 \\\n    --hash=sha256:{sha256(wheel)}\n")
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    recipe = Recipe("role", here, below=here, locks=(lock,))
    good = venvs.ensure(recipe, tmp_path / "good", log=tmp_path / "log")
    assert next(good.glob("lib/python*/site-packages/locked.py"))
    wheel.write_bytes(wheel.read_bytes() + b"x")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))  # the machine's holds the good one by now
    with pytest.raises(InstallError, match="failed with exit code") as caught:
        venvs.ensure(recipe, tmp_path / "bad", log=tmp_path / "log")
    assert "locked" in str(caught.value)
    assert finished(tmp_path / "bad") == []


def test_an_index_that_cannot_be_reached_is_named(
    here: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    folder = project(tmp_path / "package", "needy-env", "a-dependency-that-is-nowhere")
    package = environments.resolve(EnvironmentSection(source=str(folder)), tmp_path, log=tmp_path / "log")
    recipe = Recipe("role", here, below=here, package=package)
    with pytest.raises(EnvironmentPackageError) as caught:
        venvs.ensure(recipe, tmp_path / "cache", log=tmp_path / "log")
    for part in (str(folder), "127.0.0.1:9", "uv"):
        assert part in str(caught.value)
    with pytest.raises(EnvironmentPackageError, match="a-dependency-that-is-nowhere") as caught:
        venvs.ensure(recipe, tmp_path / "cache", log=tmp_path / "log", offline=True)
    assert "without --offline" in caught.value.next_step


def test_a_python_that_is_none_or_too_old_is_the_users_to_change(
    here: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = roles.Roles(0, tmp_path, log=tmp_path / "log", offline=True)
    monkeypatch.setenv(stack.STACK_PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(HostError, match="no such Python interpreter") as caught:
        made.base()
    assert stack.STACK_PYTHON_VARIABLE in str(caught.value)
    monkeypatch.setattr(roles, "probe", lambda _: dataclasses.replace(here, version=(3, 10, 4)))
    monkeypatch.setenv(stack.STACK_PYTHON_VARIABLE, sys.executable)
    with pytest.raises(HostError, match=r"Python 3\.10\.4"):
        made.base()
    assert list(tmp_path.iterdir()) == [], "nothing was made"
