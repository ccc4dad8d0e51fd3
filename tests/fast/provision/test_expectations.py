"""The preflight's table: every way in which a worker can be elsewhere than it should is a row that does not hold."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from miles_verifiers.errors import ComponentError
from miles_verifiers.provision import expectations
from miles_verifiers.provision.expectations import Expected

EXPECTED = Expected(
    "env",
    Path("/cache/venvs/env-1/bin/python"),
    {"torch": "2.14.1", "verifiers": "0.4.0"},
    frozenset({"verifiers", "openai"}),
    below=(Path("/stack/lib/python3.11/site-packages"),),
)
SEEN: dict[str, Any] = {
    "executable": "/cache/venvs/env-1/bin/python",
    "sys_path": [
        "",
        "/usr/lib/python3.11",
        "/cache/venvs/env-1/lib/python3.11/site-packages",
        "/stack/lib/python3.11/site-packages",
    ],
    "stdlib": ["/usr/lib/python3.11"],
    "packages": {
        "torch": {"version": "2.14.1", "origin": "/stack/lib/python3.11/site-packages/torch/__init__.py"},
        "verifiers": {"version": "0.4.0", "origin": "/cache/venvs/env-1/lib/python3.11/site-packages/verifiers/__init__.py"},
        "openai": {"version": "2.54.0", "origin": "/cache/venvs/env-1/lib/python3.11/site-packages/openai/__init__.py"},
    },
}  # fmt: skip


def test_what_is_as_expected_passes() -> None:
    rows = expectations.compare(EXPECTED, SEEN)
    assert [row.what for row in rows] == ["interpreter", "import path", "openai", "torch", "verifiers"]
    expectations.refuse(rows)


@pytest.mark.parametrize(
    ("path", "value", "row", "says"),
    [
        (("executable",), "/usr/bin/python3", "interpreter", "/usr"),
        (("sys_path", 0), "/home/me/code", "import path", "/home/me/code"),
        (("packages", "torch", "version"), "2.3.0", "torch", "2.3.0 in /stack/lib/python3.11/site-packages"),
        (("packages", "torch", "origin"), "/cache/venvs/env-1/lib/python3.11/site-packages/torch/__init__.py", "torch", "env-1"),
        (("packages", "openai", "origin"), "/stack/lib/python3.11/site-packages/openai/__init__.py", "openai", "/stack"),
        (("packages", "verifiers", "version"), "0.2.0", "verifiers", "0.2.0"),
    ],
)  # fmt: skip
def test_what_is_elsewhere_is_one_row_with_expected_and_found(
    path: tuple[str | int, ...], value: str, row: str, says: str
) -> None:
    seen = copy.deepcopy(SEEN)
    place: Any = seen
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    rows = expectations.compare(EXPECTED, seen)
    assert [each.what for each in rows if not each.ok] == [row]
    with pytest.raises(ComponentError, match="1 of 5 facts") as caught:
        expectations.refuse(rows)
    assert says in str(caught.value)
    for word in ("role", "expected", "found"):
        assert word in str(caught.value)


def test_what_is_expected_crosses_to_another_interpreter_as_a_file(tmp_path: Path) -> None:
    expectations.write(tmp_path / "expected.json", [EXPECTED])
    assert expectations.read(tmp_path / "expected.json") == {"env": EXPECTED}


def test_an_environment_may_hold_what_it_was_allowed_to() -> None:
    seen = copy.deepcopy(SEEN)
    seen["packages"]["torch"]["origin"] = "/cache/venvs/env-1/lib/python3.11/site-packages/torch/__init__.py"
    allowed = Expected("env", EXPECTED.python, EXPECTED.versions, EXPECTED.own | {"torch"}, EXPECTED.below)
    expectations.refuse(expectations.compare(allowed, seen))


def test_a_checkout_in_front_is_part_of_the_stack() -> None:
    seen = copy.deepcopy(SEEN)
    seen["sys_path"].insert(0, "/opt/Megatron-LM")
    seen["packages"]["torch"]["origin"] = "/opt/Megatron-LM/torch/__init__.py"
    first = Expected(
        "stack", EXPECTED.python, EXPECTED.versions, EXPECTED.own, EXPECTED.below, (Path("/opt/Megatron-LM"),)
    )
    expectations.refuse(expectations.compare(first, seen))
