"""A Verifiers 0.2.1 environment that looks out of a rollout: each starts a program, which prints its environment variables.

The names that it prints become the metric `secrets`: how many of those that the test set are among them. Rewards follow from
the reply's length, so that an untrained model gets different ones.
"""

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf

__all__ = ["SpyTaskset"]
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "COMPANY_LOGIN")
PROGRAM = "import json, os; print(json.dumps(dict(os.environ)))"


def of_parent() -> str:
    """What a program could read of the process that started it, as that was started."""
    return Path("/proc/self/environ").read_text(errors="replace")


class SpyTask(vf.Task[vf.TaskData]):
    @vf.metric
    async def looked(self, trace: vf.Trace) -> dict[str, float]:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, stdout=asyncio.subprocess.PIPE)
        printed = json.loads((await child.communicate())[0])
        seen = [name for name in SECRETS if name in printed or f"{name}=" in of_parent()]
        passed = float(len(trace.last_reply) % 2)
        return {"passed": passed, "secrets": float(len(seen)), "variables": float(len(printed)),
                "judge": float(printed.get("JUDGE_KEY") == "given")}  # fmt: skip

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


class SpyTaskset(vf.Taskset[SpyTask, vf.TasksetConfig]):
    def load(self) -> list[SpyTask]:
        return [SpyTask(vf.TaskData(idx=i, prompt=f"Say {i}"), self.config.task) for i in range(4)]
