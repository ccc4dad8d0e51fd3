"""Preflight: one look from inside a Ray worker of each role, before anything slow starts.

`python -m miles_verifiers.training.preflight RUN_DIR` prints what it saw as JSON. What was asked of Ray proves nothing: an
environment variable, Ray's own rewriting of PYTHONPATH or a stray package can put a worker elsewhere. So each worker
says itself which interpreter it is, and where the packages that matter come from.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from miles_verifiers import config as configuration
from miles_verifiers import process, progress
from miles_verifiers.errors import ComponentError
from miles_verifiers.rundir import RunDir, env_role
from miles_verifiers.training import cluster
from miles_verifiers.training.loop import vocabulary_size
from miles_verifiers.training.rollouts import Rollouts

_STACK_MODULES = {
    "torch": "torch",
    "sglang": "sglang",
    "megatron-core": "megatron.core",
    "ray": "ray",
    "transformers": "transformers",
}
_TIMEOUT_S = 120.0


class StackWorker:
    """What the trainer's interpreter says of itself."""

    def look(self) -> dict[str, Any]:
        # Megatron's import takes seconds and prints; the origin of a namespace package is its path.
        origins = {}
        for name, module in _STACK_MODULES.items():
            loaded = importlib.import_module(module)
            origins[name] = loaded.__file__ or str(next(iter(loaded.__path__)))
        versions = {name: importlib.metadata.version(name) for name in _STACK_MODULES}
        return {"executable": sys.executable, "versions": versions, "origins": origins}


def check_interpreter(role: str, executable: str, expected: Path) -> None:
    """Raises ComponentError where a worker of `role` runs in another venv than that of the Python `expected`."""
    # Of the venv's folder, not of the file: all venvs' Pythons are links to the same one.
    if Path(executable).parent.resolve() != expected.parent.resolve():
        raise ComponentError(
            f"a Ray worker of the role {role} runs in another interpreter: {executable}",
            where=f"expected: {expected}",
            next_step="look for variables that redirect Python (PYTHONHOME, a Ray runtime_env of the cluster)",
        )


def main(run_dir: Path) -> None:
    run = RunDir(run_dir)
    config = configuration.read(run.config)
    model = run.model(config.model.source)
    progress.report("preflight: starting Ray")
    with cluster.local_cluster(num_gpus=0):
        stack = cluster.start_actor(StackWorker, python=run.python("stack"))
        # Nothing is generated in a preflight; there is no engine yet.
        workers = Rollouts(config, run, model, ["http://127.0.0.1:9"], vocabulary_size(model), log="preflight")
        progress.report("preflight: a look from inside the workers")
        (seen_stack,) = cluster.wait([stack.look.remote()], what="the stack's preflight", timeout=_TIMEOUT_S)
        seen_envs = workers.wait_ready(timeout=_TIMEOUT_S)
    check_interpreter("stack", seen_stack["executable"], run.python("stack"))
    seen = {"stack": seen_stack}
    for number, seen_env in enumerate(seen_envs):
        role = env_role(number)
        check_interpreter(role, seen_env["executable"], run.python(role))
        seen[role] = seen_env
    print(json.dumps(seen))


if __name__ == "__main__":
    sys.exit(process.main_of_child(lambda: main(Path(sys.argv[1]))))
