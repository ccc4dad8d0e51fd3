"""`doctor`: every problem has a next step; a drift of the stack is shown."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
from collections import namedtuple
from pathlib import Path

import pytest

from miles_verifiers.errors import CheckFailed, ConfigError
from miles_verifiers.provision import doctor, fingerprint, host
from miles_verifiers.provision.findings import Finding, Findings
from miles_verifiers.provision.stack import Interpreter, probe
from miles_verifiers.record.manifest import Manifest


@pytest.fixture(scope="module")
def stack() -> Interpreter:
    return dataclasses.replace(
        probe(Path(sys.executable)), distributions={"torch": "2.14.1", "ray": "2.60.0", "x": "1"}
    )


def test_every_look_is_there_and_a_failing_one_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILES_VERIFIERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host, "ports", lambda: (_ for _ in ()).throw(OSError("no ports")))
    found = {each.what: each for each in doctor.examine().findings}
    assert list(found) == [
        "python", "profile", "stack", "GPU", "uv", "prime", "disk", "memory", "shared memory", "open files", "ports",
        "caches", "variables",
    ]  # fmt: skip
    assert (found["ports"].found, found["ports"].problem) == ("no ports", "look at the path that it names")
    assert not (tmp_path / "cache").exists()


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("look", "patch", "next_step"),
    [
        (host.disk, ("shutil.disk_usage", lambda _: Usage(1, 1, 10**9)), "free 14 GB (miles-verifiers cache prune)"),
        (host.shared_memory, ("shutil.disk_usage", lambda _: Usage(1, 1, 10**8)), "--shm-size=1g"),
        (host.open_files, ("resource.getrlimit", lambda _: (1024, 4096)), "ulimit -n 4096"),
        (host.memory, ("_cgroup_limit", lambda: 2.0), "the job needs 12 GB"),
        (host.caches, ("os.access", lambda *_: False), "MILES_VERIFIERS_CACHE, UV_CACHE_DIR or HF_HOME"),
        (host.gpu, ("find_gpus", lambda: ["/dev/nvidia0"]), "--gpus all"),
    ],
)
def test_a_problem_has_a_next_step(
    look: object, patch: tuple[str, object], next_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "_DRIVER", Path("/nowhere"))
    monkeypatch.setattr(f"miles_verifiers.provision.host.{patch[0]}", patch[1])
    assert next_step in look().problem


def test_what_is_in_order_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "find_gpus", lambda: ["/dev/nvidia0"])
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")
    monkeypatch.setattr(host, "_DRIVER", tmp_path / "version")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1048576, 1048576))
    assert host.gpu() == Finding("GPU", "/dev/nvidia0; driver 570.86.15")
    assert host.open_files().problem == ""
    assert host.ports().problem == ""


def test_variables_that_redirect_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    assert "left out of every child: PYTHONPATH=/mine" in host.variables().found


def test_a_drift_of_the_stack_is_shown_difference_by_difference(stack: Interpreter, tmp_path: Path) -> None:
    file = tmp_path / "expected.json"
    file.write_text(json.dumps(Findings([], fingerprint.of(stack)).as_dict()))
    fingerprint.check(file, stack)
    other = dataclasses.replace(stack, version=(3, 99, 1), distributions={"torch": "2.3.0", "ray": "2.60.0", "y": "2"})
    with pytest.raises(CheckFailed, match=r"4 difference\(s\)") as caught:
        fingerprint.check(file, other)
    for line in ("torch 2.14.1 -> 2.3.0", "x 1 -> absent", "y absent -> 2", "-> 3.99.1"):
        assert line in caught.value.what
    assert "ray" not in caught.value.what


def test_a_runs_manifest_serves_as_the_record(stack: Interpreter, tmp_path: Path) -> None:
    Manifest.create(tmp_path, profile="cpu", config_hash="", stack=fingerprint.marks(stack))
    file = tmp_path / "manifest.json"
    fingerprint.check(file, dataclasses.replace(stack, executable=Path("/elsewhere/python")))
    with pytest.raises(CheckFailed, match=r"torch 2\.14\.1 -> 2\.3\.0"):
        fingerprint.check(file, dataclasses.replace(stack, distributions={**stack.distributions, "torch": "2.3.0"}))
    with pytest.raises(CheckFailed, match="record all of it"):
        fingerprint.check(file, dataclasses.replace(stack, distributions={**stack.distributions, "x": "2"}))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"stack": {"python": 3}}', '{"stack": null}'])
def test_a_file_without_a_record_is_said(text: str, stack: Interpreter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match="holds no record of a stack"):
        fingerprint.check(tmp_path / "file", stack)
