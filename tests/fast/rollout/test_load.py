"""What the configuration makes of the wire's limits."""

from __future__ import annotations

import gc

import pytest

from miles_verifiers.config import loading
from miles_verifiers.errors import PromptTooLong
from miles_verifiers.rollout.load import limits_of, settle
from miles_verifiers.wire.translate import to_sglang

REQUEST = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 500, "stop": ["a"], "stop_token_ids": [7]}}


def test_limits_and_stops_of_the_configuration_reach_the_engine() -> None:
    settings = ["rollout.rollout_stop=['b']", "rollout.rollout_stop_token_ids=[9]", "rollout.eval_max_response_len=80"]
    limits = limits_of(loading.load("cpu", overrides=settings).rollout, 10)
    sampling = to_sglang(REQUEST, limits, first=True)["sampling_params"]
    assert sampling["stop"] == ["a", "b"]
    assert sorted(sampling["stop_token_ids"]) == [7, 9]
    assert sampling["max_new_tokens"] == 80


def test_a_first_prompt_over_its_own_limit_is_refused() -> None:
    limits = limits_of(loading.load("cpu", overrides=["rollout.rollout_max_prompt_len=2"]).rollout, 10)
    with pytest.raises(PromptTooLong, match="first prompt"):
        to_sglang(REQUEST, limits, first=True)
    assert to_sglang(REQUEST, limits, first=False)["input_ids"].as_list() == [1, 2, 3]


def test_what_is_loaded_is_not_looked_at_by_garbage_collections() -> None:
    kept = [[number] for number in range(1000)]
    before = gc.get_freeze_count()
    try:
        settle()
        assert gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()
