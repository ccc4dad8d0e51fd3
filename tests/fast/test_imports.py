"""Imports go one way, and the check of it would notice: the contracts of .importlinter, with a broken copy for each."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from miles_verifiers.system import resources

ROOT = resources.root()
CONTRACTS = ROOT / ".importlinter"


def linted(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the package that lies in `folder`, which import-linter puts first on its path."""
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, str(CONTRACTS), "--no-cache", "--no-logo"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_package_keeps_every_contract() -> None:
    result = linted(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


# One forbidden line for each contract; the second form is hidden in a function, where it would only fail late.
VIOLATIONS = {
    "folders": ("config/loading.py", "def later():\n    from miles_verifiers.provision import stack\n"),
    "sglang": ("training/record.py", "import sglang.srt.server_args\n"),
    "megatron": ("training/loop.py", "def later():\n    from megatron.core import parallel_state\n"),
    "verifiers": ("wire/transport.py", "from verifiers.v1 import errors\n"),
    "ray": ("rollout/worker.py", "def later():\n    import ray\n"),
    "torch": ("grpo.py", "import torch\n"),
    "pyarrow": ("verify/run.py", "import pyarrow.parquet\n"),
}


@pytest.mark.parametrize("contract", VIOLATIONS)
def test_a_forbidden_import_is_noticed(contract: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "miles_verifiers", tmp_path / "miles_verifiers", ignore=shutil.ignore_patterns("*.pyc"))
    file, line = VIOLATIONS[contract]
    with (tmp_path / "miles_verifiers" / file).open("a") as module:
        module.write(f"\n\n{line}")
    result = linted(tmp_path)
    broken = [text.split(" BROKEN")[0] for text in result.stdout.splitlines() if " BROKEN" in text]
    assert result.returncode == 1, result.stdout + result.stderr
    assert broken == [_contracts()[contract]]


def test_every_contract_has_a_violation() -> None:
    assert set(_contracts()) == set(VIOLATIONS)


def _contracts() -> dict[str, str]:
    parser = configparser.ConfigParser()
    parser.read(CONTRACTS)
    prefix = "importlinter:contract:"
    return {name.removeprefix(prefix): parser[name]["name"] for name in parser.sections() if name.startswith(prefix)}


def test_leaves_that_every_interpreter_uses_need_nothing_installed() -> None:
    leaves = ["errors", "grpo", "record.metrics", "record.rundir", "record.samples", "statistics", "system.files"]
    leaves += ["system.progress", "system.resources"]
    program = "\n".join(
        [
            "import sys",
            *(f"import miles_verifiers.{leaf}" for leaf in leaves),
            "roots = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names - {'__main__'}",
            "print(*sorted(roots))",
        ]
    )
    # -S: without site-packages, where a .pth file or an installed plug-in may import what it likes.
    result = subprocess.run(
        [sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split() == ["miles_verifiers"]
