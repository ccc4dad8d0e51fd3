"""Evaluations, seeds and filters with real Verifiers: the same group scoring, own sampling, and no task that ends it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from rollouts import N, Speaker, step_of, worker

from miles_verifiers.errors import ConfigError, EnvironmentPackageError
from miles_verifiers.record.samples import from_row
from miles_verifiers.rollout.evaluation import summary

EVALUATED = ("rollout.eval_interval=1", "rollout.n_samples_per_eval_prompt=2")


async def test_an_evaluation(qwen3_folder: Path, tmp_path: Path) -> None:
    sampling = ("rollout.eval_temperature=0", "rollout.eval_top_p=0.9", "rollout.eval_max_response_len=100")
    async with (
        FakeEngine(Speaker(qwen3_folder)) as engine,
        worker(engine, qwen3_folder, tmp_path, *EVALUATED, *sampling) as rollouts,
    ):
        rows = (await rollouts.evaluate(0))["rows"]
        asked = [body["sampling_params"] for body in engine.bodies]
        engine.bodies.clear()
        await rollouts.generate(0)
        trained = [body["sampling_params"] for body in engine.bodies]
    assert [(row["task_index"], row["group_index"], row["index"]) for row in rows] == [
        (i // 2, i // 2, i) for i in range(6)
    ]
    # Scored as in training, by the reward that compares rollouts, too.
    assert {(row["status"], row["reward"]) for row in rows} == {("completed", 1.5)}
    assert {(p["temperature"], p["top_p"], p["max_new_tokens"]) for p in asked} == {(0.0, 0.9, 100)}
    assert {(p["temperature"], p["top_p"], p["max_new_tokens"]) for p in trained} == {(1.0, 1.0, 64)}


async def test_a_failing_task_is_missing_and_ends_nothing(qwen3_folder: Path, tmp_path: Path) -> None:
    speaker = Speaker(qwen3_folder)

    def handler(request: Any, body: dict[str, Any]) -> dict[str, Any]:
        reply = speaker(request, body)
        if "Say w1" in speaker.tokenizer.decode(body["input_ids"]):
            reply["meta_info"]["completion_tokens"] = 99
        return reply

    async with FakeEngine(handler) as engine, worker(engine, qwen3_folder, tmp_path, *EVALUATED) as rollouts:
        result = await rollouts.evaluate(0)
    found = summary([from_row(row) for row in result["rows"]], "passed")
    assert (found.tasks, found.n, found.missing, found.mean) == (3, 6, 2, 1.5)
    assert result["causes"] == {"ReplyInvalid": 2}


async def test_tasks_of_its_own_and_fewer_of_them(qwen3_folder: Path, tmp_path: Path) -> None:
    overrides = (
        *EVALUATED,
        "environment.eval_taskset={ size = 5, prompt = 'Please, say {want}' }",
        "environment.eval_tasks=4",
    )
    async with (
        FakeEngine(Speaker(qwen3_folder, lambda prompt, count: "w0")) as engine,
        worker(engine, qwen3_folder, tmp_path, *overrides) as rollouts,
    ):
        rows = (await rollouts.evaluate(0))["rows"]
        trained = (await rollouts.generate(0))["rows"]
    assert [row["task_index"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {row["prompt"] for row in rows} == {f"Please, say w{i}" for i in range(4)}
    assert {row["prompt"] for row in trained} == {"Say w0", "Say w1"}


async def test_too_few_samples_for_an_environment_that_compares(qwen3_folder: Path, tmp_path: Path) -> None:
    async with (
        FakeEngine() as engine,
        worker(engine, qwen3_folder, tmp_path, "rollout.eval_interval=1") as rollouts,
    ):
        with pytest.raises(EnvironmentPackageError, match="compares the rollouts of a task"):
            await rollouts.preflight()
    async with FakeEngine() as engine, worker(engine, qwen3_folder, tmp_path) as rollouts:
        await rollouts.preflight()  # control: without evaluations there is nothing to refuse


async def test_seeds_reach_the_engine_and_are_those_of_the_place_in_the_run(qwen3_folder: Path, tmp_path: Path) -> None:
    seeds = []
    for _ in range(2):
        async with FakeEngine(Speaker(qwen3_folder)) as engine:
            overrides = ("engine.enable_deterministic_inference=true", "rollout.over_sampling_batch_size=3")
            async with worker(engine, qwen3_folder, tmp_path, *overrides) as rollouts:
                rows = (await rollouts.generate(0))["rows"]
            sent = {body["sampling_params"]["sampling_seed"] for body in engine.bodies}
        seeds.append([row["seed"] for row in rows])
        assert set(seeds[-1]) <= sent
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 2 * N


async def test_without_it_none_is_sent(qwen3_folder: Path, tmp_path: Path) -> None:
    async with FakeEngine(Speaker(qwen3_folder)) as engine:
        async with worker(engine, qwen3_folder, tmp_path) as rollouts:
            rows = (await rollouts.generate(0))["rows"]
        assert not any("sampling_seed" in body["sampling_params"] for body in engine.bodies)
    assert {row["seed"] for row in rows} == {None}


async def test_a_filter_of_the_environments_package(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_package.py").write_text(
        "def later(args, samples, **kwargs):\n    return samples[0].task_index > 0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    filtered = "rollout.dynamic_sampling_filter_path='my_package:later'"
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder), filtered)
    assert [row["task_index"] for row in step["rows"]] == [1] * N + [2] * N
    assert (step["dropped"], step["ending"]) == ({"filter": 1}, "full")
    with pytest.raises(ConfigError, match="no_such_module:f"):
        await step_of(
            qwen3_folder, tmp_path, Speaker(qwen3_folder), "rollout.dynamic_sampling_filter_path='no_such_module:f'"
        )


@pytest.mark.parametrize(("policy", "rows"), [("mask", 2 * N), ("drop", 0)])
async def test_a_reward_that_is_no_number_is_masked_or_drops_its_group(
    qwen3_folder: Path, tmp_path: Path, policy: str, rows: int
) -> None:
    """One rollout of each group says what its task scores with NaN."""
    says = lambda prompt, count: "nan" if count % N == 1 else "w0"  # noqa: E731
    overrides = (f"rollout.bad_rewards='{policy}'", "rollout.max_concurrency=1", "rollout.max_dropped_groups=1")
    step = await step_of(qwen3_folder, tmp_path, Speaker(qwen3_folder, says), *overrides)
    assert len(step["rows"]) == rows
    assert step["causes"] == {"bad reward": 2}
    assert step["dropped"] == ({} if rows else {"bad reward": 2})
    bad = [row for row in step["rows"] if row["status"] == "failed"]
    assert [(row["reward"], "right" in row["rewards"]) for row in bad] == [(None, False)] * (rows // N)
