"""Preflight: one look from inside a Ray worker of each role, before anything slow starts.

`python -m miles_verifiers.training.preflight RUN_DIR` prints a table of what was expected and found (see expectations.py),
and as its last line the same as JSON. Each role also does one tiny real thing: the rollouts load the taskset and render one
prompt, the engine's side imports sglang, the trainer builds a model of one layer.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig, TrainingSection
from miles_verifiers.errors import TrainerError
from miles_verifiers.provision import expectations
from miles_verifiers.provision.expectations import Row
from miles_verifiers.record.rundir import RunDir, env_role
from miles_verifiers.rollout import interpreter
from miles_verifiers.system import process, progress
from miles_verifiers.training import cluster
from miles_verifiers.training.loop import vocabulary_size
from miles_verifiers.training.rollouts import Rollouts

_STACK_MODULES = {
    "torch": "torch",
    "sglang": "sglang",
    "megatron-core": "megatron.core",
    "ray": "ray",
    "transformers": "transformers",
    "openai": "openai",  # SGLang's; the environment has another
}
_TIMEOUT_S = 120.0


class StackWorker:
    """What the interpreter of engine and trainer says of itself."""

    def look(self) -> dict[str, Any]:
        packages = {}
        for name, module in _STACK_MODULES.items():
            # Imported, not looked up: a package whose import fails is not there. A namespace package has no file.
            loaded = importlib.import_module(module)
            origin = loaded.__file__ or str(next(iter(loaded.__path__)))
            packages[name] = {"version": importlib.metadata.version(name), "origin": origin}
        return {
            "executable": sys.executable,
            "sys_path": list(sys.path),
            "stdlib": interpreter.stdlib(),
            "packages": packages,
        }

    def one_layer(self, model: str, settings: TrainingSection, dtype: str) -> dict[str, Any]:
        from miles_verifiers.training.megatron import one_layer

        return one_layer.run(Path(model), settings, dtype)


def main(run_dir: Path) -> None:
    run = RunDir(run_dir)
    config = loading.read(run.config)
    rows, figures = look(config, run)
    print(expectations.as_text(rows), flush=True)
    expectations.refuse(rows)
    print(json.dumps({**figures, "facts": [asdict(row) for row in rows]}))


def look(config: RunConfig, run: RunDir) -> tuple[list[Row], dict[str, Any]]:
    """Start Ray and one worker of each role; returns their facts as rows, and what their tiny real things gave."""
    model = run.model(config.model.source)
    gpus = min(1, config.training.num_gpus)
    progress.report("preflight: starting Ray")
    with cluster.local_cluster(num_gpus=gpus):
        stack = cluster.start_actor(StackWorker, python=run.python("stack"), num_gpus=gpus)
        # Nothing is generated in a preflight; there is no engine yet.
        workers = Rollouts(config, run, model, ["http://127.0.0.1:9"], vocabulary_size(model), log="preflight")
        progress.report("preflight: a look from inside the workers")
        (seen_stack,) = cluster.wait([stack.look.remote()], what="the stack's preflight", timeout=_TIMEOUT_S)
        (layer,) = cluster.wait(
            [stack.one_layer.remote(str(model), config.training, config.model.dtype)],
            what="the trainer's preflight",
            timeout=_TIMEOUT_S,
            error=TrainerError,
        )
        seen_envs = workers.wait_ready(timeout=_TIMEOUT_S)
    expected = expectations.read(run.expected)
    seen = {"stack": seen_stack, **{env_role(number): each for number, each in enumerate(seen_envs)}}
    rows = [row for role, each in seen.items() for row in expectations.compare(expected[role], each)]
    rows.append(Row("stack", "model of one layer", "finite logits", f"{layer['parameters']} parameters"))
    for number, each in enumerate(seen_envs):
        environment = each["environment"]
        rows.append(Row(env_role(number), "taskset", "", f"{environment['id']}, {environment['n_tasks']} tasks"))
        rows.append(Row(env_role(number), "first prompt", "", f"{each['prompt_tokens']} tokens by {each['renderer']}"))
    return rows, {**seen, "trainer": layer}


if __name__ == "__main__":
    sys.exit(process.main_of_child(lambda: main(Path(sys.argv[1]))))
