"""Verifiers 0.2 taskset for the contract tests: small, and bad in every way that is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import verifiers.v1 as vf
from silent_judge import JUDGE

__all__ = ["ContractTaskset"]


class EchoData(vf.TaskData):
    want: str


class EchoConfig(vf.TaskConfig):
    reward: str = "good"
    """good | raises | raises once | nan | hangs"""
    group_reward: str = "good"
    """good | raises | raises once | hangs"""
    setup: str = "good"
    """good | raises | hangs | loses a cancellation"""


class EchoTask(vf.Task[EchoData, vf.State, EchoConfig]):
    async def setup(self, trace: vf.Trace) -> None:
        if self.config.setup == "raises":
            raise OSError("no disk")
        if self.config.setup == "hangs":
            await asyncio.sleep(60)
        if self.config.setup == "loses a cancellation":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    def first(self, what: str, times: int) -> bool:
        """Whether this is one of the first `times` calls for `what`."""
        calls = self.__dict__.setdefault("_calls", Counter())
        calls[what] += 1
        return bool(calls[what] <= times)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.config.reward == "raises" or (self.config.reward == "raises once" and self.first("reward", 4)):
            raise KeyError("no such answer")
        if self.config.reward == "hangs":
            await JUDGE.ask()
        if self.config.reward == "nan" or trace.last_reply == "nan":
            return float("nan")
        return float(trace.last_reply == self.data.want)

    @vf.group_reward(weight=0.5)
    async def longest(self, traces: list[vf.Trace]) -> list[float]:
        if self.config.group_reward == "raises" or (
            self.config.group_reward == "raises once" and self.first("group", 1)
        ):
            raise ZeroDivisionError("no winner")
        if self.config.group_reward == "hangs":
            await JUDGE.ask()
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
