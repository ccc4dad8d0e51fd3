"""renderers' own client over the transport: what it sends is understood, what it gets it accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, good_reply
from renderers import OverlongPromptError, config_from_name, create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate

from miles_verifiers.errors import ReplyInvalid, RequestRefused
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import MilesSGLangTransport, WireResponse

LIMITS = Limits(vocab_size=320, max_context=256, max_response=32)
MESSAGES = [{"role": "user", "content": "hi"}]


class Recorder(MilesSGLangTransport):
    """Keeps what renderers posted and got."""

    async def post(self, endpoint: str, **kwargs: Any) -> WireResponse:
        self.endpoint, self.posted = endpoint, kwargs
        self.got = await super().post(endpoint, **kwargs)
        return self.got


@pytest.fixture
def renderer(qwen3_folder: Path) -> Any:
    return create_renderer(load_tokenizer(str(qwen3_folder)), config_from_name("qwen3"))


def answer(renderer: Any, text: str) -> tuple[list[int], Any]:
    """Ids of `text` with the end of turn, and an engine that says them to a prompt of any length."""
    ids = [*renderer._tokenizer.encode(text, add_special_tokens=False), renderer.get_stop_token_ids()[0]]
    return ids, lambda request, body: good_reply(ids, prompt_tokens=len(body["input_ids"]))


async def test_transport_translates_renderer_request_to_sglang(renderer: Any) -> None:
    ids, says = answer(renderer, "ok")
    async with FakeEngine(says) as engine:
        transport = Recorder(engine.url, limits=LIMITS)
        result = await generate(
            client=transport,
            renderer=renderer,
            messages=MESSAGES,
            model="policy",
            sampling_params={"temperature": 0.8, "top_p": 1.0, "top_k": -1, "max_tokens": 16},
            cache_salt="salt",
            priority=2,
            extra_headers={"X-Session-ID": "trace-1"},
        )
        await transport.close()
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
    assert json.loads(transport.got.content)["choices"][0] == {
        "token_ids": ids,
        "logprobs": {
            "content": [{"token": f"token_id:{token}", "logprob": -0.5 - 0.25 * i} for i, token in enumerate(ids)]
        },
        "finish_reason": "stop",
    }
    assert transport.endpoint == f"{engine.url}/inference/v1/generate"
    assert result["prompt_ids"] == prompt_ids
    assert result["completion_ids"] == ids
    assert result["completion_logprobs"] == [-0.5 - 0.25 * i for i in range(len(ids))]
    assert (result["content"], result["finish_reason"]) == ("ok", "stop")
    assert [turn.token_ids for turn in transport.take("trace-1")] == [ids]


async def test_renderers_stops_at_the_context_length_that_the_transport_names(renderer: Any) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    async with FakeEngine() as engine:
        transport = MilesSGLangTransport(engine.url, limits=LIMITS)
        with pytest.raises(OverlongPromptError, match="256"):
            await generate(client=transport, renderer=renderer, messages=long, model="policy")
        await transport.close()
    assert engine.bodies == []


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (good_reply([5, 6], finish_reason={"type": "stop"}, completion_tokens=9), "completion_tokens"),
        (good_reply([5, 6], [-1.0, -9999.0]), "-9999"),
    ],
)
async def test_what_older_renderers_would_swallow_is_refused(renderer: Any, reply: dict[str, Any], said: str) -> None:
    reply["meta_info"]["prompt_tokens"] = len(renderer.render_ids(MESSAGES, add_generation_prompt=True))
    async with FakeEngine(lambda request, body: reply) as engine:
        transport = MilesSGLangTransport(engine.url, limits=LIMITS)
        with pytest.raises(ReplyInvalid, match=said):
            await generate(client=transport, renderer=renderer, messages=MESSAGES, model="policy")
        await transport.close()


async def test_unknown_sampling_keys_pass_renderers_and_stop_here(renderer: Any) -> None:
    async with FakeEngine() as engine:
        transport = MilesSGLangTransport(engine.url, limits=LIMITS)
        with pytest.raises(RequestRefused, match=r"sampling_params\.temprature"):
            await generate(
                client=transport,
                renderer=renderer,
                messages=MESSAGES,
                model="policy",
                sampling_params={"temprature": 1.0},
            )
        await transport.close()
    assert engine.bodies == []
