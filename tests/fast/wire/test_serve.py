"""The command `gateway`, as a process: what it finds out, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine, good_reply, until

from miles_verifiers import cli
from miles_verifiers.errors import ConfigError, EngineUnreachable
from miles_verifiers.system import process
from miles_verifiers.wire import scan
from miles_verifiers.wire.command import TOKEN_VARIABLE, announce
from miles_verifiers.wire.gateway import Gateway
from miles_verifiers.wire.serve import Wanted, settled
from miles_verifiers.wire.translate import Limits

BODY = json.dumps({"model": "tiny", "token_ids": [11, 12, 13]})


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[FakeEngine]:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    async with FakeEngine() as running:
        running.model_info["model_path"] = str(tmp_path)
        yield running


@asynccontextmanager
async def command(engine: FakeEngine, *options: str, token: str = "") -> AsyncIterator[tuple[Any, str]]:
    """The running command, and the gateway's URL."""
    arguments = ("-m", "miles_verifiers", "gateway", "--engine", engine.url, "--port", "0", *options)
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, TOKEN_VARIABLE: token},
    )
    try:
        assert child.stdout is not None
        line = (await asyncio.wait_for(child.stdout.readline(), 20)).decode()
        found = re.fullmatch(r"gateway (http://127\.0\.0\.1:\d+) -> (\S+): model (\w+), context (\d+), .* 1000\n", line)
        assert found is not None, line
        assert found.groups()[1:] == (engine.url, "tiny", "128")
        yield child, found[1]
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


async def ask(url: str, **headers: str) -> int:
    async with (
        aiohttp.ClientSession() as http,
        http.post(url + "/inference/v1/generate", data=BODY, headers=headers) as r,
    ):
        await r.read()
        return r.status


async def health(url: str) -> int:
    async with aiohttp.ClientSession() as http, http.get(url + "/health") as response:
        return response.status


async def test_it_serves_and_drains(engine: FakeEngine) -> None:
    gate = asyncio.Event()

    async def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return good_reply([5, 2])

    engine.handler = handler
    async with command(engine) as (child, url):
        running = asyncio.create_task(ask(url))
        await until(lambda: bool(engine.bodies))
        child.send_signal(signal.SIGTERM)
        while await health(url) != 503:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)
        assert await ask(url) == 503
        gate.set()
        assert await running == 200
        assert await asyncio.wait_for(child.wait(), 10) == 0
        assert await child.stderr.read() == b""


async def test_a_second_signal_gives_up_what_runs(engine: FakeEngine) -> None:
    async def handler(request: Any, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    engine.handler = handler
    async with command(engine) as (child, url):
        running = asyncio.create_task(ask(url))
        await until(lambda: bool(engine.bodies))
        child.send_signal(signal.SIGINT)
        await asyncio.sleep(0.2)
        assert child.returncode is None  # control: the first signal alone waits
        child.send_signal(signal.SIGINT)
        assert await running == 502
        assert await asyncio.wait_for(child.wait(), 10) == 130
        await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
        assert b"given up" in await child.stderr.read()


async def test_the_token_comes_from_the_environment(engine: FakeEngine) -> None:
    async with command(engine, token="abc") as (_, url):
        assert await ask(url) == 401
        assert await ask(url, Authorization="Bearer abc") == 200


async def test_what_is_told_is_not_asked() -> None:
    told = Wanted(["http://127.0.0.1:9"], model="m", vocab_size=10, max_context=20, max_response=5, max_first_prompt=7)
    assert await settled(told) == ("m", Limits(10, 20, 5, 7))


async def test_the_rest_is_the_engines(engine: FakeEngine, tmp_path: Path) -> None:
    assert await settled(Wanted([engine.url])) == ("tiny", Limits(1000, 128, 128))
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    assert await settled(Wanted([engine.url], model="m")) == ("m", Limits(77, 128, 128))


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"vocab_size": "x"}', '{"vocab_size": -1}', '{"text_config": 1}'])
async def test_a_vocabulary_that_is_not_known(engine: FakeEngine, tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"vocab|model folder") as caught:
        await settled(Wanted([engine.url]))
    assert "--vocab-size" in caught.value.next_step


async def test_an_engine_that_does_not_say(engine: FakeEngine) -> None:
    del engine.model_card["max_model_len"]
    with pytest.raises(ConfigError, match="context length"):
        await settled(Wanted([engine.url]))
    with pytest.raises(EngineUnreachable, match="status 404"):
        await settled(Wanted([f"{engine.url}/elsewhere"]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--engine"),
        (["--engine", "host:1"], "does not begin with http"),
        (["--engine", "http://h", "--port", "70000"], "'70000' is not an integer from 0 to 65535"),
        (["--engine", "http://h", "--max-running", "0"], "'0' is not an integer from 1"),
        (["--engine", "http://h", "--drain", "nan"], "positive number of seconds"),
    ],
)
def test_bad_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["gateway", *options])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--engine", "http://127.0.0.1:9"], 3, "does not say what it serves"),
        (
            ["--engine", "http://h", "--model", "m", "--vocab-size", "9", "--max-context", "9", "--host", "0.0.0.0"],
            2,
            "for everyone",
        ),
    ],
)
def test_what_cannot_be_served(
    options: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # They are for a process of its own: pytest would adopt other tests' orphans, and kill its own children.
    monkeypatch.setattr(process, "adopt_orphans", lambda: None)
    monkeypatch.setattr(process, "end_descendants", lambda: None)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert cli.main(["gateway", *options]) == code
    said = capsys.readouterr().err
    assert says in said
    assert "next:" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("compiled", [True, False])
async def test_a_gateway_without_the_compiled_scan_says_so(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    monkeypatch.setattr(scan, "COMPILED", compiled)
    async with Gateway(engine.url, limits=Limits(1000, 100, 20)) as gateway:
        announce(gateway)
    assert ("without a C compiler" in capsys.readouterr().out) is not compiled
