"""The wire's pure part: what is sent, what is refused, and that no reply reaches training unchecked."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fake_engine import VOCAB, good_reply
from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.errors import GenerationAborted, PromptTooLong, ReplyInvalid, RequestRefused
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire import fields
from miles_verifiers.wire.reply import checked_reply
from miles_verifiers.wire.token_ids import TokenIds
from miles_verifiers.wire.translate import Limits, from_sglang, to_sglang

LIMITS = Limits(vocab_size=VOCAB, max_context=100, max_response=20)
PROMPT = [11, 12, 13]


def request(**sampling: Any) -> dict[str, Any]:
    return {"model": "policy", "token_ids": PROMPT, "sampling_params": sampling}


def sent(**sampling: Any) -> dict[str, Any]:
    params: dict[str, Any] = to_sglang(request(**sampling), LIMITS)["sampling_params"]
    return params


def checked(reply: object) -> dict[str, Any]:
    return from_sglang(reply, prompt_ids=PROMPT, vocab_size=VOCAB, where="request r to engine e")


class TestToSGLang:
    def test_the_whole_payload_of_a_turn(self) -> None:
        body = {
            "model": "policy",
            "token_ids": PROMPT,
            "sampling_params": {
                "temperature": 0.8,
                "top_p": 1.0,
                "top_k": -1,
                "max_tokens": 16,
                "seed": 9,
                "stop_token_ids": [2, 0, 2],
                "logprobs": 1,
                "skip_special_tokens": True,
                "routed_experts_prompt_start": 3,
            },
            "cache_salt": "run-1",
            "priority": 3,
        }
        assert to_sglang(body, LIMITS) == {
            "input_ids": TokenIds.of(PROMPT),
            "sampling_params": {
                "temperature": 0.8,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": 16,
                "sampling_seed": 9,
                "stop_token_ids": [2, 0],
                "n": 1,
                "no_stop_trim": True,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
            },
            "return_logprob": True,
            "extra_key": "run-1",
            "priority": 3,
        }

    @pytest.mark.parametrize("name", sorted(name for name, field in fields.SAMPLING.items() if field.action == "map"))
    def test_mapped_parameters_arrive_under_sglangs_name(self, name: str) -> None:
        field = fields.SAMPLING[name]
        values = {"int": 5, "number": 0.5, "bool": True, "text": "a", "texts": ["a"], "ids": [5], "bias": {"5": 1.0}}
        assert sent(**{name: values[field.kind]})[field.target] == values[field.kind]

    @pytest.mark.parametrize("name", sorted(name for name, field in fields.SAMPLING.items() if field.action == "drop"))
    def test_dropped_parameters_change_nothing(self, name: str) -> None:
        assert sent(**{name: 1}) == sent()

    @pytest.mark.parametrize(
        "name", sorted(name for name, field in fields.SAMPLING.items() if field.action == "refuse")
    )
    def test_refused_parameters_are_named(self, name: str) -> None:
        with pytest.raises(RequestRefused, match=rf"sampling_params\.{name} is not supported: \w+"):
            sent(**{name: 2})

    def test_one_completion_may_be_asked_for(self) -> None:
        assert sent(n=1) == sent()

    @pytest.mark.parametrize("name", ["features", "content_parts", "messages"])
    def test_body_fields_that_cannot_be_honoured(self, name: str) -> None:
        with pytest.raises(RequestRefused, match=name):
            to_sglang({**request(), name: [1]}, LIMITS)

    def test_none_means_the_default(self) -> None:
        assert sent(temperature=None, stop=None, beam_width=None) == sent()

    @pytest.mark.parametrize(
        ("sampling", "named"),
        [
            ({"temperature": math.nan}, "temperature"),  # would be written as null: the engine's default
            ({"temperature": "hot"}, "temperature"),
            ({"top_k": True}, "top_k"),
            ({"seed": 2**63}, "seed"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 5, "max_new_tokens": 6}, "given twice"),
            ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
            ({"stop": ["a", 1]}, "stop"),
            ({"stop": "\ud800"}, "stop"),
            ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, sampling: dict[str, Any], named: str) -> None:
        with pytest.raises(RequestRefused, match=named):
            sent(**sampling)

    @pytest.mark.parametrize("ids", [[], [1, VOCAB], [1, -1], [1, 2.0], [True], "12", None, [[1]]])
    def test_prompt_ids_are_checked_before_they_are_sent(self, ids: Any) -> None:
        with pytest.raises(RequestRefused, match="token_ids"):
            to_sglang({**request(), "token_ids": ids}, LIMITS)

    def test_the_last_id_of_the_vocabulary_is_fine(self) -> None:
        assert to_sglang({**request(), "token_ids": [VOCAB - 1]}, LIMITS)["input_ids"].as_list() == [VOCAB - 1]

    @pytest.mark.parametrize(
        ("prompt", "asked", "room"), [(3, None, 20), (3, 7, 7), (3, 50, 20), (95, 7, 5), (99, None, 1)]
    )
    def test_the_reply_fits_response_and_context(self, prompt: int, asked: int | None, room: int) -> None:
        body = {"token_ids": [1] * prompt, "sampling_params": {"max_tokens": asked}}
        assert to_sglang(body, LIMITS)["sampling_params"]["max_new_tokens"] == room

    def test_a_prompt_without_room_for_a_reply(self) -> None:
        with pytest.raises(PromptTooLong, match=r"100 tokens.*100"):
            to_sglang({"token_ids": [1] * 100}, LIMITS)

    def test_the_first_prompt_has_a_limit_of_its_own(self) -> None:
        limits = Limits(VOCAB, 100, 20, max_first_prompt=2)
        with pytest.raises(PromptTooLong, match="first prompt"):
            to_sglang(request(), limits, first=True)
        assert to_sglang(request(), limits)["input_ids"].as_list() == PROMPT

    def test_stops_of_run_and_request_are_merged(self) -> None:
        limits = Limits(VOCAB, 100, 20, stop=("END", "x"), stop_token_ids=(2, 3))
        params = to_sglang(request(stop="x", stop_token_ids=[3, 4]), limits)["sampling_params"]
        assert (params["stop"], params["stop_token_ids"]) == (["x", "END"], [3, 4, 2])

    json_values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    )
    names = st.sampled_from(sorted({*fields.BODY, *fields.SAMPLING})) | st.text(max_size=5)

    @given(
        st.one_of(json_values, st.dictionaries(names, json_values | st.dictionaries(names, json_values), max_size=5))
    )
    def test_whatever_comes_in_only_a_refusal_comes_out(self, body: object) -> None:
        try:
            payload = to_sglang(body, LIMITS)
        except RequestRefused:
            return
        assert all(0 <= token < VOCAB for token in payload["input_ids"].as_list())

    @given(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=99), st.integers(1, 200))
    def test_ids_pass_through_untouched(self, ids: list[int], asked: int) -> None:
        payload = to_sglang({"token_ids": ids, "sampling_params": {"max_tokens": asked}}, LIMITS)
        assert payload["input_ids"].as_list() == ids
        assert 1 <= payload["sampling_params"]["max_new_tokens"] <= min(asked, 20, 100 - len(ids))


class TestFromSGLang:
    def test_the_whole_response(self) -> None:
        assert checked(good_reply([5, 999, 2], [-0.25, -1.5, 0.0])) == {
            "request_id": "rid-of-the-engine",
            "choices": [
                {
                    "token_ids": [5, 999, 2],
                    "logprobs": {
                        "content": [
                            {"token": "token_id:5", "logprob": -0.25},
                            {"token": "token_id:999", "logprob": -1.5},
                            {"token": "token_id:2", "logprob": 0.0},
                        ]
                    },
                    "finish_reason": "stop",
                }
            ],
            "usage": {"prompt_tokens": 3, "completion_tokens": 3},
            "weight_versions": [{"version": "7", "count": 3}],
        }

    def test_an_empty_completion_is_a_reply(self) -> None:
        choice = checked(good_reply([], finish_reason={"type": "length", "length": 0}))["choices"][0]
        assert choice == {"token_ids": [], "logprobs": {"content": []}, "finish_reason": "length"}

    @pytest.mark.parametrize("bad", [None, math.nan, -math.inf, math.inf, -9999.0, 0.5, "-0.5", True, 10**400])
    @pytest.mark.parametrize("at", [0, 2])
    def test_log_probs_that_are_none(self, bad: Any, at: int) -> None:
        logprobs: list[Any] = [-0.5, -0.5, -0.5]
        logprobs[at] = bad
        with pytest.raises(ReplyInvalid, match=rf"output_token_logprobs\[{at}\] has the log-prob"):
            checked(good_reply([5, 6, 2], logprobs))

    def test_rounding_above_zero_is_zero(self) -> None:
        content = checked(good_reply([5, 2], [1e-7, -1.0]))["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [0.0, -1.0]

    def test_integers_are_log_probs_too(self) -> None:
        value = checked(good_reply([5], [0]))["choices"][0]["logprobs"]["content"][0]["logprob"]
        assert type(value) is float

    @pytest.mark.parametrize("bad", [VOCAB, -1, "5", None, 5.0, True])
    def test_ids_outside_the_vocabulary(self, bad: Any) -> None:
        with pytest.raises(ReplyInvalid, match=r"output_token_logprobs\[1\] has the id"):
            checked(good_reply([5, bad], [-0.5, -0.5]))

    @pytest.mark.parametrize(
        ("meta", "named"),
        [
            ({"completion_tokens": 4}, "completion_tokens"),
            ({"prompt_tokens": 9}, "prompt_tokens"),
            ({"output_token_logprobs": ...}, "output_token_logprobs is missing"),
            ({"output_token_logprobs": [[-0.5, 5, None]]}, "completion_tokens"),
            ({"output_token_logprobs": [[-0.5], [-0.5], [-0.5]]}, "not a list of"),
            ({"output_token_logprobs": [[-0.5, 5, None], [-0.5], [-0.5, 2, None]]}, "not a list of"),
            ({"output_token_logprobs": [1, 2, 3]}, "not a list of"),
            ({"finish_reason": None}, "finish_reason"),
            ({"finish_reason": {"type": "tired"}}, "finish_reason"),
            ({"finish_reason": {"type": ["stop"]}}, "finish_reason"),
        ],
    )
    def test_short_or_wrong_metadata(self, meta: dict[str, Any], named: str) -> None:
        with pytest.raises(ReplyInvalid, match=named) as caught:
            checked(good_reply([5, 6, 2], **meta))
        assert caught.value.where == "request r to engine e"

    def test_output_ids_that_are_not_the_sampled_ones(self) -> None:
        with pytest.raises(ReplyInvalid, match="output_ids"):
            checked({**good_reply([5, 6, 2]), "output_ids": [5, 6, 3]})

    def test_echoed_prompt_ids(self) -> None:
        checked({**good_reply([5, 6, 2]), "prompt_token_ids": PROMPT})
        with pytest.raises(ReplyInvalid, match="prompt_token_ids"):
            checked({**good_reply([5, 6, 2]), "prompt_token_ids": [11, 12, 14]})

    def test_an_abort_is_never_an_end(self) -> None:
        with pytest.raises(GenerationAborted, match="weights changed"):
            checked(good_reply([5], finish_reason={"type": "abort", "message": "weights changed"}))

    @given(TestToSGLang.json_values)
    def test_whatever_comes_back_only_our_errors_come_out(self, reply: object) -> None:
        for candidate in (reply, {"meta_info": reply}, good_reply([5], output_token_logprobs=reply)):
            with pytest.raises((ReplyInvalid, GenerationAborted)):
                checked(candidate)

    @given(st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-9998, 0)), max_size=30))
    def test_good_replies_pass_unchanged(self, pairs: list[tuple[int, float]]) -> None:
        ids, logprobs = [p[0] for p in pairs], [p[1] for p in pairs]
        choice = checked(good_reply(ids, logprobs))["choices"][0]
        assert choice["token_ids"] == ids
        assert choice["logprobs"]["content"] == [
            {"token": f"token_id:{token}", "logprob": value} for token, value in pairs
        ]


class TestWeightSpans:
    def spans(self, reply: dict[str, Any]) -> list[WeightSpan]:
        prompt = TokenIds.of(PROMPT)
        assert prompt is not None
        return checked_reply(reply, prompt=prompt, vocab_size=VOCAB, where="").weight_versions

    def test_one_version(self) -> None:
        assert self.spans(good_reply([5, 6, 2])) == [WeightSpan("7", 3)]

    def test_a_change_while_it_sampled(self) -> None:
        spans = [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}]
        reply = good_reply([5, 6, 2], weight_versions=spans)
        assert self.spans(reply) == [WeightSpan("7", 2), WeightSpan("8", 1)]

    @pytest.mark.parametrize(
        "spans",
        [
            [{"version": "7", "start": 0, "end": 2}],
            [{"version": "7", "start": 1, "end": 3}],
            [{"version": "7", "start": 0, "end": 2}, {"version": "8", "start": 1, "end": 3}],
            [{"version": 7, "start": 0, "end": 3}],
            [{"start": 0, "end": 3}],
            [],
            "7",
        ],
    )
    def test_spans_that_do_not_tile_the_reply(self, spans: Any) -> None:
        with pytest.raises(ReplyInvalid, match="weight_versions"):
            self.spans(good_reply([5, 6, 2], weight_versions=spans))

    def test_a_reply_without_a_version(self) -> None:
        with pytest.raises(ReplyInvalid, match="weight_version"):
            self.spans(good_reply([5], weight_version=...))


def test_the_table_names_a_reason_for_all_that_is_not_mapped() -> None:
    for name, field in {**fields.BODY, **fields.SAMPLING}.items():
        assert bool(field.target) == (field.action == "map"), name
        assert bool(field.reason) == (field.action != "map"), name
    assert not fields.SENT & fields.NOT_SENT.keys()
