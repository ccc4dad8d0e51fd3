"""Public environments and harnesses, unmodified, on every supported Verifiers; the engine is a fake.

marble-v1   a package of the registry: single turn, endless tasks     bash   Verifiers' harness with tools (0.2.0: `default`)
textarena   Verifiers' own taskset over the package textarena: many turns of a game. In 0.2.x a user simulator plays it, a
            server beside the rollout; from 0.3 on the environment's own `run`

What exists for the Env API alone is in test_public_envs_v03.py. docs/environments.md lists all.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from fake_engine import FakeEngine, until
from rollouts import VERIFIERS, Speaker, rows_of, run_programs_here, sampled_of, step_of, worker

from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.rollout import look

CONTEXT = "rollout.rollout_max_context_len=8192"
ONE = "rollout.rollout_batch_size=1"
PAIR = "rollout.n_samples_per_prompt=2"
IN_ORDER = "rollout.max_concurrency=1"
FIRST = "rollout.max_dropped_groups=0"
TWO_TASKS = "environment.endless_tasks=2"


def layouts() -> list[str]:
    """Replies for the first task of marble-v1: one that solves it, one that is legal and misses, and no layout at all."""
    from marble_v1 import levels
    from marble_v1.sim import Placement, simulate

    made = next(levels.stream(0, 1, ring_half_width=118.0))
    (piece,) = made.solution
    miss = Placement(piece.kind, -piece.x, piece.y, piece.rot_steps)
    assert not simulate(made.level, [miss]).scored
    layout = [json.dumps([{"kind": p.kind.value, "x": p.x, "y": p.y, "rot": p.rot_steps}]) for p in (piece, miss)]
    return [f"Like this:\n```json\n{text}\n```" for text in layout] + ["I cannot say."]


async def test_single_turn(qwen3_folder: Path, tmp_path: Path) -> None:
    replies = layouts()
    speaker = Speaker(qwen3_folder, lambda prompt, count: replies[count])
    overrides = (ONE, CONTEXT, IN_ORDER, TWO_TASKS, "rollout.n_samples_per_prompt=3")
    rows = await rows_of(qwen3_folder, tmp_path, speaker, *overrides, taskset="{ id = 'marble-v1' }")
    assert [(row["status"], row["turns"], row["error"]) for row in rows] == [("completed", 1, "")] * 3
    assert [row["rewards"]["scored"] for row in rows] == [1.0, 0.0, 0.0]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0]
    assert [sampled_of(row) for row in rows] == [speaker.ids(reply) for reply in replies]


async def test_the_tasks_of_an_endless_taskset_are_bounded(qwen3_folder: Path, tmp_path: Path) -> None:
    overrides = (CONTEXT, "environment.endless_tasks=3")
    async with (
        FakeEngine() as engine,
        worker(engine, qwen3_folder, tmp_path, *overrides, taskset="{ id = 'marble-v1' }") as rollouts,
    ):
        found = await rollouts.preflight()
    assert found["environment"]["n_tasks"] == 3
    assert found["environment"]["origin"].endswith("marble_v1/taskset.py")


@pytest.fixture(scope="module")
def hangman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The game's taskset, with NLTK's word list made of one word. NLTK would fetch the list; through a proxy it does not."""
    data = tmp_path_factory.mktemp("nltk")
    words = data / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        words.joinpath(name).write_text("plan\n")
    with pytest.MonkeyPatch.context() as variables:
        variables.setenv("NLTK_DATA", str(data))
        variables.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
        variables.setenv("https_proxy", "http://127.0.0.1:9")
        bound = ", num_tasks = 2" if VERIFIERS == "0.2.0" else ""  # later ones have no end
        yield f"{{ id = 'textarena', game = 'Hangman-v0'{bound} }}"


def guesses(*replies: str) -> Callable[[str, int], str]:
    """A player that says one of `replies` at each turn, the last one from then on."""
    return lambda prompt, count: replies[min(prompt.count("<|im_start|>assistant"), len(replies)) - 1]


GAME = (ONE, PAIR, CONTEXT, TWO_TASKS, FIRST, "rollout.setup_timeout=100")
"""In 0.2.x each rollout starts a server of the game's own, which imports Verifiers and NLTK anew."""


