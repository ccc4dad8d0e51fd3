"""renderers' own client, over OpenAI's, in front of the gateway: what it sends is understood, what it gets it accepts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_engine import FakeEngine, good_reply, until
from openai import AsyncOpenAI
from renderers import OverlongPromptError, config_from_name, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate

from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits

LIMITS = Limits(vocab_size=320, max_context=256, max_response=32)
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def renderer(qwen3_folder: Path) -> Any:
    return create_renderer(load_tokenizer(str(qwen3_folder)), config_from_name("qwen3"))


@asynccontextmanager
async def client(
    engine: FakeEngine, token: str | None = None, **how: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Gateway]]:
    async with (
        Gateway(engine.url, limits=LIMITS, serving=Serving(token=token, **how)) as gateway,
        AsyncOpenAI(base_url=gateway.base_url, api_key=token or "none") as made,
    ):
        yield made, gateway


def reply_to(body: dict[str, Any], ids: list[int], **meta: Any) -> dict[str, Any]:
    return good_reply(ids, prompt_tokens=len(body["input_ids"]), **meta)


async def ask(client: AsyncOpenAI, renderer: Any, messages: list[dict[str, Any]] | None = None, **more: Any) -> Any:
    headers = {"X-Session-ID": "trace-1"}
    return await generate(
        client=client, renderer=renderer, messages=messages or MESSAGES, model="policy", extra_headers=headers, **more
    )


async def test_a_turn(renderer: Any) -> None:
    ids = [*renderer._tokenizer.encode("ok", add_special_tokens=False), renderer.get_stop_token_ids()[0]]
    async with (
        FakeEngine(lambda request, body: reply_to(body, ids)) as engine,
        client(engine, "secret") as (http, gateway),
    ):
        sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_tokens": 16, "routed_experts_prompt_start": 2}
        result = await ask(http, renderer, sampling_params=sampling, cache_salt="salt", priority=2)
        turns = gateway.take("trace-1")
    prompt_ids = renderer.render_ids(MESSAGES, add_generation_prompt=True)
    (sent,) = engine.bodies
    assert sent.pop("rid")
    assert sent == {
        "input_ids": prompt_ids,
        "sampling_params": {
            "temperature": 0.8,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 16,
            "stop_token_ids": renderer.get_stop_token_ids(),
            "n": 1,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        },
        "return_logprob": True,
        "extra_key": "salt",
        "priority": 2,
    }
    assert engine.headers[0]["X-SMG-Routing-Key"] == "trace-1"
    assert (result["prompt_ids"], result["completion_ids"]) == (prompt_ids, ids)
    assert result["completion_logprobs"] == [-0.5 - 0.25 * i for i in range(len(ids))]
    assert (result["content"], result["finish_reason"]) == ("ok", "stop")
    assert [turn.token_ids for turn in turns] == [ids]


async def test_renderers_stops_at_the_context_length_that_the_gateway_names(renderer: Any) -> None:
    async with FakeEngine() as engine, client(engine) as (http, _):
        with pytest.raises(OverlongPromptError, match="256"):
            await ask(http, renderer, [{"role": "user", "content": "x" * 300}])
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("meta", "status", "said"),
    [
        ({"finish_reason": {"type": "abort", "message": "weights"}}, 502, "weights"),
        ({"completion_tokens": 9}, 502, "completion_tokens"),
        ({"weight_version": ...}, 502, "weight_version"),
    ],
)
async def test_a_bad_reply_is_asked_for_once(renderer: Any, meta: dict[str, Any], status: int, said: str) -> None:
    """OpenAI's client repeats every 5xx of its own accord, unless it is told not to."""
    async with FakeEngine(lambda request, body: reply_to(body, [5, 6], **meta)) as engine, client(engine) as (http, _):
        with pytest.raises(openai.APIStatusError, match=said) as caught:
            await ask(http, renderer)
    assert caught.value.status_code == status
    assert len(engine.bodies) == 1


async def test_a_parameter_that_is_refused(renderer: Any) -> None:
    async with FakeEngine() as engine, client(engine) as (http, _):
        with pytest.raises(openai.BadRequestError, match=r"sampling_params\.temprature"):
            await ask(http, renderer, sampling_params={"temprature": 1.0})
    assert engine.bodies == []


async def test_a_full_queue_is_waited_for(renderer: Any) -> None:
    """Control of the test before last: what may be repeated is."""
    gate = asyncio.Event()

    async def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return reply_to(body, [5, 6])

    async with FakeEngine(handler) as engine, client(engine, max_running=1, max_waiting=0) as (http, gateway):
        first = asyncio.create_task(ask(http, renderer))
        await until(lambda: len(engine.bodies) == 1)
        second = asyncio.create_task(ask(http, renderer))
        await until(lambda: gateway._metrics._answers["/inference/v1/generate", 429] == 1)
        gate.set()
        assert [(await each)["completion_ids"] for each in (first, second)] == [[5, 6], [5, 6]]


async def test_a_caller_that_goes_away(renderer: Any) -> None:
    async def stall(request: Any, body: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    async with FakeEngine(stall) as engine, client(engine) as (http, _):
        asking = asyncio.create_task(ask(http, renderer))
        await until(lambda: bool(engine.bodies))
        asking.cancel()
        await until(lambda: engine.aborted == [engine.bodies[0]["rid"]])
