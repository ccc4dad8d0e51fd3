"""What the tests of rollouts have in common: a model that speaks, a worker in front of a fake engine."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, good_reply
from renderers.base import load_tokenizer

from miles_verifiers.config import loading
from miles_verifiers.rollout.interpreter import SUPPORTED
from miles_verifiers.rollout.worker import RolloutWorker

VOCAB = 320
N = 4
VERIFIERS = version("verifiers")


def per_api(episodes: Any, env: Any) -> Any:
    """What is expected of the episode API (0.2.x) and of the Env API (0.3 and newer)."""
    return episodes if SUPPORTED[VERIFIERS] == "episodes" else env


OTHER = next(supported for supported in SUPPORTED if supported != VERIFIERS)
GOLF = per_api("code-golf-v1", "code-golf")
SUBSETS = import_module(f"{GOLF.replace('-', '_')}.tasks").SUBSETS


class Speaker:
    """An engine's model: answers "Say x" with x, or as `says` decides."""

    def __init__(self, folder: Path, says: Callable[[str, int], str] | None = None) -> None:
        self.tokenizer = load_tokenizer(str(folder))
        self.says = says or (lambda prompt, count: re.findall(r"Say (\w+)", prompt)[-1])
        self.count = itertools.count()

    def ids(self, text: str) -> list[int]:
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def __call__(self, request: Any, body: dict[str, Any]) -> dict[str, Any]:
        text = self.says(self.tokenizer.decode(body["input_ids"]), next(self.count))
        return good_reply(self.ids(text), prompt_tokens=len(body["input_ids"]))


def run_config(*overrides: str, taskset: str = "{ id = 'contract-env' }") -> dict[str, Any]:
    fixed = [
        f"environment.verifiers='{VERIFIERS}'",
        f"environment.taskset={taskset}",
        "rollout.rollout_batch_size=2",
        f"rollout.n_samples_per_prompt={N}",
        "rollout.rollout_shuffle=false",
        "rollout.rollout_max_context_len=512",
    ]
    return loading.load("cpu", overrides=[*fixed, *overrides]).model_dump()


@asynccontextmanager
async def worker(
    engine: FakeEngine, folder: Path, tmp_path: Path, *overrides: str, **known: Any
) -> AsyncIterator[RolloutWorker]:
    made = RolloutWorker(
        run_config(*overrides, **known), str(folder), [engine.url], VOCAB, str(tmp_path / "logs" / "rollout.log")
    )
    try:
        yield made
    finally:
        await made.close()


def sessions_of(rollouts: RolloutWorker) -> dict[str, Any]:
    assert rollouts._parts is not None
    wire: Any = rollouts._parts.training.wire
    return getattr(wire, "wire", wire)._sessions


async def step_of(folder: Path, tmp_path: Path, handler: Any, *overrides: str, **known: Any) -> dict[str, Any]:
    async with FakeEngine(handler) as engine, worker(engine, folder, tmp_path, *overrides, **known) as rollouts:
        return await rollouts.generate(0)


async def rows_of(folder: Path, tmp_path: Path, handler: Any, *overrides: str, **known: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await step_of(folder, tmp_path, handler, *overrides, **known))["rows"]
    return rows


def sampled_of(row: dict[str, Any]) -> list[int]:
    """Ids of a row that the model made, and that are trained on."""
    return [t for t, m in zip(row["tokens"][-row["response_length"] :], row["loss_mask"], strict=True) if m]


STOP = "rollout.max_dropped_groups=1"
"""Where nothing can be trained on: the second group that is dropped ends the step."""


def run_programs_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs of Verifiers' harnesses run in this interpreter, where Verifiers would let uv fetch one for them."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def prepared(self: Any, source: str, env: Any, **_: Any) -> list[str]:
        program = tmp_path / "program.py"
        program.write_text(source)
        return [sys.executable, str(program)]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
