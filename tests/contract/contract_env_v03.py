"""contract_env for the Env API: the same tasks, rewards and faults; attempts are compared in `finalize`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import verifiers.v1 as vf
from silent_judge import JUDGE


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


class ContractEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    attempts: int = 2


class ContractEnv(vf.Env[ContractEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with asyncio.TaskGroup() as attempts:
            for _ in range(self.config.attempts):
                attempts.create_task(agents.agent.run(task))

    async def finalize(self, task: EchoTask, episode: vf.Episode) -> None:
        if task.config.group_reward == "raises" or (
            task.config.group_reward == "raises once" and task.first("group", 1)
        ):
            raise ZeroDivisionError("no winner")
        if task.config.group_reward == "hangs":
            await JUDGE.ask()
        lengths = [len(trace.last_reply) for trace in episode.traces]
        for trace, length in zip(episode.traces, lengths, strict=True):
            trace.record_reward("longest", float(length == max(lengths)), 0.5)
