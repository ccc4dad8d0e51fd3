"""What both code golf packages have, they have in common, and under their own names."""

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

SHARED = ("confine", "jail", "kernel", "sandbox", "scoring", "tasks")
HERE = Path(__file__).resolve().parent.parent / "code_golf"
THERE = HERE.parent.parent / "code_golf_v1" / "code_golf_v1"


@pytest.mark.parametrize("name", SHARED)
def test_the_file_is_the_same(name):
    assert (HERE / f"{name}.py").read_bytes() == (THERE / f"{name}.py").read_bytes()


def test_nothing_else_is_shared():
    """Control: the taskset of one API is not that of the other."""
    assert (HERE / "taskset.py").read_bytes() != (THERE / "taskset.py").read_bytes()


@pytest.mark.parametrize("name", SHARED)
def test_the_module_is_this_packages_own(name):
    module = import_module(f"code_golf.{name}")
    assert module.__package__ == "code_golf"


def test_a_program_is_run_by_this_packages_supervisor():
    sandbox = import_module("code_golf.sandbox")
    assert "from code_golf.confine" in sandbox._BOOT
    assert Path(sandbox._PACKAGES) == HERE.parent
    outcome = asyncio.run(sandbox.run_confined("print(6 * 7)", features=()))
    assert (outcome.ending, outcome.stdout) == ("exit", "42\n")
