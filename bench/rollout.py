"""What an episode costs besides the model: CPU, episodes per second and memory, inline harness against Verifiers' null harness.

Code golf without running programs, groups of 8, an engine in a process of its own that answers at once. Every measurement is
a process of its own; its CPU counts together with that of the harness's programs. Runs in an environment's interpreter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

GOAL = 100.0
"""Times the CPU of an inline episode that the null harness takes, at least."""
SCALE = (16, 64, 256, 512)
"""Episodes in flight."""
NULL_SCALE = (16,)
"""More programs at once than that only wait for each other on a small machine."""
_LONGEST = 600.0
"""Seconds that one measurement may take."""


def main(argv: list[str]) -> int:
    """Exit code 1 where the goal is missed."""
    parser = argparse.ArgumentParser(prog="bench rollout", description=__doc__)
    parser.add_argument("--scale", type=int, nargs="+", default=list(SCALE), help="episodes in flight, inline")
    parser.add_argument("--null-scale", type=int, nargs="*", default=list(NULL_SCALE), help="the same, null harness")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-rollout-") as folder:
        model = Path(folder) / "model"
        model.mkdir()
        subprocess.run([sys.executable, "-m", "miles_verifiers.provision.models.tiny", model], check=True, timeout=120)
        inline = [measure("inline", n, max(4 * n, 256), model) for n in options.scale]
        null = [measure("null", n, 2 * n, model) for n in options.null_scale]
    figures = inline + null
    show(figures)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    if not (inline and null):
        return 0
    ratio = min(row["cpu_ms"] for row in null) / min(row["cpu_ms"] for row in inline)
    print(f"null / inline: {ratio:.0f} times the CPU of an episode, goal {GOAL:.0f}")
    return 0 if ratio >= GOAL else 1


def measure(harness: str, in_flight: int, episodes: int, model: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.rollout_process", harness, str(in_flight), str(episodes), str(model)]
    done = subprocess.run(command, check=True, timeout=_LONGEST, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def show(figures: list[dict[str, Any]]) -> None:
    table = Table()
    for name in ("verifiers", "harness", "in flight", "episodes", "episodes/s", "CPU ms", "KiB each", "lag ms"):
        table.add_column(name, justify="left" if name in ("verifiers", "harness") else "right")
    for row in figures:
        table.add_row(
            row["verifiers"],
            row["harness"],
            str(row["in_flight"]),
            str(row["episodes"]),
            f"{row['per_second']:.1f}",
            f"{row['cpu_ms']:.1f}",
            f"{row['kib_each']:.0f}",
            f"{row['lag_ms']:.0f}",
        )
    Console().print(table)
