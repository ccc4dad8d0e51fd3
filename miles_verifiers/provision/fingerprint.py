"""What a stack is made of, in a form that two machines, or two days, can be compared by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from miles_verifiers.errors import CheckFailed, ConfigError
from miles_verifiers.provision.stack import Interpreter
from miles_verifiers.record.manifest import fingerprint

MARK = "fingerprint"


def of(stack: Interpreter) -> dict[str, Any]:
    """Python's version, every distribution's version, and one hash over both; where it is installed does not count."""
    python = ".".join(map(str, stack.version))
    distributions = dict(sorted(stack.distributions.items()))
    return {"python": python, "distributions": distributions, MARK: fingerprint(python, distributions)[:16]}


def marks(stack: Interpreter) -> dict[str, str]:
    """The short form that a run's manifest keeps: the versions that matter, and the hash."""
    full = of(stack)
    return {**stack.stack_versions, "python": full["python"], MARK: full[MARK]}


def check(file: Path, stack: Interpreter) -> None:
    """Compare with what `doctor --json` or a run's manifest.json recorded.

    Raises CheckFailed, with each difference, where the stack is another one; ConfigError where the file holds no record.
    """
    expected, found = _recorded(file), of(stack)
    if expected.get(MARK) == found[MARK]:
        return
    versions = expected.get("distributions") or {k: v for k, v in expected.items() if k not in ("python", MARK)}
    now = found["distributions"]
    # A manifest names the versions that matter; what it does not name cannot be said to be new.
    names = set(versions) | (set(now) if "distributions" in expected else set())
    lines = [] if expected["python"] == found["python"] else [f"python {expected['python']} -> {found['python']}"]
    lines += [
        f"{name} {versions.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(names)
        if versions.get(name) != now.get(name)
    ]
    raise CheckFailed(
        f"the stack has drifted, {len(lines)} difference(s) (expected -> found):\n  "
        + ("\n  ".join(lines) or "none in what the file names; record all of it with: miles-verifiers doctor --json"),
        where=f"{stack.executable}, expected by {file}",
        next_step="use the image that was recorded, or record this one: miles-verifiers doctor --json > FILE",
    )


def _recorded(file: Path) -> dict[str, Any]:
    try:
        stack = json.loads(file.read_text(encoding="utf-8"))["stack"]
        if not isinstance(stack["python"], str) or not isinstance(stack[MARK], str):
            raise TypeError("python and fingerprint are texts")
        return dict(stack)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"the file holds no record of a stack ({type(error).__name__}: {error})",
            where=str(file),
            next_step="make one: miles-verifiers doctor --json > FILE; a run's manifest.json serves too",
        ) from None
