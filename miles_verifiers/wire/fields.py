"""What becomes of every field that either side of the wire knows: one table, read by `translate` and by the tests.

Three lists, each the whole of what one side has:

    BODY      top level of renderers' POST /inference/v1/generate                 renderers 0.1.8 to 0.1.12
    SAMPLING  its `sampling_params`: the names of vLLM and of SGLang, since
              renderers passes unknown keys through                               vLLM, SGLang 0.5.15 to 0.5.23
    ENGINE    SGLang's /generate request (managers/io_struct.py GenerateReqInput)  SGLang 0.5.15 to 0.5.23

A field is mapped to a name of SGLang's, dropped for a stated reason, or refused by name. What is in no list is refused, and
a contract test fails as soon as an installed renderers or SGLang has a field that is in no list.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["map", "drop", "refuse"]
Kind = Literal["int", "number", "bool", "text", "texts", "ids", "bias", "object"]


@dataclass(frozen=True, slots=True)
class Field:
    """`target` is SGLang's name where `action` is map; `reason` says why a field is dropped or refused."""

    action: Action
    target: str = ""
    kind: Kind = "object"
    reason: str = ""


def _to(target: str, kind: Kind) -> Field:
    return Field("map", target, kind)


def _drop(reason: str) -> Field:
    return Field("drop", reason=reason)


def _refuse(reason: str) -> Field:
    return Field("refuse", reason=reason)


BODY: dict[str, Field] = {
    "token_ids": _to("input_ids", "ids"),
    "sampling_params": _to("sampling_params", "object"),
    "priority": _to("priority", "int"),
    "cache_salt": _to("extra_key", "text"),
    "lora_path": _to("lora_path", "text"),
    "model": _drop("an engine serves one model"),
    "return_token_ids": _drop("token ids are always returned"),
    "features": _refuse("images and other media are not supported"),
    "content_parts": _refuse("images and other media are not supported"),
}

_ALWAYS_ONE = "one completion per request"
_OF_THE_TEXT = "the reply is token ids; text is not returned"
_INTERNAL = "internal to SGLang"
_OF_PROCESSORS = "custom logit processors are not supported: no trainer could recompute their log-probs"

