"""A Verifiers 0.2.0 environment whose rewards follow from a reply's text alone, so that two runs can be compared exactly."""

import verifiers.v1 as vf

__all__ = ["ParityTaskset"]


class ParityTask(vf.Task[vf.TaskData]):
    @vf.reward
    async def odd(self, trace: vf.Trace) -> float:
        """1.0 for about every other reply of an untrained model."""
        return float(sum(map(ord, trace.last_reply)) % 2)

    @vf.metric
    async def passed(self, trace: vf.Trace) -> float:
        return await self.odd(trace)


class ParityTaskset(vf.Taskset[ParityTask, vf.TasksetConfig]):
    def load(self) -> list[ParityTask]:
        """Prompts of unequal length with a beginning in common, which the engine's prefix cache shares among them."""
        return [
            ParityTask(vf.TaskData(idx=i, prompt="Say something. " + "More. " * i), self.config.task) for i in range(7)
        ]
