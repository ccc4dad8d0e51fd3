"""renderers' generate request -> SGLang's, and SGLang's checked reply -> renderers'. Pure: no I/O, no clock.

    {"model", "token_ids", "sampling_params", ...}  -- to_sglang -->  {"input_ids", "sampling_params", "return_logprob"}
    {"request_id", "choices": [...], "usage"}      <-- from_sglang --  {"output_ids", "meta_info": {...}}

Sources: renderers/client.py `generate` (0.1.8 to 0.1.12), sglang/srt/sampling/sampling_params.py and
managers/tokenizer_manager.py (0.5.15 to 0.5.23). Whatever comes in, only RequestRefused, ReplyInvalid and
GenerationAborted come out as errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from miles_verifiers.errors import PromptTooLong, RequestRefused, shown
from miles_verifiers.wire.fields import BODY, SAMPLING, Field, Kind
from miles_verifiers.wire.reply import Generation, checked_reply
from miles_verifiers.wire.token_ids import TokenIds, first_outside


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for. Lengths in tokens."""

    vocab_size: int
    """Rows of the model's embedding. SGLang's scheduler dies of an id beyond it (seen in 0.5.23)."""
    max_context: int
    """Prompt and reply together."""
    max_response: int
    """One reply."""
    max_first_prompt: int | None = None
    """The first prompt of a session."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Stops added to those of the request."""


def to_sglang(body: object, limits: Limits, *, first: bool = False) -> dict[str, Any]:
    """The body of SGLang's `/generate` for one of renderers' requests; `first` says that it opens its session.

    Raises RequestRefused, which names the field, and PromptTooLong.
    """
    if not isinstance(body, Mapping):
        raise RequestRefused("the request body is not an object")
    payload = _mapped(body, BODY, "")
    prompt = checked_ids(payload.get("input_ids"), limits.vocab_size, "token_ids")
    if not prompt:
        raise RequestRefused("token_ids is empty", next_step="send at least one prompt token")
    if first and limits.max_first_prompt is not None and len(prompt) > limits.max_first_prompt:
        raise PromptTooLong(f"the first prompt has {len(prompt)} tokens, the limit is {limits.max_first_prompt}")
    payload["input_ids"] = prompt
    payload["sampling_params"] = _sampling(payload.get("sampling_params"), len(prompt), limits)
    payload["return_logprob"] = True
    return payload


def _sampling(params: object, prompt_len: int, limits: Limits) -> dict[str, Any]:
    if params is None:
        params = {}
    if not isinstance(params, Mapping):
        raise RequestRefused("sampling_params is not an object")
    # One completion is what the wire gives anyway, so the number may be said.
    sampling = _mapped({k: v for k, v in params.items() if k != "n" or v != 1}, SAMPLING, "sampling_params.")
    sampling["max_new_tokens"] = _room(sampling.get("max_new_tokens"), prompt_len, limits)
    stop_ids = checked_ids(sampling.pop("stop_token_ids", []), limits.vocab_size, "sampling_params.stop_token_ids")
    if merged := list(dict.fromkeys([*stop_ids.as_list(), *limits.stop_token_ids])):
        sampling["stop_token_ids"] = merged
    stop = sampling.pop("stop", None) or []
    if texts := list(dict.fromkeys([*([stop] if isinstance(stop, str) else stop), *limits.stop])):
        sampling["stop"] = texts
    # The trained ids are the sampled ids: nothing may be trimmed off the end or joined by the detokenizer.
    sampling.update(n=1, no_stop_trim=True, skip_special_tokens=False, spaces_between_special_tokens=False)
    return sampling


def _room(asked: int | None, prompt_len: int, limits: Limits) -> int:
    if asked is not None and asked < 1:
        raise RequestRefused(f"sampling_params.max_tokens is {asked}", next_step="ask for at least one token")
    left = limits.max_context - prompt_len
    if left < 1:
        raise PromptTooLong(f"the prompt has {prompt_len} tokens, the context length is {limits.max_context}")
    return min(left, limits.max_response, asked if asked is not None else left)


