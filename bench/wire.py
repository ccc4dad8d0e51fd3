"""What the wire costs: CPU per request and requests per second, against an aiohttp + orjson client that translates nothing.

A stub engine in a process of its own answers a prebuilt reply: 1,024 prompt ids, 512 sampled ids with log-probs. Every client
is a process of its own, and so is the gateway, whose CPU is counted together with its client's. Rounds take the three in
turn; a ratio is the median over rounds of what was measured within the same round.

The processes use every core, as they do in use, or share one (`--one-core`); ratios of the two differ. `--uncompiled` shows
what the wire costs where it was installed without a C compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.wire_process import COMPLETION, PROMPT
from miles_verifiers.wire.scan import COMPILED

GOALS = {"in-process transport": 1.35, "gateway": 2.5}
"""Times the raw client's CPU per request."""
RAW = "raw aiohttp + orjson"
SCALE = (16, 64, 256, 1024)
"""Requests in flight."""
_LONGEST = 600.0
"""Seconds that one order may take."""


class Process:
    """A child that answers a line of JSON with a line of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self._child.stdout is not None
        text = self._child.stdout.readline()
        if not text:
            raise SystemExit(f"{self._child.args!r}: ended with exit code {self._child.wait(10)}")
        return text.strip()

    def order(self, **what: int) -> dict[str, float]:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()
        answer: dict[str, float] = json.loads(self.line())
        return answer

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(10)


@dataclass(frozen=True)
class Subject:
    """What is measured: a client, and the gateway between it and the engine where there is one."""

    name: str
    client: Process
    gateway: Process | None = None

    def run(self, requests: int, in_flight: int) -> Measured:
        before, gateway_before = self.client.order(), self.gateway.order() if self.gateway else {"cpu": 0.0}
        after = self.client.order(requests=requests, in_flight=in_flight)
        gateway_after = self.gateway.order() if self.gateway else {"cpu": 0.0}
        return Measured(
            client_us=1e6 * (after["cpu"] - before["cpu"]) / requests,
            gateway_us=1e6 * (gateway_after["cpu"] - gateway_before["cpu"]) / requests,
            requests_per_second=requests / after["seconds"],
        )

    def memory(self) -> dict[str, float]:
        """MiB resident, of each process."""
        sizes = {"client": self.client.order()["rss"] / 2**20}
        return sizes | ({"gateway": self.gateway.order()["rss"] / 2**20} if self.gateway else {})


@dataclass(frozen=True)
class Measured:
    client_us: float
    """CPU microseconds per request."""
    gateway_us: float
    requests_per_second: float

    @property
    def total_us(self) -> float:
        return self.client_us + self.gateway_us


def main(argv: list[str]) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.one_core:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # children inherit it
    with subjects(compiled=COMPILED and not arguments.uncompiled) as all_of_them:
        for subject in all_of_them:
            subject.run(500, 64)  # connections, caches, lazy imports
        main_rounds = rounds(all_of_them, arguments.rounds, arguments.requests, 64)
        result: dict[str, Any] = {
            "compiled": COMPILED and not arguments.uncompiled,
            "in_flight_64": summary(main_rounds),
        }
        scale = [] if arguments.no_scale else list(SCALE)
        result["scale"] = {n: summary(rounds(all_of_them, 3, max(arguments.requests // 2, n), n)) for n in scale}
        result["memory"] = (
            [memory(subject, arguments.memory) for subject in all_of_them[1:]] if arguments.memory else []
        )
    show(result)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2), encoding="utf-8")
    missed = [name for name, goal in GOALS.items() if result["in_flight_64"][name]["ratio"] > goal]
    return 1 if arguments.check and missed else 0


@contextlib.contextmanager
def subjects(*, compiled: bool) -> Iterator[list[Subject]]:
    options = [] if compiled else ["uncompiled"]
    with contextlib.ExitStack() as stack:

        def start(module: str, *arguments: str) -> Process:
            return stack.enter_context(contextlib.closing(Process(module, *arguments)))

        engine = start("bench.stub_engine", str(PROMPT), str(COMPLETION)).line()
        gateway = start("bench.wire_process", "gateway", engine, *options)
        client = start("bench.wire_process", "client", gateway.line())
        yield [
            Subject(RAW, start("bench.wire_process", "raw", engine)),
            Subject("in-process transport", start("bench.wire_process", "transport", engine, *options)),
            Subject("gateway", client, gateway),
        ]


def rounds(subjects: list[Subject], n: int, requests: int, in_flight: int) -> list[dict[str, Measured]]:
    """`n` rounds, each beginning with another subject."""
    done = []
    for i in range(n):
        turn = subjects[i % len(subjects) :] + subjects[: i % len(subjects)]
        done.append({subject.name: subject.run(requests, in_flight) for subject in turn})
    return done


def summary(done: list[dict[str, Measured]]) -> dict[str, dict[str, Any]]:
    """Medians over rounds, by subject; `ratio` is to the raw client of the same round, `ratios` its range."""
    out = {}
    for name in done[0]:
        ratios = [measured[name].total_us / measured[RAW].total_us for measured in done]
        fields = asdict(done[0][name])
        medians = {field: statistics.median(getattr(measured[name], field) for measured in done) for field in fields}
        out[name] = {**medians, "ratio": statistics.median(ratios), "ratios": [min(ratios), max(ratios)]}
    return {name: out[name] for name in (RAW, *GOALS)}


def memory(subject: Subject, requests: int) -> dict[str, Any]:
    """MiB resident after each tenth of `requests`."""
    sizes = [subject.memory()]
    for _ in range(10):
        subject.run(requests // 10, 64)
        sizes.append(subject.memory())
    return {"subject": subject.name, "requests": requests, "mib": sizes}


def show(result: dict[str, Any]) -> None:
    console = Console()
    scan = "compiled" if result["compiled"] else "in Python"
    title = f"{PROMPT} prompt ids, {COMPLETION} sampled ids with log-probs, 64 in flight, scan {scan}"
    table = Table("", "requests/s", "CPU us: client", "gateway", "x raw", "range", "goal", title=title)
    for name, row in result["in_flight_64"].items():
        low, high = row["ratios"]
        goal = f"<= {GOALS[name]}" if name in GOALS else ""
        numbers = (f"{row[field]:,.0f}" for field in ("requests_per_second", "client_us", "gateway_us"))
        table.add_row(name, *numbers, f"{row['ratio']:.2f}", f"{low:.2f} to {high:.2f}", goal)
    console.print(table)
    if result["scale"]:
        table = Table("in flight", *(f"{name}: req/s, CPU us" for name in (RAW, *GOALS)))
        for n, rows in result["scale"].items():
            cells = (
                f"{row['requests_per_second']:,.0f}  {row['client_us'] + row['gateway_us']:,.0f}"
                for row in rows.values()
            )
            table.add_row(str(n), *cells)
        console.print(table)
    for run in result["memory"]:
        for process in run["mib"][0]:
            sizes = " ".join(f"{size[process]:.1f}" for size in run["mib"])
            console.print(f"{run['subject']}, {process}: MiB at each tenth of {run['requests']:,} requests: {sizes}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench wire", description="What the wire costs.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=2000, help="per subject and round")
    parser.add_argument("--no-scale", action="store_true", help="leave out 16 to 1,024 in flight")
    parser.add_argument("--memory", type=int, default=0, metavar="N", help="watch memory over N requests, say 100000")
    parser.add_argument("--one-core", action="store_true", help="let the processes share one core")
    parser.add_argument("--uncompiled", action="store_true", help="measure the wire as it is without a C compiler")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a goal is missed")
    return parser
