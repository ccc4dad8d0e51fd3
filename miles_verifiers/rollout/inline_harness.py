"""Verifiers harness that runs chat tasks inside the rollout process; for every supported Verifiers.

The stock `null` harness starts a program per rollout, which imports openai and mcp anew: 2.4 s of CPU per episode, against
10 ms here, for the same traces. Like that program, this harness sends the conversation to the interception endpoint once;
limits and stop conditions are driven there (verifiers/v1/interception/server.py 0.2.0 to 0.4.0). A user simulator of 0.2.x is
driven there too; from 0.3 on a conversation comes back to the harness for every turn, with all messages so far. Tools need a
program to run them: environments with tools take another harness.
"""

from __future__ import annotations

import asyncio
import sys
import weakref
from typing import Any

import aiohttp
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

from miles_verifiers.rollout.v03.traces import is_over_context

__all__ = ["InlineHarness"]

PLUGIN_ID = "miles_verifiers_inline"
"""Verifiers takes a plugin's id for a top-level module's name (verifiers/v1/loaders.py 0.2.0, utils/loaders.py 0.4.0)."""


def register() -> None:
    """Let Verifiers find this harness under its id."""
    sys.modules.setdefault(PLUGIN_ID, sys.modules[__name__])


def opening_messages(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    """A task's system prompt and prompt (text, messages, or None where a user simulator opens) as wire messages."""
    messages = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *map(message_to_wire, prompt or [])]


class InlineHarnessConfig(HarnessConfig):
    pass


class InlineHarness(Harness[InlineHarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_USER_SIM = True
    SUPPORTS_MESSAGE_PROMPT = True
    # From here on 0.3 and 0.4: it can go on with a conversation, and neither runs code nor wants a container.
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any = None,
    ) -> ProgramResult:
        """Post the conversation, and report an error status as a program's failed exit. Verifiers bounds the time.

        `data` is the task's data as of this turn, which 0.2.x does not hand over. A prompt over the context is no failure,
        as with the stock programs: the rollout ends there.
        """
        task = trace.task.data if data is None else data
        try:
            async with _connections().post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": opening_messages(*self.resolve_prompt(task))},
                headers={"Authorization": f"Bearer {secret}"},
            ) as response:
                text = await response.text()
                if response.status == 200 or (response.status == 400 and is_over_context(text)):
                    return ProgramResult(0, "", "")
                return ProgramResult(1, "", f"HTTP {response.status}: {text[-500:]}")
        finally:
            # After a timeout the interception server would still wait for the engine, and add a late reply to a trace
            # that is being scored. On every other way out nothing is running any more.
            cancel = getattr(getattr(ctx.client, "openai", None), "cancel", None)
            if cancel is not None:
                cancel(trace.id)


_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession] = weakref.WeakKeyDictionary()
"""One for all rollouts of an event loop: from 0.3 on Verifiers makes a harness per rollout, which nobody closes."""


def _connections() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        session = _sessions[loop] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
    return session


async def close_connections() -> None:
    """Close the running loop's connections to the interception servers; the next rollout opens new ones."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()
