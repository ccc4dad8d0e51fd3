"""One measurement of bench.rollout: python -m bench.rollout_process HARNESS IN_FLIGHT EPISODES MODEL, one line of JSON.

With `engine` as its only argument it is the engine: a server that answers every prompt with the same sampled ids.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson
import psutil

from miles_verifiers.config import loading
from miles_verifiers.rollout.interpreter import SUPPORTED, go_offline

GROUP = 8
VOCAB = 320
REPLY = [80, 82, 73, 78, 84, 40, 49, 41, 258]
"""Sampled ids; the last is the tiny model's <|im_end|>."""


async def serve() -> None:
    """The engine; prints its URL, ends when its standard input closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                body = orjson.loads(await reader.readexactly(length) or b"{}")
                reply = orjson.dumps(_reply(len(body.get("input_ids", ()))))
                header = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(reply)
                writer.write(header + reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


def _reply(prompt_tokens: int) -> dict[str, Any]:
    return {
        "text": "",
        "output_ids": REPLY,
        "meta_info": {
            "id": "0",
            "finish_reason": {"type": "stop", "matched": REPLY[-1]},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(REPLY),
            "cached_tokens": 0,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in REPLY],
        },
    }


async def measure(harness: str, in_flight: int, episodes: int, model: Path, url: str) -> dict[str, Any]:
    from miles_verifiers.rollout.load import load_backend, settle

    verifiers = version("verifiers")
    golf = "code-golf-v1" if SUPPORTED[verifiers] == "episodes" else "code-golf"
    overrides = (
        f"environment.verifiers='{verifiers}'",
        f"environment.taskset={{ id = '{golf}' }}",
        f"environment.harness='{harness}'",
        f"rollout.max_concurrency={in_flight}",
    )
    _run_no_programs(golf.replace("-", "_"))
    _run_harness_here(model.parent)
    loaded = load_backend(loading.load("cpu", overrides=overrides), model, [url], VOCAB)
    await loaded.backend.open()
    try:
        await _groups(loaded.backend, in_flight, GROUP)  # imports, connections, the renderer
        settle()
        before, memory = _cpu_seconds(), psutil.Process().memory_info().rss
        watch = asyncio.create_task(_watch())
        began = time.perf_counter()
        failed = await _groups(loaded.backend, in_flight, episodes)
        seconds, cpu = time.perf_counter() - began, _cpu_seconds() - before
        watch.cancel()
        peak, lag = _seen
    finally:
        await loaded.wire.close()
        await loaded.backend.close()
    if failed:
        raise SystemExit(f"{failed[0]}: {len(failed)} of {episodes} rollouts failed")
    return {
        "verifiers": verifiers,
        "harness": harness,
        "in_flight": in_flight,
        "episodes": episodes,
        "per_second": episodes / seconds,
        "cpu_ms": cpu / episodes * 1e3,
        "kib_each": max(0, peak - memory) / in_flight / 1024,
        "lag_ms": lag * 1e3,
    }


_seen = [0.0, 0.0]
"""Highest resident memory, bytes; longest standstill of the event loop, seconds."""


async def _watch() -> None:
    process = psutil.Process()
    while True:
        before = time.perf_counter()
        await asyncio.sleep(0.05)
        _seen[1] = max(_seen[1], time.perf_counter() - before - 0.05)
        _seen[0] = max(_seen[0], process.memory_info().rss)


async def _groups(backend: Any, in_flight: int, episodes: int) -> list[str]:
    """Run them, and return what went wrong."""
    from miles_verifiers.rollout.slots import Slots
    from miles_verifiers.rollout.traces import failure

    slots = Slots(in_flight)
    deadline = asyncio.get_running_loop().time() + 500
    groups = await asyncio.gather(
        *(backend.run_group(i % backend.n_tasks, GROUP, slots, deadline) for i in range(-(-episodes // GROUP)))
    )
    return [failure(rollout) for group in groups for rollout in group if failure(rollout)]


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _run_no_programs(golf: str) -> None:
    sandbox, taskset = import_module(f"{golf}.sandbox"), import_module(f"{golf}.taskset")

    async def pretended(program: str) -> Any:
        return sandbox.Outcome("exit", 0, program, "", 0.01)

    async def confined() -> dict[str, str]:
        return {}

    taskset.run_confined, taskset.confinement = pretended, confined


def _run_harness_here(folder: Path) -> None:
    """The null harness's program starts in this interpreter: without uv, whose part of the cost is not counted then."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def prepared(self: Any, source: str, env: Any, **_: Any) -> list[str]:
        program = folder / "program.py"
        if not program.exists():
            program.write_text(source, encoding="utf-8")
        return [sys.executable, str(program)]

    SubprocessRuntime.prepare_uv_script = prepared


def main(argv: list[str]) -> None:
    if argv == ["engine"]:
        asyncio.run(serve())
        return
    harness, in_flight, episodes, model = argv
    go_offline()
    logging.disable(logging.CRITICAL)
    engine = subprocess.Popen(
        [sys.executable, "-m", "bench.rollout_process", "engine"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert engine.stdout is not None
        url = engine.stdout.readline().strip()
        print(json.dumps(asyncio.run(measure(harness, int(in_flight), int(episodes), Path(model), url))))
    finally:
        engine.kill()
        engine.wait(10)


if __name__ == "__main__":
    main(sys.argv[1:])
