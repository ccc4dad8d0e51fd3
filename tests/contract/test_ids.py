"""Ids are never encoded again: a sample's tokens are what the engine was last sent, and what it answered, one by one.

The tokenizer has merges, and the model answers in splits that the tokenizer would not choose. Whoever decodes such a reply
and encodes it again gets other ids.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, good_reply
from renderers.base import load_tokenizer
from rollouts import worker

from miles_verifiers.provision.models import tiny
from miles_verifiers.record.samples import from_row

TEXT = "for i in range(10): print(i, 'words and things') # is it so?\n"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write(folder)
    return folder


class Splitter:
    """An engine that answers with random text, encoded in random pieces; remembers every exchange."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tokenizer = load_tokenizer(str(folder))
        self.draw = random.Random(seed)
        self.exchanges: list[tuple[list[int], list[int]]] = []
        self.odd = 0
        """Replies in a split that is not the tokenizer's own."""

    def __call__(self, request: Any, body: dict[str, Any]) -> dict[str, Any]:
        begin = self.draw.randrange(20)
        text = TEXT[begin : begin + self.draw.randint(1, 40)].strip() or "so"
        ids: list[int] = []
        rest = text
        while rest:
            piece, rest = rest[: (cut := self.draw.randint(1, 7))], rest[cut:]
            ids += self.tokenizer.encode(piece, add_special_tokens=False)
        self.odd += ids != self.tokenizer.encode(text, add_special_tokens=False)
        ids.append(self.tokenizer.eos_token_id)
        self.exchanges.append((body["input_ids"], ids))
        return good_reply(ids, prompt_tokens=len(body["input_ids"]))


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("renderer", "history"), [("qwen3", "keep"), ("qwen3", "template"), ("default", "template")])
async def test_a_samples_ids_are_those_that_the_engine_saw(
    tiny_folder: Path, tmp_path: Path, renderer: str, history: str, seed: int
) -> None:
    splitter = Splitter(tiny_folder, seed)
    overrides = (
        f"environment.renderer='{renderer}'",
        f"environment.history='{history}'",
        "environment.harness='two-turns'",
        "rollout.rollout_max_context_len=1024",
        "rollout.equal_rewards='mask'",
    )
    async with FakeEngine(splitter) as engine, worker(engine, tiny_folder, tmp_path, *overrides) as rollouts:
        rows = (await rollouts.generate(0))["rows"]
    assert len(rows) == 8
    assert splitter.odd > 8  # most of the sixteen
    exchanges = {(*prompt, *reply): len(reply) for prompt, reply in splitter.exchanges}
    forked = 0
    for row in rows:
        sample = from_row(row)
        assert (sample.status, sample.error, sample.turns) == ("completed", "", 2)
        last_reply = exchanges[tuple(sample.tokens)]
        assert sample.loss_mask[-last_reply:] == [1] * last_reply
        if sample.forks:
            forked += 1
            assert sample.loss_mask == [1] * last_reply
            (fork,) = sample.forks  # the first turn is another branch
            first_reply = exchanges[tuple(fork.tokens)]
            assert fork.loss_mask == [1] * first_reply
        else:
            earlier = [(*p, *r) for p, r in splitter.exchanges if tuple(row["tokens"][: len(p) + len(r)]) == (*p, *r)]
            first_reply = exchanges[min(earlier, key=len)]
        assert sample.sampled_tokens == sample.generated_tokens == first_reply + last_reply
    # Rendering anew loses every reply in an odd split; keeping the history loses none.
    assert forked == 0 if history == "keep" else forked > 0
