"""What a worker should see, what it does see, and the table of both. Pure.

What was asked of Ray proves nothing: a variable, Ray's own rewriting of PYTHONPATH, `uv run`'s propagation or a stray .pth
file can put a worker elsewhere. So each worker says which interpreter it is, what its import path holds, and where the
packages that matter come from; each of these is a row here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_verifiers.errors import ComponentError
from miles_verifiers.system.files import write_text


@dataclass(frozen=True, slots=True)
class Row:
    """One fact about one role; `expected` empty: shown, not checked."""

    role: str
    what: str
    expected: str
    found: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Expected:
    """What the worker of a role should see."""

    role: str
    python: Path
    """The venv's interpreter."""
    versions: Mapping[str, str]
    """Version by distribution."""
    own: frozenset[str]
    """Distributions that must come from the venv itself; all others of `versions` must come from `below` or `first`."""
    below: tuple[Path, ...]
    """Site-packages that the venv lies over."""
    first: tuple[Path, ...] = ()
    """Folders in front of everything."""


def write(file: Path, roles: Sequence[Expected]) -> None:
    """For the preflight, which runs in another interpreter."""
    write_text(file, json.dumps([_plain(each) for each in roles], indent=1) + "\n")


def read(file: Path) -> dict[str, Expected]:
    """What `write` wrote, by role."""
    roles = [
        Expected(
            role=each["role"],
            python=Path(each["python"]),
            versions=each["versions"],
            own=frozenset(each["own"]),
            below=tuple(map(Path, each["below"])),
            first=tuple(map(Path, each["first"])),
        )
        for each in json.loads(file.read_text(encoding="utf-8"))
    ]
    return {each.role: each for each in roles}


def compare(expected: Expected, seen: Mapping[str, Any]) -> list[Row]:
    """Rows for what a worker saw: `executable`, `sys_path`, `stdlib`, and `packages` {name: {version, origin}}."""
    role, venv = expected.role, expected.python.parent.parent.resolve()
    # Of the venv's folder, not of the file: all venvs' Pythons are links to the same one.
    found_venv = Path(seen["executable"]).parent.parent.resolve()
    rows = [Row(role, "interpreter", str(venv), str(found_venv), found_venv == venv)]
    known = [venv, *expected.below, *expected.first, *map(Path, seen["stdlib"])]
    strays = [entry for entry in seen["sys_path"] if entry and not _within(entry, known)]
    rows.append(Row(role, "import path", "only venv, stack, Ray", ", ".join(strays) or "only those", not strays))
    for name, package in sorted(seen["packages"].items()):
        version, origin = package["version"], package["origin"]
        wanted = expected.versions.get(name, "")
        if name in expected.own:
            place, folders = "the venv", [venv]
        else:
            place, folders = "the stack", [*expected.first, *expected.below]
        # A checkout in front has no metadata of its own: the version found is that of the stack's copy behind it.
        fits = (not wanted or version == wanted) and _within(origin, folders)
        rows.append(Row(role, name, f"{wanted} of {place}".strip(), f"{version} in {_folder(origin)}", fits))
    return rows


def refuse(rows: Sequence[Row]) -> None:
    """Raises ComponentError, with the rows that do not hold, where there are any."""
    bad = [row for row in rows if not row.ok]
    if bad:
        raise ComponentError(
            f"preflight: {len(bad)} of {len(rows)} facts about the workers are not as expected\n" + as_text(bad),
            where="seen from inside Ray workers",
            next_step="look for what redirects Python (PYTHONHOME, .pth files, a runtime_env of the cluster); "
            "miles-verifiers cache prune --all makes the venvs anew",
        )


def as_text(rows: Iterable[Row]) -> str:
    """The table, one line per row."""
    lines = [("role", "what", "expected", "found")] + [(row.role, row.what, row.expected, row.found) for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _plain(expected: Expected) -> dict[str, Any]:
    return {
        "role": expected.role,
        "python": str(expected.python),
        "versions": dict(expected.versions),
        "own": sorted(expected.own),
        "below": [str(path) for path in expected.below],
        "first": [str(path) for path in expected.first],
    }


def _within(path: str, folders: Iterable[Path]) -> bool:
    place = Path(path)
    # Both spellings: a venv of the cache is reached through the run directory's link.
    return any(place.is_relative_to(folder) or place.resolve().is_relative_to(folder.resolve()) for folder in folders)


def _folder(origin: str) -> str:
    """The site-packages folder of a file, or the file's own."""
    head, separator, _ = origin.partition("/site-packages/")
    return head + "/site-packages" if separator else str(Path(origin).parent)
