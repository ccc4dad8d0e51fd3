"""Code golf: print a value with a short, quick Python program. Verifiers 0.3+ taskset and environment `code-golf`.

taskset.py   the tasks: metrics `passed`, `latency`; reward `correct`
env.py       an episode of several attempts, compared in `finalize`: rewards `most_concise`, `fastest`

Everything else (tasks, scoring, sandbox) is that of code_golf_v1, by links: the two give equal rewards for equal replies.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would slow down confine.py, which is started for every program

if TYPE_CHECKING:
    from code_golf.env import CodeGolfEnv
    from code_golf.taskset import CodeGolfTaskset

__all__ = ["CodeGolfEnv", "CodeGolfTaskset"]


def __getattr__(name: str) -> object:
    # Verifiers finds taskset and environment through `__all__`. Loaded on demand, so that the rest can be used in an
    # interpreter without Verifiers.
    if name == "CodeGolfTaskset":
        from code_golf.taskset import CodeGolfTaskset

        return CodeGolfTaskset
    if name == "CodeGolfEnv":
        from code_golf.env import CodeGolfEnv

        return CodeGolfEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
