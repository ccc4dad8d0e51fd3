"""Verifiers harness (0.2.x) that runs chat tasks inside the rollout process.

The stock `null` harness starts a program per rollout, which imports openai and mcp anew: 2.4 s of CPU per episode, against
10 ms here, for the same traces. Like that program, this harness sends the task's messages to the interception endpoint
once; limits, stop conditions and user simulators are driven there (verifiers/v1/interception/server.py 0.2.0). Tools need
a program to run them: environments with tools take another harness.
"""

from __future__ import annotations

from typing import Any

import aiohttp
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["InlineHarness"]


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

    _http: aiohttp.ClientSession | None = None

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str]
    ) -> ProgramResult:
        """Post the conversation, and report an error status as a program's failed exit. Verifiers bounds the time."""
        try:
            async with self._connections().post(
                f"{endpoint}/chat/completions",
                json={"model": ctx.model, "messages": self._messages(trace.task.data)},
                headers={"Authorization": f"Bearer {secret}"},
            ) as response:
                text = await response.text()
                if response.status == 200:
                    return ProgramResult(0, "", "")
                return ProgramResult(1, "", f"HTTP {response.status}: {text[-500:]}")
        finally:
            # After a timeout the interception server would still wait for the engine, and add a late reply to a trace
            # that is being scored. On every other way out nothing is running any more.
            cancel = getattr(getattr(ctx.client, "openai", None), "cancel", None)
            if cancel is not None:
                cancel(trace.id)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _messages(self, data: Any) -> list[dict[str, Any]]:
        return opening_messages(*self.resolve_prompt(data))

    def _connections(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._http
