"""RolloutWorker with real Verifiers 0.2.0, its TrainClient and renderers; the engine is a fake that can fail."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from code_golf_v1.tasks import SUBSETS
from fake_engine import FakeEngine, good_reply, until
from renderers.base import load_tokenizer

from miles_verifiers import config
from miles_verifiers.errors import EnvironmentPackageError, RolloutError
from miles_verifiers.rollout.worker import RolloutWorker
from miles_verifiers.samples import from_row

VOCAB = 320
N = 4


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
        f"environment.taskset={taskset}",
        "rollout.rollout_batch_size=2",
        f"rollout.n_samples_per_prompt={N}",
        "rollout.rollout_shuffle=false",
        "rollout.rollout_max_context_len=512",
    ]
    return config.load("cpu", overrides=[*fixed, *overrides]).model_dump()


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


async def rows_of(folder: Path, tmp_path: Path, handler: Any, *overrides: str, **known: Any) -> list[dict[str, Any]]:
    async with FakeEngine(handler) as engine, worker(engine, folder, tmp_path, *overrides, **known) as rollouts:
        return await rollouts.generate(0)


async def test_a_step(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker = Speaker(qwen3_folder)
    async with FakeEngine(speaker) as engine, worker(engine, qwen3_folder, tmp_path) as rollouts:
        first = await rollouts.generate(0)
        second = await rollouts.generate(1)
        progress = await rollouts.progress()
        assert rollouts._transport is not None
        assert not rollouts._transport._sessions  # nothing is kept of sessions that are over
    assert [row["index"] for row in [*first, *second]] == list(range(16))
    assert [row["group_index"] for row in [*first, *second]] == [i // N for i in range(16)]
    assert [row["task_index"] for row in [*first, *second]] == [0] * 4 + [1] * 4 + [2] * 4 + [0] * 4
    for row in first:
        sample = from_row(row)
        answer = speaker.ids(f"w{sample.task_index}")
        assert sample.tokens[-sample.response_length :] == answer
        prompt = speaker.tokenizer.decode(sample.tokens[: -sample.response_length])
        assert prompt == (
            "<|im_start|>system\nEcho.<|im_end|>\n"
            f"<|im_start|>user\nSay w{sample.task_index}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert sample.loss_mask == [1] * len(answer)
        assert sample.rollout_log_probs == [-0.5 - 0.25 * i for i in range(len(answer))]
        assert [(span.version, span.count) for span in sample.weight_versions] == [("7", len(answer))]
        assert sample.rewards == {"right": 1.0, "longest": 0.5}
        assert (sample.reward, sample.metrics, sample.status) == (1.5, {"length": 2.0}, "completed")
        assert (sample.renderer, sample.environment, sample.turns) == ("qwen3", "contract-env", 1)
        assert sample.prompt == f"Say w{sample.task_index}"
        assert sample.timings["total"] >= sample.timings["generation"] > 0
    assert (progress["done"], progress["total"], progress["failed"]) == (8, 8, 0)
    assert progress["tokens"] == sum(row["response_length"] for row in second)
    sampling = engine.bodies[0]["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["max_new_tokens"]) == (1.0, -1, 64)


async def test_code_golf(unknown_folder: Path, tmp_path: Path) -> None:
    wanted = SUBSETS["default"][0].expected  # the text of the first task, whatever it is
    programs = [f"print({wanted!r})", f"print({wanted!r} )", "print(1)", ""]
    speaker = Speaker(unknown_folder, lambda prompt, count: f"```python\n{programs[count % 4]}\n```")
    rows = await rows_of(
        unknown_folder,
        tmp_path,
        speaker,
        "rollout.rollout_batch_size=1",
        "rollout.max_concurrency=1",
        taskset="{ id = 'code-golf-v1' }",
    )
    assert [row["metrics"]["passed"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    assert [row["rewards"]["most_concise"] for row in rows] == [0.5, 0.0, 0.0, 0.0]
    assert sum(row["rewards"]["fastest"] for row in rows) == 0.5
    assert all(set(row["rewards"]) == {"correct", "most_concise", "fastest"} for row in rows)
    assert {row["renderer"] for row in rows} == {"default"}
    assert {row["error"] for row in rows} == {""}


FAILURES: dict[str, tuple[dict[str, Any], str, str]] = {
    "abort": ({"finish_reason": {"type": "abort", "message": "weights"}}, "aborted", "GenerationAborted"),
    "NaN": ({"completion_tokens": 99}, "failed", "ReplyInvalid"),
    "no version": ({"weight_version": ...}, "failed", "ReplyInvalid"),
}


@pytest.mark.parametrize("failure", sorted(FAILURES))
async def test_one_bad_reply_is_one_bad_sample(qwen3_folder: Path, tmp_path: Path, failure: str) -> None:
    meta, status, said = FAILURES[failure]
    speaker = Speaker(qwen3_folder)

    def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        reply = speaker(request, body)
        if next(numbers) == 3:
            reply["meta_info"].update(meta)
            reply["meta_info"] = {name: value for name, value in reply["meta_info"].items() if value is not ...}
        return reply

    numbers = itertools.count()
    rows = await rows_of(qwen3_folder, tmp_path, handler)
    bad = [row for row in rows if row["status"] != "completed"]
    assert len(rows) == 8
    assert [(row["status"], row["reward"]) for row in bad] == [(status, None)]
    assert bad[0]["error"].startswith(said)


async def test_an_empty_reply_is_no_sample(qwen3_folder: Path, tmp_path: Path) -> None:
    rows = await rows_of(
        qwen3_folder, tmp_path, lambda request, body: good_reply([], prompt_tokens=len(body["input_ids"]))
    )
    assert {(row["status"], row["reward"]) for row in rows} == {("failed", None)}
    assert all("reply is empty" in row["error"] for row in rows)


async def test_a_reply_that_is_cut_is_truncated(qwen3_folder: Path, tmp_path: Path) -> None:
    def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        return good_reply([65], prompt_tokens=len(body["input_ids"]), finish_reason={"type": "length", "length": 1})

    rows = await rows_of(qwen3_folder, tmp_path, handler)
    assert {(row["status"], row["error"]) for row in rows} == {("truncated", "")}


async def test_a_prompt_over_the_context_is_truncated(qwen3_folder: Path, tmp_path: Path) -> None:
    long = "{ id = 'contract-env', prompt = '" + "x" * 600 + "' }"
    rows = await rows_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), taskset=long)
    assert {row["status"] for row in rows} == {"truncated"}
    assert {row["stop_condition"] for row in rows} == {"context_length"}
    assert all("exceeds the context" in row["error"] for row in rows)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (
            "{ group_reward = 'raises' }",
            "scoring: TaskError: task EchoTask group scoring: ZeroDivisionError: no winner",
        ),
        ("{ group_reward = 'hangs' }", "scoring: group rewards took more than 0.5 s"),
        ("{ reward = 'nan' }", "scoring: the reward 'right' is nan"),
        ("{ reward = 'raises' }", "TaskError: task EchoTask scoring: KeyError"),
    ],
)
async def test_scoring_that_fails_keeps_the_tokens(qwen3_folder: Path, tmp_path: Path, task: str, said: str) -> None:
    taskset = f"{{ id = 'contract-env', task = {task} }}"
    rows = await rows_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), "rollout.scoring_timeout=0.5", taskset=taskset)
    assert len(rows) == 8
    for row in rows:
        assert (row["status"], row["reward"]) == ("failed", None)
        assert row["error"].startswith(said)
        assert row["response_length"] == 3
        assert row["weight_versions"] == [{"version": "7", "count": 3}]


async def stalled(request: Any) -> None:
    await asyncio.sleep(60)


async def test_a_stalled_rollout_ends_alone_and_is_aborted_in_the_engine(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker, numbers = Speaker(qwen3_folder), itertools.count()
    async with FakeEngine() as engine:
        engine.handler = lambda r, b: stalled(r) if next(numbers) == 2 else speaker(r, b)
        async with worker(engine, qwen3_folder, tmp_path, "rollout.rollout_timeout=0.5") as rollouts:
            began = time.monotonic()
            rows = await rollouts.generate(0)
            assert time.monotonic() - began < 10
            await until(lambda: len(engine.aborted) == 1)
    bad = [row for row in rows if row["error"]]
    assert [(row["status"], row["stop_condition"]) for row in bad] == [("failed", "harness_timeout")]
    assert engine.aborted == [engine.bodies[2]["rid"]]


async def test_a_request_over_its_deadline_is_a_failed_sample(qwen3_folder: Path, tmp_path: Path) -> None:
    rows = await rows_of(qwen3_folder, tmp_path, lambda request, body: stalled(request), "rollout.request_timeout=0.3")
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["error"].startswith("DeadlineExceeded: no complete answer within 0.3 s") for row in rows)


async def test_the_steps_deadline_ends_what_is_left_and_keeps_what_is_done(qwen3_folder: Path, tmp_path: Path) -> None:
    """Group 0 is through when the engine stops answering; of group 1 nothing is."""
    speaker, numbers = Speaker(qwen3_folder), itertools.count()

    def handler(request: Any, body: dict[str, Any]) -> Any:
        return stalled(request) if next(numbers) >= N else speaker(request, body)

    async with FakeEngine(handler) as engine:
        overrides = ("rollout.batch_timeout=1.5", "rollout.max_concurrency=2")
        async with worker(engine, qwen3_folder, tmp_path, *overrides) as rollouts:
            rows = await rollouts.generate(0)
            await until(lambda: len(engine.aborted) == 2)
    assert [row["status"] for row in rows] == ["completed"] * 4 + ["failed"] * 4
    reasons = sorted(row["error"] for row in rows[N:])
    assert (
        reasons
        == ["the step's deadline passed before the rollout began"] * 2
        + ["the step's deadline passed during the rollout"] * 2
    )


async def test_cancelling_a_step_aborts_it_in_the_engine(qwen3_folder: Path, tmp_path: Path) -> None:
    async with FakeEngine(lambda r, b: stalled(r)) as engine, worker(engine, qwen3_folder, tmp_path) as rollouts:
        step = asyncio.create_task(rollouts.generate(0))
        await until(lambda: len(engine.bodies) == 8)
        with pytest.raises(RolloutError, match="already"):
            await rollouts.generate(1)
        step.cancel()
        await asyncio.wait([step])
        assert step.cancelled()
        await until(lambda: sorted(engine.aborted) == sorted(body["rid"] for body in engine.bodies))


@pytest.mark.parametrize("folder", ["qwen3_folder", "unknown_folder"])
async def test_several_turns_extend_the_ids_of_the_first(
    folder: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """With the model's own renderer, which bridges, and with the default one, which renders each turn anew."""
    model = request.getfixturevalue(folder)
    speaker = Speaker(model, lambda prompt, count: "yes" if "Again" in prompt else "w0")
    rows = await rows_of(model, tmp_path, speaker, "environment.harness='two-turns'", "rollout.rollout_batch_size=1")
    for row in rows:
        assert (row["status"], row["turns"], row["response"]) == ("completed", 2, "yes")
        assert "forks" not in row["timings"]
        sampled = [t for t, m in zip(row["tokens"][-row["response_length"] :], row["loss_mask"], strict=True) if m]
        assert sampled == [*speaker.ids("w0"), *speaker.ids("yes")]
        assert speaker.tokenizer.decode(row["tokens"]).endswith(
            "assistant\nw0<|im_end|>\n<|im_start|>user\nAgain.<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>"
        )
        assert row["weight_versions"] == [{"version": "7", "count": sum(row["loss_mask"])}]


