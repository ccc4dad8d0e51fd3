"""A harness whose history does not only grow, for every Verifiers: it goes on from one answer in two ways, then compacts.

system, Say x        -> a
..., a, Again.       -> b
..., a, Otherwise.   -> c
system, Say a again  -> d
"""

from __future__ import annotations

from typing import Any

import aiohttp
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["Forking"]


class Forking(Harness[HarnessConfig]):
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
        text, prompt = self.resolve_prompt(trace.task.data)
        system = {"role": "system", "content": text}
        first = [system, {"role": "user", "content": prompt}]
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http:

            async def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as response:
                    response.raise_for_status()
                    answer: dict[str, Any] = (await response.json())["choices"][0]["message"]
                    return answer

            answer = await ask(first)
            for question in ("Again.", "Otherwise."):
                await ask([*first, answer, {"role": "user", "content": question}])
            await ask([system, {"role": "user", "content": f"Say {answer['content']} again"}])
        return ProgramResult(0, "", "")
