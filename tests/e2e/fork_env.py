"""A Verifiers 0.2.0 environment whose harness forks: it goes on from one answer in two ways, then begins anew with the answer."""

from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ForkTaskset", "Forking"]


class Forking(Harness[HarnessConfig]):
    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any = None
    ) -> ProgramResult:
        _, prompt = self.resolve_prompt(trace.task.data)
        first = [{"role": "user", "content": prompt}]
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
            await ask([{"role": "user", "content": f"You said {answer['content']}. Go on."}])
        return ProgramResult(0, "", "")


class ForkTask(vf.Task[vf.TaskData]):
    @vf.metric
    async def passed(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) % 2)

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.metrics["passed"])

    @vf.group_reward(weight=0.5)
    async def most_concise(self, traces: list[vf.Trace]) -> list[float]:
        return self._shares(traces)

    @vf.group_reward(weight=0.5)
    async def fastest(self, traces: list[vf.Trace]) -> list[float]:
        return self._shares(traces)

    def _shares(self, traces: list[vf.Trace]) -> list[float]:
        passed = [trace.metrics.get("passed", 0.0) for trace in traces]
        return [each / max(sum(passed), 1.0) for each in passed]


class ForkTaskset(vf.Taskset[ForkTask, vf.TasksetConfig]):
    def load(self) -> list[ForkTask]:
        return [ForkTask(vf.TaskData(idx=i, prompt=f"Say {i}"), self.config.task) for i in range(4)]
