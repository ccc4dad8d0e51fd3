"""The run directory: which file lies where. A leaf; nothing here reads or writes.

manifest.json  config.toml  expected.json  run.log  venvs/<role> -> cache
models/<name> -> cache   models/<name>_torch_dist/   checkpoints/iter_0000001/
dump/rollout/000000.parquet  metrics.jsonl  logs/engine-0.log
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDir:
    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def lock(self) -> Path:
        return self.path / ".lock"

    @property
    def expected(self) -> Path:
        """What `prepare` expects a look from inside the workers to find."""
        return self.path / "expected.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def sync(self) -> Path:
        """Weights on their way to the engine; emptied when the run ends."""
        return self.path / "sync"

    def python(self, role: str) -> Path:
        return self.path / "venvs" / role / "bin" / "python"

    def model(self, source: str) -> Path:
        return self.path / "models" / model_name(source)

    def torch_dist(self, source: str) -> Path:
        return self.path / "models" / f"{model_name(source)}_torch_dist"


def env_role(number: int) -> str:
    """The role of a run's environment, by its number in the configuration."""
    return "env" if number == 0 else f"env-{number}"


def model_name(source: str) -> str:
    """The folder name of a model source: `hf:Qwen/Qwen3-0.6B` is Qwen3-0.6B, `pypi:a==1` is a-1."""
    _, _, rest = source.partition(":")
    name = rest.rstrip("/").rsplit("/", 1)[-1].replace("==", "-")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name) or "model"


def cache_root() -> Path:
    """MILES_VERIFIERS_CACHE, else the folder that the XDG convention gives."""
    own = os.environ.get("MILES_VERIFIERS_CACHE")
    if own:
        return Path(own).expanduser().resolve()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "miles_verifiers"
