"""Verifiers 0.2 taskset and harness for the contract tests: small, and bad in every way that is asked for."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.runtimes import ProgramResult

__all__ = ["ContractTaskset"]


class EchoData(vf.TaskData):
    want: str


class EchoConfig(vf.TaskConfig):
    reward: str = "good"
    """good | raises | raises once | nan | hangs"""
    group_reward: str = "good"
    """good | raises | raises once | hangs"""
    setup: str = "good"
    """good | raises | hangs"""


class EchoTask(vf.Task[EchoData, vf.State, EchoConfig]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.config.setup == "raises":
            raise OSError("no disk")
        if self.config.setup == "hangs":
            await asyncio.sleep(60)

    def _once(self, what: str) -> bool:
        """True the first N times, one for each rollout of the first attempt."""
        calls = self.__dict__.setdefault("_calls", Counter())
        calls[what] += 1
        return bool(calls[what] <= (1 if what == "group" else 4))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.config.reward == "raises" or (self.config.reward == "raises once" and self._once("one")):
            raise KeyError("no such answer")
        if self.config.reward == "hangs":
            await asyncio.sleep(60)
        return float("nan") if self.config.reward == "nan" else float(trace.last_reply == self.data.want)

    @vf.group_reward(weight=0.5)
    async def longest(self, traces: list[vf.Trace]) -> list[float]:
        if self.config.group_reward == "raises" or (self.config.group_reward == "raises once" and self._once("group")):
            raise ZeroDivisionError("no winner")
        if self.config.group_reward == "hangs":
            await asyncio.sleep(60)
        lengths = [len(trace.last_reply) for trace in traces]
        return [float(length == max(lengths)) for length in lengths]


class ContractConfig(vf.TasksetConfig):
    task: EchoConfig = EchoConfig()
    size: int = 3
    prompt: str = "Say {want}"


class ContractTaskset(vf.Taskset[EchoTask, ContractConfig]):
    def load(self) -> list[EchoTask]:
        return [
            EchoTask(
                EchoData(idx=i, prompt=self.config.prompt.format(want=f"w{i}"), system_prompt="Echo.", want=f"w{i}"),
                self.config.task,
            )
            for i in range(self.config.size)
        ]


class TwoTurns(Harness[HarnessConfig]):
    """Asks twice; the second question follows the first answer."""

    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str]
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
