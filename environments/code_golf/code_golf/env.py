"""An episode: several attempts at one task, compared when all are over. Written against verifiers 0.3.1 and 0.4.0.

Per episode   reward `most_concise` (weight 0.5, fewest characters), reward `fastest` (weight 0.5, least latency)

The winners of each share it, so that an episode's contributions sum to 0.5 where somebody passed and to 0 where nobody did.
Every reward is a number in [0, 1]; an attempt's weighted sum is at most 2.
"""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf
from pydantic import Field

from code_golf.sandbox import LIMITS
from code_golf.scoring import program_of, shares


class CodeGolfEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    """The one seat, under the name that it has in a plain taskset."""
    attempts: int = Field(4, ge=1)
    """Attempts per episode, compared with each other."""


class CodeGolfEnv(vf.Env[CodeGolfEnvConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with asyncio.TaskGroup() as attempts:
            for _ in range(self.config.attempts):
                attempts.create_task(agents.agent.run(task))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        """Failed attempts are given their share too, which is none, as group rewards of Verifiers 0.2 do."""
        traces = episode.traces
        passed = [trace.metrics.get("passed") == 1.0 for trace in traces]
        lengths = [len(program_of(trace.last_reply)) for trace in traces]
        # A failed attempt may have no latency, or None for one.
        seconds = [trace.metrics.get("latency") or LIMITS.wall_seconds for trace in traces]
        for name, costs in (("most_concise", lengths), ("fastest", seconds)):
            for trace, share in zip(traces, shares(costs, passed), strict=True):
                trace.record_reward(name, share, weight=0.5)
