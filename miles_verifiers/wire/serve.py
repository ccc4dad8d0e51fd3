"""The gateway as a command: ask the engine what it serves, serve until a signal, then drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from miles_verifiers.errors import ConfigError, EngineUnreachable, Interrupted, shown
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits

_ASK_TIMEOUT = 10.0
"""Seconds for one question about what an engine serves."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command was told; None is asked of the engine."""

    engines: Sequence[str]
    model: str | None = None
    vocab_size: int | None = None
    max_context: int | None = None
    max_response: int | None = None
    max_first_prompt: int | None = None
    """None is no limit of its own."""


def serve(
    wanted: Wanted, deadlines: Deadlines, serving: Serving, *, drain: float, ready: Callable[[Gateway], None]
) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP, then let running requests end for `drain` seconds at most.

    `ready` is told of the open gateway. Raises ConfigError for what cannot be found out, EngineUnreachable, HostError,
    InputError, and Interrupted where requests had to be given up: a second signal, or `drain` seconds that were too few.
    """
    uvloop.run(_serve(wanted, deadlines, serving, drain, ready))


async def _serve(
    wanted: Wanted, deadlines: Deadlines, serving: Serving, drain: float, ready: Callable[[Gateway], None]
) -> None:
    model, limits = await settled(wanted)
    # Whoever trains on what is sampled here is another process, so turns would be kept for nobody.
    gateway = Gateway(
        wanted.engines, limits=limits, model=model, deadlines=deadlines, serving=serving, keep_turns=False
    )
    with _signals() as (first, second):
        async with gateway:
            ready(gateway)
            await first.wait()
            draining = asyncio.create_task(gateway.drain(drain))
            hurry = asyncio.create_task(second.wait())
            await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
            ended = draining.done() and draining.result()
            draining.cancel()
            hurry.cancel()
    if not ended:
        raise Interrupted("the gateway stopped with requests in flight, which were given up")


@contextlib.contextmanager
def _signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events of the first signal and of the second."""
    loop = asyncio.get_running_loop()
    first, second = asyncio.Event(), asyncio.Event()

    def note() -> None:
        (second if first.is_set() else first).set()

    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each in _SIGNALS:
        loop.add_signal_handler(each, note)
    try:
        yield first, second
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)


async def settled(wanted: Wanted) -> tuple[str, Limits]:
    """Name of the model and limits; what was not told is the first engine's. Raises ConfigError and EngineUnreachable."""
    engine = wanted.engines[0].rstrip("/")
    card: dict[str, Any] = {}
    if wanted.model is None or wanted.max_context is None:
        card = _first_card(await _ask(f"{engine}/v1/models"))
    vocab_size = wanted.vocab_size
    if vocab_size is None:
        vocab_size = _vocab_size((await _ask(f"{engine}/model_info")).get("model_path"), engine)
    max_context = wanted.max_context or card.get("max_model_len")
    if not isinstance(max_context, int):
        raise ConfigError("the engine does not say its context length", where=engine, next_step="give --max-context")
    limits = Limits(vocab_size, max_context, wanted.max_response or max_context, wanted.max_first_prompt)
    return wanted.model or str(card.get("id") or "policy"), limits


def _first_card(models: dict[str, Any]) -> dict[str, Any]:
    cards = models.get("data")
    return cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}


def _vocab_size(folder: object, engine: str) -> int:
    """Rows of the model's embedding, which SGLang (0.5.23) tells nobody: read where the engine read it."""
    hint = "give --vocab-size: the model's vocab_size"
    try:
        config = json.loads((Path(str(folder)) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            "the vocabulary size is not known: the engine's model folder cannot be read here",
            where=f"{folder}, {engine}",
            next_step=hint,
        ) from None
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"vocab_size is {shown(size)}", where=f"{folder}/config.json", next_step=hint)
    return size


async def _ask(url: str) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT)
    hint = "is the URL that of a SGLang server, and is it up?"
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            body = await response.json(content_type=None) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        said = str(error) or type(error).__name__
        raise EngineUnreachable(f"the engine does not say what it serves: {said}", where=url, next_step=hint) from None
    if not isinstance(body, dict):
        raise EngineUnreachable(
            f"the engine does not say what it serves: status {response.status}", where=url, next_step=hint
        )
    return body
