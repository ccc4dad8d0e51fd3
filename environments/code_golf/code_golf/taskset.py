"""Tasks in, metrics and rewards of single attempts out. Written against verifiers 0.3.1 and 0.4.0.

Per attempt   metric `passed` (0 or 1), metric `latency` (seconds), reward `correct` (weight 1, equals `passed`)

Attempts are compared in env.py.
"""

from __future__ import annotations

from typing import Literal

import verifiers.v1 as vf

from code_golf.sandbox import LIMITS, confinement, run_confined
from code_golf.scoring import is_correct, program_of
from code_golf.tasks import SUBSETS, SYSTEM_PROMPT


class CodeGolfData(vf.TaskData):
    expected: str
    """What the program must print, white space around it aside."""


class CodeGolfTask(vf.Task[CodeGolfData]):
    """Runs the reply's program once per attempt; all rewards are read off that one run."""

    @vf.metric
    async def run(self, trace: vf.Trace) -> dict[str, float]:
        """`passed` and `latency`, and in `trace.info["code_golf"]` what happened, for people.

        The program runs on the machine of the rollout process, under the limits of `sandbox`, whatever the harness's
        runtime is: the sandbox is the confinement, and scoring needs no live runtime.
        """
        program = program_of(trace.last_reply)
        outcome = await run_confined(program)
        passed = outcome.ok and is_correct(outcome.stdout, self.data.expected)
        trace.info["code_golf"] = {
            "program": program,
            "ending": outcome.ending,
            "stdout": outcome.stdout[:500],
            "stderr": outcome.stderr[-500:],
            "confinement": await confinement(),
        }
        # A failing program is given the longest time that any program may take: a finite number that cannot win.
        return {"passed": float(passed), "latency": outcome.seconds if passed else LIMITS.wall_seconds}

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.metrics["passed"])


class CodeGolfConfig(vf.TasksetConfig):
    subset: Literal["default", "original"] = "default"
    """`default`: tasks that a 135M model passes now and then. `original`: three harder ones."""


class CodeGolfTaskset(vf.Taskset[CodeGolfTask, CodeGolfConfig]):
    def load(self) -> list[CodeGolfTask]:
        return [
            CodeGolfTask(
                CodeGolfData(
                    idx=idx,
                    name=golf.name,
                    prompt=golf.prompt,
                    system_prompt=SYSTEM_PROMPT,
                    expected=golf.expected,
                ),
                self.config.task,
            )
            for idx, golf in enumerate(SUBSETS[self.config.subset])
        ]
