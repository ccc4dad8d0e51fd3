"""Code golf: print a value with a short, quick Python program. Verifiers 0.2 taskset `code-golf-v1`.

tasks.py     what is asked and what must be printed, with measured pass rates
scoring.py   reply -> program, group -> shares (pure)
sandbox.py   runs one program under limits and says which limits are in force
confine.py   the supervisor of one program, a process that sandbox.py starts; jail.py its limits, kernel.py its calls
taskset.py   the Verifiers side: metrics `passed`, `latency`; rewards `correct`, `most_concise`, `fastest`
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would slow down confine.py, which is started for every program

if TYPE_CHECKING:
    from code_golf_v1.taskset import CodeGolfTaskset

__all__ = ["CodeGolfTaskset"]


def __getattr__(name: str) -> object:
    # Verifiers finds the taskset through `__all__`. Loaded on demand, so that the tasks, the scoring and the sandbox
    # can be used and tested in an interpreter without Verifiers.
    if name == "CodeGolfTaskset":
        from code_golf_v1.taskset import CodeGolfTaskset

        return CodeGolfTaskset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