def _mapped(given: Mapping[Any, Any], table: Mapping[str, Field], prefix: str) -> dict[str, Any]:
    """`given` under SGLang's names. None means "the default" to both sides and is left out."""
    out: dict[str, Any] = {}
    for name, value in given.items():
        field = table.get(name) if isinstance(name, str) else None
        if field is None:
            raise RequestRefused(
                f"unknown field {prefix}{name}", next_step="known fields: miles_verifiers/wire/fields.py"
            )
        if value is None or field.action == "drop":
            continue
        if field.action == "refuse":
            raise RequestRefused(f"{prefix}{name} is not supported: {field.reason}")
        if not _IS[field.kind](value):
            raise RequestRefused(f"{prefix}{name} is not a valid {field.kind}: {shown(value)}")
        if field.target in out:
            raise RequestRefused(f"{prefix}{name} is given twice, under two names of {field.target}")
        out[field.target] = value
    return out


def _encodable(value: object) -> bool:
    """Whether `value` is text that JSON can carry; lone surrogates cannot be."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_int(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    """NaN would reach the engine as null, which means its default."""
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**53)


def _is_texts(value: object) -> bool:
    return _encodable(value) or (isinstance(value, list) and all(map(_encodable, value)))


def _is_bias(value: object) -> bool:
    """Token id, as JSON's key, -> what is added to its logit."""
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and k.isascii() and k.isdigit() and _is_number(v) for k, v in value.items()
    )


def _looked_at_later(value: object) -> bool:
    return True


_IS: dict[Kind, Callable[[object], bool]] = {
    "int": _is_int,
    "number": _is_number,
    "bool": lambda value: type(value) is bool,
    "text": _encodable,
    "texts": _is_texts,
    "bias": _is_bias,
    "ids": _looked_at_later,
    "object": _looked_at_later,
}


def checked_ids(ids: object, vocab_size: int, name: str) -> TokenIds:
    """`ids` if it is a list of integers in [0, vocab_size). Raises RequestRefused with the first that is not."""
    if not isinstance(ids, (list, tuple, TokenIds)):
        raise RequestRefused(f"{name} is not a list of token ids")
    found = ids if isinstance(ids, TokenIds) else TokenIds.of(ids)
    if found is None or found.largest >= vocab_size:
        at, bad = first_outside(ids.as_list() if isinstance(ids, TokenIds) else ids, vocab_size)
        raise RequestRefused(
            f"{name}[{at}] = {shown(bad)} is not a token id below the vocabulary size {vocab_size}",
            next_step="the tokenizer and the model do not belong together, or ids were made elsewhere",
        )
    return found


def from_sglang(reply: object, *, prompt_ids: Sequence[int], vocab_size: int, where: str) -> dict[str, Any]:
    """renderers' response for SGLang's reply to `prompt_ids`; `where` names request and engine in errors.

    `choices[0]` holds `token_ids` [N], `logprobs.content` [N] of `{"token": "token_id:<id>", "logprob": nats}` and
    `finish_reason`, stop or length. `weight_versions` says under which weights the tokens were sampled, in order.
    Raises ReplyInvalid, which names the field, and GenerationAborted.
    """
    prompt = checked_ids(prompt_ids, vocab_size, "prompt_ids")
    response: dict[str, Any] = orjson.loads(
        response_json(checked_reply(reply, prompt=prompt, vocab_size=vocab_size, where=where))
    )
    return response


def response_json(generation: Generation) -> bytes:
    """renderers' response as JSON, put together from parts that are JSON already."""
    versions = [{"version": span.version, "count": span.count} for span in generation.weight_versions]
    usage = {"prompt_tokens": generation.prompt_tokens, "completion_tokens": len(generation.ids)}
    return b"".join(
        (
            b'{"request_id":',
            orjson.dumps(generation.request_id),
            b',"choices":[{"token_ids":',
            generation.ids.json,
            b',"logprobs":{"content":[',
            generation.content_json,
            b']},"finish_reason":"',
            generation.finish_reason.encode(),
            b'"}],"usage":',
            orjson.dumps(usage),
            b',"weight_versions":',
            orjson.dumps(versions),
            b"}",
        )
    )