async def test_working_folders_lie_in_the_temporary_folder(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    speaker, folders = Speaker(qwen3_folder), list[Path]()

    def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        folder = work / request.headers["X-SMG-Routing-Key"]  # the trace's id, which also names the folder
        assert folder.is_dir()
        folders.append(folder)
        return speaker(request, body)

    await rows_of(qwen3_folder, tmp_path, handler)
    assert len(folders) == 8
    assert not any(folder.exists() for folder in folders)


async def test_max_turns_is_kept(qwen3_folder: Path, tmp_path: Path) -> None:
    overrides = ("environment.harness='two-turns'", "environment.max_turns=1")
    rows = await rows_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), *overrides)
    assert {(row["status"], row["stop_condition"], row["turns"]) for row in rows} == {("truncated", "max_turns", 1)}


async def test_inline_and_null_harness_make_the_same_samples(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The null harness's program runs here in this interpreter, where Verifiers would let uv fetch one for it."""
    from verifiers.v1.harnesses.null.harness import PROGRAM_SOURCE
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    program = tmp_path / "null_program.py"
    program.write_text(PROGRAM_SOURCE)

    async def prepared(self: Any, source: str, env: Any) -> list[str]:
        assert source == PROGRAM_SOURCE
        return [sys.executable, str(program)]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepared)
    made = {}
    for harness in ("inline", "null"):
        overrides = (
            f"environment.harness='{harness}'",
            "rollout.rollout_batch_size=1",
            "rollout.n_samples_per_prompt=2",
        )
        rows = await rows_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), *overrides)
        made[harness] = [{name: value for name, value in row.items() if name != "timings"} for row in rows]
    assert made["inline"] == made["null"]
    assert made["inline"][0]["status"] == "completed"


