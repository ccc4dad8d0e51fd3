"""Transport and gateway in front of the real SGLang server: the tokens that SGLang says, and no request outlives its caller."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import calls
from miles_verifiers.engine.server import EngineServer, free_port
from miles_verifiers.provision.models import tiny
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire.columns import Columns, parsed
from miles_verifiers.wire.gateway import Gateway
from miles_verifiers.wire.scan import COMPILED
from miles_verifiers.wire.serve import Wanted, settled
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import GENERATE_PATH, MilesSGLangTransport

pytestmark = pytest.mark.slow
PROMPT = [1, 2, 3, 4, 5]
GREEDY = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
BODY = {"token_ids": PROMPT, "sampling_params": GREEDY}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("qwen3")
    tiny.write(made)
    return made


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    config = EngineSection(max_total_tokens=4096, max_running_requests=8, start_timeout=200)
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with EngineServer(
        config,
        python=Path(sys.executable),
        model=folder,
        dtype="float32",
        context_length=1024,
        port=free_port(),
        log=log,
        weight_version="41",
    ) as running:
        yield running


@pytest.fixture
def limits(folder: Path) -> Limits:
    return Limits(json.loads((folder / "config.json").read_text())["vocab_size"], 1024, 1000)


def from_engine(engine: EngineServer) -> tuple[list[int], list[float]]:
    """What SGLang itself answers to BODY."""
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True}
    status, reply = calls.call(f"{engine.url}/generate", body, timeout=120)
    assert status == 200
    entries = reply["meta_info"]["output_token_logprobs"]
    return [entry[1] for entry in entries], [entry[0] for entry in entries]


async def over_transport(url: str, limits: Limits) -> tuple[dict[str, Any], list[Any]]:
    transport = MilesSGLangTransport(url, limits=limits)
    response = await transport.post(url + GENERATE_PATH, body=BODY, options={"headers": {"X-Session-ID": "s"}})
    turns = transport.take("s")
    await transport.close()
    return json.loads(response.content), turns


async def over_gateway(url: str, limits: Limits) -> tuple[dict[str, Any], list[Any]]:
    async with Gateway(url, limits=limits) as gateway, aiohttp.ClientSession() as http:
        headers = {"X-Session-ID": "s"}
        async with http.post(gateway.url + GENERATE_PATH, json=BODY, headers=headers) as response:
            assert response.status == 200
            return await response.json(), gateway.take("s")


@pytest.mark.parametrize("way", [over_transport, over_gateway])
@pytest.mark.timeout(300)
async def test_what_sglang_says_arrives(engine: EngineServer, limits: Limits, way: Any) -> None:
    ids, logprobs = from_engine(engine)
    response, (turn,) = await way(engine.url, limits)
    (choice,) = response["choices"]
    assert choice["token_ids"] == ids
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{token}" for token in ids]
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(logprobs, abs=1e-5)
    assert choice["finish_reason"] == "length"
    assert (turn.token_ids, turn.weight_versions) == (ids, [WeightSpan("41", 24)])


async def test_its_replies_are_parsed_by_columns(engine: EngineServer) -> None:
    assert COMPILED, "this interpreter must have the compiled scan of the one that built it"
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    async with aiohttp.ClientSession() as http, http.post(f"{engine.url}/generate", json=body) as response:
        raw = await response.read()
    assert isinstance(parsed(raw)["meta_info"]["output_token_logprobs"], Columns)


async def test_what_the_command_asks_is_answered(engine: EngineServer, folder: Path, limits: Limits) -> None:
    assert await settled(Wanted([engine.url])) == (str(folder), Limits(limits.vocab_size, 1024, 1024))


async def test_a_prompt_over_the_engines_own_context_is_too_long(engine: EngineServer, limits: Limits) -> None:
    """The engine's refusal, where our limit is above its own."""
    wide = Limits(limits.vocab_size, 4000, 1000)
    async with (
        Gateway(engine.url, limits=wide) as gateway,
        aiohttp.ClientSession() as http,
        http.post(gateway.url + GENERATE_PATH, json={"token_ids": [1] * 2000}) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded"), error


async def idle(engine: EngineServer) -> bool:
    """SGLang empties its cache only where no request runs."""
    status, _ = await asyncio.to_thread(calls.call, f"{engine.url}/flush_cache", {}, timeout=30)
    return status == 200


async def test_a_caller_that_goes_away_frees_the_engine(engine: EngineServer, limits: Limits) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1000, "ignore_eos": True}}
    async with Gateway(engine.url, limits=limits) as gateway, aiohttp.ClientSession() as http:

        async def ask() -> None:
            async with http.post(gateway.url + GENERATE_PATH, json=body) as response:
                await response.read()

        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.5)
        assert not await idle(engine)  # control: it runs
        asking.cancel()
        async with asyncio.timeout(5):
            while not await idle(engine):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.1)
        assert gateway.wire.client.traffic.aborts == 1
