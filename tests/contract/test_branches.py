"""Rollouts that fork, with real Verifiers and renderers: all that the engine sampled is trained, once, as the engine saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from rollouts import STOP, N, Speaker, rows_of, step_of, worker

from miles_verifiers.record.samples import from_row

FORKING = ("environment.harness='forking'", "rollout.rollout_batch_size=1", "rollout.equal_rewards='mask'")


def replies(prompt: str, count: int) -> str:
    if prompt.endswith("again<|im_end|>\n<|im_start|>assistant\n"):
        return "w0"
    return "of course" if "Otherwise" in prompt else "yes" if "Again" in prompt else "well"


class Listener:
    """A speaking engine that keeps every exchange."""

    def __init__(self, folder: Path) -> None:
        self.speaker = Speaker(folder, replies)
        self.exchanges: list[tuple[list[int], list[int]]] = []

    def __call__(self, request: Any, body: dict[str, Any]) -> dict[str, Any]:
        reply = self.speaker(request, body)
        self.exchanges.append((body["input_ids"], reply["output_ids"]))
        return reply


@pytest.mark.parametrize("folder", ["qwen3_folder", "unknown_folder"])
async def test_a_rollout_with_forks(folder: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(folder)
    engine = Listener(model)
    rows = await rows_of(model, tmp_path, engine, *FORKING)
    ids = engine.speaker.ids
    saw = {(*prompt, *reply) for prompt, reply in engine.exchanges}
    assert [row["index"] for row in rows] == list(range(N))  # each of them is one member of the group
    for row in rows:
        sample = from_row(row)
        assert (sample.status, sample.error, sample.turns, sample.response) == ("completed", "", 4, "w0")
        assert all(tuple(sequence.tokens) in saw for sequence in sample.sequences)
        compacted, first, second = sample.sequences
        assert compacted.tokens[-compacted.response_length :] == ids("w0")
        assert second.tokens[-second.response_length :] == ids("of course")
        assert (compacted.loss_mask, second.loss_mask) == ([1] * len(ids("w0")), [1] * len(ids("of course")))
        trained = [t for t, m in zip(first.tokens[-first.response_length :], first.loss_mask, strict=True) if m]
        assert trained == [*ids("well"), *ids("yes")]
        # The answer that both go on from is trained in one of them, and shared by the other.
        shared = second.tokens[: sample.forks[1].shared_length]
        assert shared == first.tokens[: len(shared)]
        assert shared[-len(ids("well")) :] == ids("well")
        for sequence in sample.sequences:
            assert [(span.version, span.count) for span in sequence.weight_versions] == [("7", sum(sequence.loss_mask))]
        assert (
            sample.sampled_tokens
            == sample.generated_tokens
            == sum(len(ids(t)) for t in ("well", "yes", "of course", "w0"))
        )
        # Control: of its last branch alone, most would be lost.
        assert sum(sample.loss_mask) < sample.generated_tokens / 2


async def test_evaluations_have_forks_too(qwen3_folder: Path, tmp_path: Path) -> None:
    async with (
        FakeEngine(Listener(qwen3_folder)) as engine,
        worker(
            engine, qwen3_folder, tmp_path, *FORKING, "rollout.eval_interval=1", "rollout.n_samples_per_eval_prompt=2"
        ) as rollouts,
    ):
        rows = (await rollouts.evaluate(0))["rows"]
    assert {len(row["forks"]) for row in rows} == {2}


async def test_a_fork_whose_weights_are_not_known_fails_the_rollout(
    qwen3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miles_verifiers.wire.core import Wire

    take = Wire.take
    # What the transport remembers of the second question of each rollout is lost.
    monkeypatch.setattr(Wire, "take", lambda self, session: [t for i, t in enumerate(take(self, session)) if i != 1])
    step = await step_of(qwen3_folder, tmp_path, Listener(qwen3_folder), *FORKING, STOP)
    assert step["rows"] == []
    log = (tmp_path / "logs" / "rollout.log").read_text()
    assert "branch 1 of 3: the weight version of a reply is not known" in log
