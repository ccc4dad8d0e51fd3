"""RolloutWorker with real Verifiers, its TrainClient and renderers; the engine is a fake that can fail.

The same tests for every supported Verifiers; what differs between its two APIs is said by `per_api`.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, good_reply, until
from rollouts import (
    GOLF,
    OTHER,
    STOP,
    SUBSETS,
    VERIFIERS,
    N,
    Speaker,
    per_api,
    rows_of,
    run_programs_here,
    sessions_of,
    step_of,
    worker,
)

from miles_verifiers.errors import EnvironmentPackageError, RolloutError
from miles_verifiers.record.samples import from_row


async def test_a_step(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker = Speaker(qwen3_folder)
    async with FakeEngine(speaker) as engine, worker(engine, qwen3_folder, tmp_path) as rollouts:
        step = await rollouts.generate(0)
        first, second = step["rows"], (await rollouts.generate(1, step["cursor"]))["rows"]
        progress = await rollouts.progress()
        assert not sessions_of(rollouts)  # nothing is kept of sessions that are over
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
        taskset=f"{{ id = '{GOLF}' }}",
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
    def nothing(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        return good_reply([], prompt_tokens=len(body["input_ids"]))

    step = await step_of(qwen3_folder, tmp_path, nothing, STOP)
    assert (step["rows"], step["ending"], step["dropped"]) == ([], "too many dropped", {"empty reply": 2})
    assert step["causes"] == {"empty reply": 2 * N}


async def test_a_reply_that_is_cut_is_truncated(qwen3_folder: Path, tmp_path: Path) -> None:
    def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        return good_reply([65], prompt_tokens=len(body["input_ids"]), finish_reason={"type": "length", "length": 1})

    rows = await rows_of(qwen3_folder, tmp_path, handler)
    assert {(row["status"], row["error"]) for row in rows} == {("truncated", "")}


async def test_a_prompt_over_the_context_is_no_sample(qwen3_folder: Path, tmp_path: Path) -> None:
    long = "{ id = 'contract-env', prompt = '" + "x" * 600 + "' }"
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), STOP, taskset=long)
    assert step["rows"] == []
    assert set(step["dropped"]) == {"prompt too long"}
    assert step["dropped"]["prompt too long"] >= 2, "a third group may end in the moment of the stop"


@pytest.mark.parametrize(
    ("task", "cause", "logged"),
    [
        (
            "{ group_reward = 'raises' }",
            "group scoring failed",
            per_api(
                "scoring: TaskError: task EchoTask group scoring: ZeroDivisionError: no winner",
                "scoring: ZeroDivisionError: no winner",
            ),
        ),
        ("{ group_reward = 'hangs' }", "scoring deadline", "scoring: group rewards took more than 0.5 s"),
        ("{ reward = 'nan' }", "bad reward", "scoring: the reward 'right' is nan"),
        ("{ reward = 'raises' }", "scoring failed", "TaskError: task EchoTask scoring: KeyError"),
        ("{ reward = 'hangs' }", "scoring deadline", "TaskError: scoring timed out"),
        ("{ setup = 'hangs' }", "setup deadline", "TaskError: task setup timed out"),
        ("{ setup = 'raises' }", "setup failed", "TaskError: task setup: OSError"),
    ],
)
async def test_what_fails_is_counted_under_its_name(
    qwen3_folder: Path, tmp_path: Path, task: str, cause: str, logged: str
) -> None:
    taskset = f"{{ id = 'contract-env', task = {task} }}"
    overrides = ("rollout.scoring_timeout=0.5", "rollout.setup_timeout=0.5", STOP)
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), *overrides, taskset=taskset)
    assert (step["rows"], step["ending"], set(step["dropped"])) == ([], "too many dropped", {cause})
    assert step["dropped"][cause] >= 2  # a third one may have ended in the same moment
    assert step["causes"] == {cause: step["dropped"][cause] * N}
    assert logged in (tmp_path / "logs" / "rollout.log").read_text()


@pytest.mark.parametrize(
    ("task", "retries", "retried"),
    [
        ("{ group_reward = 'raises once' }", "rollout.scoring_retries=1", {}),
        ("{ reward = 'raises once' }", "rollout.rollout_retries=1", {"scoring failed": 2 * N}),
    ],
)
async def test_what_fails_once_is_tried_again(
    qwen3_folder: Path, tmp_path: Path, task: str, retries: str, retried: dict[str, int]
) -> None:
    taskset = f"{{ id = 'contract-env', task = {task} }}"
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), STOP, retries, taskset=taskset)
    assert (step["ending"], step["dropped"], step["retried"]) == ("full", {}, retried)
    assert {(row["status"], row["reward"]) for row in step["rows"]} == {("completed", 1.5)}
    assert {row["timings"].get("retries", 0.0) for row in step["rows"]} == {1.0 if retried else 0.0}


async def stalled(request: Any) -> None:
    await asyncio.sleep(60)


async def test_a_stalled_rollout_ends_alone_and_is_aborted_in_the_engine(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker, numbers = Speaker(qwen3_folder), itertools.count()
    async with FakeEngine() as engine:
        engine.handler = lambda r, b: stalled(r) if next(numbers) == 2 else speaker(r, b)
        async with worker(engine, qwen3_folder, tmp_path, "rollout.rollout_timeout=0.5") as rollouts:
            began = time.monotonic()
            rows = (await rollouts.generate(0))["rows"]
            assert time.monotonic() - began < 10
            await until(lambda: len(engine.aborted) == 1)
    bad = [row for row in rows if row["error"]]
    assert [(row["status"], row["stop_condition"]) for row in bad] == [("failed", "harness_timeout")]
    assert engine.aborted == [engine.bodies[2]["rid"]]


async def test_a_request_over_its_deadline_is_counted_as_that(qwen3_folder: Path, tmp_path: Path) -> None:
    overrides = ("rollout.request_timeout=0.3", STOP)
    step = await step_of(qwen3_folder, tmp_path, lambda request, body: stalled(request), *overrides)
    assert (step["dropped"], step["causes"]) == ({"request deadline": 2}, {"request deadline": 2 * N})


async def test_a_groups_deadline_ends_it_alone_and_aborts_it_in_the_engine(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker, numbers = Speaker(qwen3_folder), itertools.count()
    async with FakeEngine() as engine:
        engine.handler = lambda r, b: stalled(r) if next(numbers) == 2 else speaker(r, b)
        async with worker(engine, qwen3_folder, tmp_path, "rollout.group_timeout=1.0") as rollouts:
            step = await rollouts.generate(0)
            await until(lambda: len(engine.aborted) == 1)
    # Group rewards want all of a group, so it is dropped and the third task takes its place.
    assert (step["ending"], len(step["rows"])) == ("full", 2 * N)
    assert sum(step["dropped"].values()) == 1
    assert step["causes"]["group deadline"] == 1
    assert engine.aborted == [engine.bodies[2]["rid"]]


async def test_the_steps_deadline_ends_what_is_left_and_keeps_what_is_done(qwen3_folder: Path, tmp_path: Path) -> None:
    """Group 0 is through when the engine stops answering; of group 1 nothing is."""
    speaker, numbers = Speaker(qwen3_folder), itertools.count()

    def handler(request: Any, body: dict[str, Any]) -> Any:
        return stalled(request) if next(numbers) >= N else speaker(request, body)

    async with FakeEngine(handler) as engine:
        overrides = ("rollout.batch_timeout=1.5", "rollout.max_concurrency=2")
        async with worker(engine, qwen3_folder, tmp_path, *overrides) as rollouts:
            step = await rollouts.generate(0)
            await until(lambda: len(engine.aborted) == 2)
    assert (step["ending"], [row["status"] for row in step["rows"]]) == ("deadline", ["completed"] * N)
    assert (step["dropped"], step["causes"]) == ({"batch deadline": 1}, {"batch deadline": N})
    log = (tmp_path / "logs" / "rollout.log").read_text()
    assert log.count("the step's deadline passed before the rollout began") == 2
    assert log.count("the step's deadline passed during the rollout") == 2


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
        assert row["forks"] == []
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
    run_programs_here(monkeypatch, tmp_path)
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
    assert found["packages"]["verifiers"]["version"] == VERIFIERS
    assert found["packages"]["renderers"]["origin"].endswith("renderers/__init__.py")
    assert found["environment"]["origin"].endswith(per_api("contract_env_v02.py", "contract_env_v03.py"))
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
        (("environment.verifiers='0.3.0'",), "{ id = 'contract-env' }", "0.3.0 is not supported"),
        ((f"environment.verifiers='{OTHER}'",), "{ id = 'contract-env' }", f"{VERIFIERS} is installed"),
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