SAMPLING: dict[str, Field] = {
    # mapped, under the name of vLLM and that of SGLang
    "max_tokens": _to("max_new_tokens", "int"),
    "max_completion_tokens": _to("max_new_tokens", "int"),
    "max_new_tokens": _to("max_new_tokens", "int"),
    "min_tokens": _to("min_new_tokens", "int"),
    "min_new_tokens": _to("min_new_tokens", "int"),
    "seed": _to("sampling_seed", "int"),
    "sampling_seed": _to("sampling_seed", "int"),
    "stop": _to("stop", "texts"),
    "stop_token_ids": _to("stop_token_ids", "ids"),
    "stop_regex": _to("stop_regex", "texts"),
    "temperature": _to("temperature", "number"),
    "top_p": _to("top_p", "number"),
    "top_k": _to("top_k", "int"),
    "min_p": _to("min_p", "number"),
    "frequency_penalty": _to("frequency_penalty", "number"),
    "presence_penalty": _to("presence_penalty", "number"),
    "repetition_penalty": _to("repetition_penalty", "number"),
    "ignore_eos": _to("ignore_eos", "bool"),
    "json_schema": _to("json_schema", "text"),
    "regex": _to("regex", "text"),
    "ebnf": _to("ebnf", "text"),
    "structural_tag": _to("structural_tag", "text"),
    "logit_bias": _to("logit_bias", "bias"),
    # dropped
    "logprobs": _drop("log-probs of the sampled tokens are always returned"),
    "routed_experts_prompt_start": _drop("expert routing is not replayed, so none is asked for"),
    "skip_special_tokens": _drop(_OF_THE_TEXT),
    "spaces_between_special_tokens": _drop(_OF_THE_TEXT),
    "no_stop_trim": _drop("set by the transport: stop tokens stay in the reply"),
    "include_stop_str_in_output": _drop("stop tokens stay in the reply"),
    "detokenize": _drop(_OF_THE_TEXT),
    "stream_interval": _drop("replies are not streamed"),
    "output_kind": _drop("replies are not streamed"),
    "reasoning_effort": _drop("a matter of the chat template, already rendered"),
    # refused
    "n": _refuse(_ALWAYS_ONE),
    "best_of": _refuse(_ALWAYS_ONE),
    "beam_width": _refuse(_ALWAYS_ONE),
    "use_beam_search": _refuse(_ALWAYS_ONE),
    "prompt_logprobs": _refuse("log-probs of the prompt are not returned"),
    "truncate_prompt_tokens": _refuse("the reply must belong to the prompt that was sent"),
    "bad_words": _refuse("SGLang has no such parameter"),
    "allowed_token_ids": _refuse("SGLang has no such parameter"),
    "logits_processors": _refuse(_OF_PROCESSORS),
    "extra_args": _refuse("SGLang has no such parameter"),
    "guided_decoding": _refuse("give json_schema, regex, ebnf or structural_tag instead"),
    "structured_outputs": _refuse("give json_schema, regex, ebnf or structural_tag instead"),
    "custom_params": _refuse(_OF_PROCESSORS),
    "watermark": _refuse("no trainer could recompute its log-probs"),
    "stop_strs": _refuse(_INTERNAL),
    "stop_regex_strs": _refuse(_INTERNAL),
    "stop_str_max_len": _refuse(_INTERNAL),
    "stop_regex_max_len": _refuse(_INTERNAL),
    "is_normalized": _refuse(_INTERNAL),
    "ebnf_full_assistant": _refuse(_INTERNAL),
}

SENT: frozenset[str] = frozenset(
    {"rid", "input_ids", "sampling_params", "return_logprob", "priority", "extra_key", "lora_path"}
)
"""Fields of SGLang's request that the wire sets."""

_NOT_SENT: dict[str, str] = {
    "another form of the prompt than token ids": "text input_embeds",
    "images and other media are not supported": (
        "image_data video_data audio_data mm_hashes mm_content_hashes use_audio_in_video video_config modalities "
        "max_dynamic_patch min_dynamic_patch image_max_dynamic_patch video_max_dynamic_patch images_config "
        "mm_processor_kwargs need_wait_for_mm_inputs num_items_assigned encoder_urls return_bytes"
    ),
    "more than the sampled token's log-prob": (
        "logprob_start_len top_logprobs_num token_ids_logprob return_sampling_mask sampling_logprobs_mode "
        "return_text_in_logprobs return_flat_raw_top_logprobs return_flat_raw_output_top_logprobs "
        "return_flat_raw_top_logprobs_b64 return_hidden_states return_routed_experts routed_experts_start_len "
        "return_indexer_topk return_entropy return_prompt_token_ids"
    ),
    "replies are neither streamed nor stored": "stream background",
    "the rollout holds the conversation, the engine none": "session_id session_params conversation_id",
    "the trainer cannot recompute log-probs under it": "custom_logit_processor positional_embed_overrides watermark",
    "thinking is a matter of the chat template": "require_reasoning max_thinking_tokens",
    "set by SGLang or by its router": (
        "lora_id bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key decode_tp_size routed_dp_rank "
        "data_parallel_rank disagg_prefill_dp_rank routing_key http_worker_ipc external_trace_header received_time kv_hints"
    ),
    "the engine's own logs and metrics": "log_metrics no_logs custom_labels",
    "scoring requests only": "multi_item_delimiter_indices token_indices_to_pool",
    "sent as extra_key, which older versions have too": "cache_salt",
}
NOT_SENT: dict[str, str] = {name: reason for reason, names in _NOT_SENT.items() for name in names.split()}
"""Fields of SGLang's request that the wire leaves at their defaults, and why."""
