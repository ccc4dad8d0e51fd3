"""A harness of two turns, for every Verifiers: asks, and asks again."""

from __future__ import annotations

from typing import Any

import aiohttp
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["TwoTurns"]


class TwoTurns(Harness[HarnessConfig]):
    """Asks twice; the second question follows the first answer."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = EXECUTES_CODE = False

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
        system, prompt = self.resolve_prompt(trace.task.data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:
            for _ in range(2):
                async with http.post(
                    f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}
                ) as response:
                    if response.status != 200:
                        return ProgramResult(1, "", await response.text())
                    message = (await response.json())["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "Again."}]
        return ProgramResult(0, "", "")
