"""The real server under `enable_deterministic_inference`: a seed gives the same bits, whatever runs beside it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import calls
from miles_verifiers.engine.server import EngineServer, free_port
from miles_verifiers.provision.models import tiny

PROMPT = list(range(20, 40))
LENGTH = 12


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny.write(folder)
    config = EngineSection(
        max_total_tokens=4096, max_running_requests=16, start_timeout=200, enable_deterministic_inference=True
    )
    options: dict[str, Any] = {"dtype": "float32", "context_length": 512, "port": free_port()}
    log = tmp_path_factory.mktemp("log") / "engine.log"
    with EngineServer(config, python=Path(sys.executable), model=folder, log=log, **options) as server:
        yield server


def reply(engine: EngineServer, seed: int, prompt: list[int] = PROMPT) -> tuple[list[int], list[float]]:
    """Ids and their log-probs."""
    sampling = {"temperature": 1.0, "max_new_tokens": LENGTH, "sampling_seed": seed, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    status, answer = calls.call(f"{engine.url}/generate", body, timeout=60)
    assert status == 200, answer
    return answer["output_ids"], [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_seeds_decide_and_neighbours_do_not(engine: EngineServer) -> None:
    alone = [reply(engine, seed) for seed in range(6)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda seed: reply(engine, seed % 6), range(12)))
    assert together == alone * 2
    # Control: seeds that were ignored would give one reply, or never the same one.
    assert len({tuple(ids) for ids, _ in alone}) == 6


def test_what_the_prefix_cache_holds_does_not_matter(engine: EngineServer) -> None:
    long = [*PROMPT, *range(60, 99)]
    before = reply(engine, 1, long)
    calls.call(f"{engine.url}/flush_cache", {}, timeout=30)
    reply(engine, 2, PROMPT)  # whose tokens are the beginning of the long prompt
    ids, log_probs = reply(engine, 1, long)
    assert (ids, log_probs) == before
    # Another turn of the same conversation reads what decoding left in the cache; anew it is all computed as a prompt.
    turn = [*long, *ids, 7]
    cached = reply(engine, 3, turn)
    calls.call(f"{engine.url}/flush_cache", {}, timeout=30)
    assert reply(engine, 3, turn) == cached
    # Control: another prompt shows.
    assert reply(engine, 3, [*turn[:-1], 8]) != cached