async def test_preflight_says_what_is_really_there(qwen3_folder: Path, tmp_path: Path) -> None:
    async with FakeEngine() as engine, worker(engine, qwen3_folder, tmp_path) as rollouts:
        found = await rollouts.preflight()
    assert found["executable"] == sys.executable
    assert found["packages"]["verifiers"]["version"] == "0.2.0"
    assert found["packages"]["renderers"]["origin"].endswith("renderers/__init__.py")
    assert found["environment"]["origin"].endswith("contract_env.py")
    assert found["environment"]["n_tasks"] == 3
    assert (found["renderer"], found["harness"]) == ("qwen3", "inline")
    assert "chat template agrees" in found["renderer_line"]
    assert found["prompt_tokens"] > 10
    assert engine.bodies == []
    assert "renderer qwen3" in (tmp_path / "logs" / "rollout.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "taskset", "said"),
    [
        ((), "{ id = 'no-such-environment' }", "no_such_environment"),
        ((), "{ id = 'owner/name' }", "owner/name"),
        ((), "{ id = '' }", "taskset.id"),
        ((), "{ id = 'contract-env', size = 0 }", "the taskset is empty"),
        ((), "{ id = 'contract-env', colour = 1 }", "colour"),
        (("environment.verifiers='0.3.1'",), "{ id = 'contract-env' }", "0.2.0 is installed"),
        (("environment.harness='no-such-harness'",), "{ id = 'contract-env' }", "no_such_harness"),
        ((), f"{{ id = 'contract-env', prompt = '{'x' * 600}' }}", "context length is 512"),
    ],
)
async def test_what_cannot_work_fails_in_preflight(
    qwen3_folder: Path, tmp_path: Path, overrides: tuple[str, ...], taskset: str, said: str
) -> None:
    async with FakeEngine() as engine, worker(engine, qwen3_folder, tmp_path, *overrides, taskset=taskset) as rollouts:
        with pytest.raises(EnvironmentPackageError, match=said) as caught:
            await rollouts.preflight()
    assert caught.value.where
