"""The whole job on a stand-in for a frozen image: a Python whose own site-packages hold the stack, externally managed, read-only.

Run with `nox -s frozen`. Before and after, a hash over every file of it is equal. The tiny model keeps it short.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet
import pytest
from projects import project

from miles_verifiers.provision.roles import Roles
from miles_verifiers.provision.stack import STACK_PYTHON_VARIABLE, probe
from miles_verifiers.record.manifest import Manifest
from miles_verifiers.record.rundir import cache_root
from miles_verifiers.system.files import sha256

SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "COMPANY_LOGIN")
CONFIG = """
model.source = "tiny:qwen3"
verify.min_passed = 0
training.num_steps = 1

[rollout]
rollout_batch_size = 4
rollout_max_response_len = 32
eval_interval = 1

[environment]
source = "{spy}"
verifiers = "0.2.1"
taskset = {{ id = "spy-env" }}
pass_variables = ["JUDGE_KEY"]
eval_tasks = 1
n_samples_per_eval_prompt = 2

[[environments]]
source = "environments/code_golf"
verifiers = "0.4.0"
taskset = {{ id = "code-golf" }}
eval_tasks = 1
n_samples_per_eval_prompt = 2
"""
"""Two environments that no one interpreter can hold: Verifiers 0.2.1 with mcp < 2, and 0.4.0 with mcp == 2.0.0."""
READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in's folder."""
    root = tmp_path_factory.mktemp("image")
    stack = Roles(0, cache_root(), log=root.parent / "image.log").base()
    base = Path(probe(stack.executable.resolve()).prefix)
    name = f"python{stack.version[0]}.{stack.version[1]}"
    lib = root / "lib" / name
    link(base / "lib" / name, lib, skip=("site-packages", "test", "__pycache__"))
    link(stack.site_packages[0], lib / "site-packages", skip=("_virtualenv.py", "_virtualenv.pth"))
    (root / "bin").mkdir()
    shutil.copy2(stack.executable.resolve(), root / "bin" / name)
    (lib / "EXTERNALLY-MANAGED").write_text("[externally-managed]\nError=this image is frozen\n")
    for folder in (root, *(path for path in root.rglob("*") if path.is_dir())):
        folder.chmod(0o555)
    return root


def link(source: Path, target: Path, *, skip: tuple[str, ...]) -> None:
    """A copy that shares its files where the disk allows it: the stack has 6 GB."""

    def one(old: str, new: str) -> None:
        try:
            os.link(old, new)
        except OSError:
            shutil.copy2(old, new)

    shutil.copytree(source, target, copy_function=one, ignore=shutil.ignore_patterns(*skip), symlinks=True)


def fingerprint(root: Path) -> tuple[int, str]:
    """Number of files, and a hash over their names, kinds, permissions and contents."""
    digest, count = hashlib.sha256(), 0
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = sha256(path) if stat.S_ISREG(status.st_mode) else ""
        digest.update(f"{path.relative_to(root)} {status.st_mode} {content}\n".encode())
        count += 1
    return count, digest.hexdigest()


def read_only(image: Path) -> list[str]:
    """What makes the image's files unwritable for a command, root's included; where that is not allowed, permissions must do."""
    wrapper = ["unshare", "--mount", "sh", "-c", READ_ONLY, "sh", str(image)]
    allowed = subprocess.run([*wrapper, "true"], capture_output=True, timeout=30, check=False).returncode == 0
    return wrapper if allowed else []


@pytest.mark.timeout(1500)
def test_the_whole_job_runs_on_it_and_leaves_no_trace_in_it(image: Path, tmp_path: Path) -> None:
    spy = project(
        tmp_path / "spy", "spy-env", "verifiers==0.2.1", code=(Path(__file__).parent / "spy_env.py").read_text()
    )
    (tmp_path / "config.toml").write_text(CONFIG.format(spy=spy))
    before = fingerprint(image)
    (python,) = (image / "bin").iterdir()
    env = {
        **os.environ,
        **dict.fromkeys(SECRETS, "secret"),
        "JUDGE_KEY": "given",
        STACK_PYTHON_VARIABLE: str(python),
        "MILES_VERIFIERS_CACHE": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-P", "-m", "miles_verifiers", "e2e", "--profile", "cpu"]
    options = ["--run-dir", str(tmp_path / "run"), "--config", str(tmp_path / "config.toml")]
    done = subprocess.run(
        [*read_only(image), *command, *options], env=env, capture_output=True, text=True, timeout=1300, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert fingerprint(image) == before
    assert not list((tmp_path / "cache" / "venvs").glob("stack-cpu-*")), "no second stack was built"
    check_facts(Manifest.load(tmp_path / "run").phases["prepare"].figures["preflight"]["facts"], image)
    check_rollouts(tmp_path / "run")


def check_facts(rows: list[dict[str, str]], image: Path) -> None:
    """The preflight's table shows different versions side by side, each from its own place."""
    found = {(row["role"], row["what"]): row["found"] for row in rows}
    site_packages = str(next((image / "lib").iterdir()) / "site-packages")
    for package in ("torch", "sglang", "megatron-core", "ray", "transformers", "openai"):
        assert found["stack", package].endswith(site_packages), "it is the image's"
    versions = {role: found[role, "openai"].split()[0] for role in ("stack", "env", "env-1")}
    assert versions["stack"] != versions["env"]
    assert "/run/venvs/env/" in found["env", "openai"]
    assert (found["env", "verifiers"].split()[0], found["env-1", "verifiers"].split()[0]) == ("0.2.1", "0.4.0")
    assert found["env", "renderers"].split()[0] != found["env-1", "renderers"].split()[0]


def check_rollouts(run: Path) -> None:
    """Both environments were trained on and evaluated; no program of a rollout saw a secret, or more than was passed."""
    rows = [
        row for file in sorted(run.glob("dump/*/*.parquet")) for row in pyarrow.parquet.read_table(file).to_pylist()
    ]
    assert {row["environment"] for row in rows} == {"spy-env", "code-golf"}
    assert {
        row["environment"] for row in pyarrow.parquet.read_table(run / "dump" / "eval" / "000000.parquet").to_pylist()
    } == {
        "spy-env",
        "code-golf",
    }
    metrics = [dict(row["metrics"]) for row in rows if row["environment"] == "spy-env"]
    assert metrics
    for seen in metrics:
        assert (seen["secrets"], seen["judge"]) == (0.0, 1.0)
        assert seen["variables"] > 3, "the control: there is an environment to look at"


def test_the_stand_in_is_what_it_stands_for(image: Path) -> None:
    (python,) = (image / "bin").iterdir()
    found = probe(python)
    assert found.externally_managed
    assert not found.missing
    assert not found.is_venv
    refused = subprocess.run(
        [python, "-m", "pip", "install", "--no-index", "x"], capture_output=True, text=True, timeout=60, check=False
    )
    assert "externally-managed-environment" in refused.stderr or "No module named pip" in refused.stderr
    before = fingerprint(image / "bin")
    assert before != fingerprint(image / "lib" / python.name / "json"), "the control: the hash tells folders apart"
    doctor = subprocess.run(
        [sys.executable, "-P", "-m", "miles_verifiers", "doctor", "--json"],
        env={**os.environ, STACK_PYTHON_VARIABLE: str(python)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    found_by_doctor = {each["what"]: each["found"] for each in json.loads(doctor.stdout)["findings"]}
    assert "externally managed" in found_by_doctor["python"]
    assert f"the image's, {image}" in found_by_doctor["stack"]