async def servers_ended() -> None:
    """Verifiers 0.2.x ends a rollout's servers without waiting (runtimes/subprocess.py `cleanup`); none may stay."""
    await until(lambda: not psutil.Process().children())


@pytest.mark.timeout(180)
async def test_many_turns(qwen3_folder: Path, tmp_path: Path, hangman: str) -> None:
    speaker = Speaker(qwen3_folder, guesses("I guess [p]", "It is [plan]"))
    rows = await rows_of(qwen3_folder, tmp_path, speaker, *GAME, taskset=hangman)
    await servers_ended()
    for row in rows:
        assert (row["status"], row["turns"], row["error"]) == ("completed", 2, "")
        assert sampled_of(row) == [*speaker.ids("I guess [p]"), *speaker.ids("It is [plan]")]
        said = speaker.tokenizer.decode(row["tokens"][-row["response_length"] :])
        assert "  P   _   _   _<|im_end|>" in said, "the game's board is in the sample, with loss mask 0"
        assert row["rewards"] == {"game_reward": 1.0}


@pytest.mark.timeout(180)
async def test_a_game_that_is_lost(qwen3_folder: Path, tmp_path: Path, hangman: str) -> None:
    """Control: six wrong letters."""
    speaker = Speaker(qwen3_folder, guesses(*(f"[{letter}]" for letter in "bcdefg")))
    rows = await rows_of(qwen3_folder, tmp_path, speaker, *GAME, taskset=hangman)
    await servers_ended()
    for row in rows:
        assert (row["status"], row["turns"]) == ("completed", 6)
        assert row["reward"] < 1.0


CALL = """<tool_call>
{"name": "bash", "arguments": {"command": "echo $((6 * 7))"}}
</tool_call>"""
BASH = f"environment.harness='{'default' if VERIFIERS == '0.2.0' else 'bash'}'"


async def test_tools(qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_programs_here(monkeypatch, tmp_path)
    speaker = Speaker(qwen3_folder, lambda prompt, count: "w0" if "<tool_response>" in prompt else CALL)
    rows = await rows_of(qwen3_folder, tmp_path, speaker, ONE, CONTEXT, BASH, PAIR)
    for row in rows:
        assert (row["status"], row["turns"], row["error"]) == ("completed", 2, "")
        assert sampled_of(row) == [*speaker.ids(CALL), *speaker.ids("w0")]
        response = speaker.tokenizer.decode(row["tokens"][-row["response_length"] :])
        assert "<tool_response>\n42\n" in response  # what the tool printed, with loss mask 0
        assert row["rewards"]["right"] == 1.0


async def test_tools_need_a_renderer_that_knows_them(
    unknown_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the default renderer has no tools, which fails every rollout by name."""
    run_programs_here(monkeypatch, tmp_path)
    step = await step_of(unknown_folder, tmp_path, Speaker(unknown_folder), ONE, PAIR, CONTEXT, BASH, FIRST)
    assert (step["rows"], step["ending"]) == ([], "too many dropped")
    assert "tools" in (tmp_path / "logs" / "rollout.log").read_text()


@pytest.fixture
def classic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package as they were made before tasksets."""
    module: Any = ModuleType("classic_env")
    module.__file__ = "/environments/classic_env.py"
    module.load_environment = lambda **_: None
    monkeypatch.setitem(sys.modules, "classic_env", module)
    module.__spec__ = type(sys.__spec__)("classic_env", None)
    return module


async def test_an_environment_of_the_classic_api_is_refused_by_name(
    qwen3_folder: Path, tmp_path: Path, classic: ModuleType
) -> None:
    with pytest.raises(EnvironmentPackageError, match="classic_env is made for Verifiers' classic API"):
        look.main({"id": "classic_env"})
    async with (
        FakeEngine() as engine,
        worker(engine, qwen3_folder, tmp_path, taskset="{ id = 'classic-env' }") as rollouts,
    ):
        with pytest.raises(EnvironmentPackageError, match="classic API"):
            await rollouts.preflight()


def test_a_package_that_serves_both_apis_is_not(classic: ModuleType) -> None:
    """Control: some packages keep `load_environment` beside their taskset."""
    from contract_env import ContractTaskset

    classic.ContractTaskset = ContractTaskset  # type: ignore[attr-defined]
    classic.__all__ = ["ContractTaskset"]  # type: ignore[attr-defined]
    look.refuse_classic("classic-env", classic)
