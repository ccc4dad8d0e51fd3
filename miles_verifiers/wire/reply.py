"""SGLang's reply to one request, checked before anything is made of it. Pure.

Source of the format: sglang/srt/managers/tokenizer_manager.py (0.5.15 to 0.5.23). Neither renderers nor Verifiers looks at
finish reasons, and renderers 0.1.8 takes missing log-probs for zeros: what is let through here is trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import orjson

from miles_verifiers.errors import GenerationAborted, ReplyInvalid, shown
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.wire.columns import Columns
from miles_verifiers.wire.scan import MISSING_LOGPROB
from miles_verifiers.wire.token_ids import TokenIds, first_outside

_ROUNDING = 1e-5
"""A log-prob may be this much above zero by rounding of a probability of one; it is then taken as zero."""
_ENTRIES = "meta_info.output_token_logprobs"
_FINISH_REASONS = frozenset({"stop", "length"})


@dataclass(frozen=True, slots=True)
class Generation:
    """A good reply: N sampled ids, their log-probs in nats, and the weight versions they were sampled under."""

    request_id: str
    ids: TokenIds
    """[N]"""
    content_json: bytes
    """renderers' `logprobs.content` [N], as JSON between its brackets."""
    finish_reason: str
    """stop or length"""
    prompt_tokens: int
    weight_versions: list[WeightSpan]
    """Counts sum to N."""


def checked_reply(reply: object, *, prompt: TokenIds, vocab_size: int, where: str) -> Generation:
    """What SGLang's `reply` to `prompt` says; `where` names request and engine in errors.

    Raises ReplyInvalid, which names the field, and GenerationAborted, whatever comes in.
    """
    meta = _meta(reply, where)
    finish = _finish_reason(meta, where)
    ids, content_json = _sampled(meta, vocab_size, where)
    _check_counts(reply, meta, ids, prompt, where)
    spans = _weight_spans(meta, len(ids), where)
    request_id = meta.get("id")
    return Generation(request_id if isinstance(request_id, str) else "", ids, content_json, finish, len(prompt), spans)


def _invalid(what: str, where: str) -> NoReturn:
    raise ReplyInvalid(what, where=where, next_step="the reply is not used; the engine's log may say more")


def _meta(reply: object, where: str) -> Mapping[str, Any]:
    meta = reply.get("meta_info") if isinstance(reply, Mapping) else None
    if not isinstance(meta, Mapping):
        _invalid("the reply has no meta_info", where)
    return meta


def _finish_reason(meta: Mapping[str, Any], where: str) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    if kind == "abort":
        said = reason.get("message") if isinstance(reason, Mapping) else None
        why = said if isinstance(said, str) and said else "no reason given"
        raise GenerationAborted(f"the engine aborted the request: {why}", where=where)
    if not isinstance(kind, str) or kind not in _FINISH_REASONS:
        _invalid(f"meta_info.finish_reason is {shown(reason)}", where)
    return kind


def _sampled(meta: Mapping[str, Any], vocab_size: int, where: str) -> tuple[TokenIds, bytes]:
    """Ids of the reply and the response's content, each id and each log-prob checked."""
    entries = meta.get("output_token_logprobs")
    if isinstance(entries, Columns):
        if entries.ids.largest >= vocab_size:
            _refuse_id(entries.ids.as_list(), vocab_size, where)
        return entries.ids, entries.content_json
    if not isinstance(entries, list):
        _invalid(f"{_ENTRIES} is missing", where)
    listed, logprobs = _columns_of(entries, where)
    ids = TokenIds.of(listed)
    if ids is None or ids.largest >= vocab_size:
        _refuse_id(listed, vocab_size, where)
    return ids, _content_json(listed, [_log_prob(value, at, where) for at, value in enumerate(logprobs)])


def _refuse_id(ids: list[Any], vocab_size: int, where: str) -> NoReturn:
    at, bad = first_outside(ids, vocab_size)
    _invalid(f"{_ENTRIES}[{at}] has the id {shown(bad)}, the vocabulary size is {vocab_size}", where)


def _columns_of(entries: list[Any], where: str) -> tuple[list[Any], list[Any]]:
    try:
        return [entry[1] for entry in entries], [entry[0] for entry in entries]
    except (TypeError, KeyError, IndexError):
        _invalid(f"{_ENTRIES} is not a list of [log-prob, id, text]", where)


def _content_json(ids: list[int], logprobs: list[float]) -> bytes:
    entries = [{"token": f"token_id:{token}", "logprob": value} for token, value in zip(ids, logprobs, strict=True)]
    return orjson.dumps(entries)[1:-1]


def _log_prob(value: Any, at: int, where: str) -> float:
    """`value` as a log-prob; what rounding put above zero is zero."""
    number = float(value) if type(value) is int and abs(value) < 2**53 else value
    if type(number) is not float or not MISSING_LOGPROB < number <= _ROUNDING:  # which NaN is not, either
        _invalid(f"{_ENTRIES}[{at}] has the log-prob {shown(value)}", where)
    return min(number, 0.0)


def _check_counts(reply: Any, meta: Mapping[str, Any], ids: TokenIds, prompt: TokenIds, where: str) -> None:
    for name, expected in (("completion_tokens", len(ids)), ("prompt_tokens", len(prompt))):
        counted = meta.get(name, expected)
        if counted != expected:
            _invalid(f"meta_info.{name} is {shown(counted)}, but there are {expected}", where)
    output_ids = reply.get("output_ids", ids)
    if output_ids is not ids and output_ids != ids.as_list():
        have = len(output_ids) if isinstance(output_ids, list) else "no list of"
        _invalid(f"output_ids ({have} ids) are not those of output_token_logprobs ({len(ids)} ids)", where)
    echoed = reply.get("prompt_token_ids")
    if echoed is not None and echoed != prompt.as_list():
        _invalid("prompt_token_ids are not those that were sent", where)


def _weight_spans(meta: Mapping[str, Any], count: int, where: str) -> list[WeightSpan]:
    """Weight versions of the reply's `count` tokens, in order; the counts sum to `count`.

    SGLang gives per-token spans (`weight_versions`) where weights changed while it sampled, one `weight_version` else.
    """
    if not count:
        return []
    spans = meta.get("weight_versions")
    if spans is None:
        version = meta.get("weight_version")
        if not isinstance(version, (str, int)):
            what = "missing" if version is None else shown(version)
            _invalid(f"meta_info.weight_version is {what}", where)
        return [WeightSpan(str(version), count)]
    out, at = [], 0
    for span in spans if isinstance(spans, list) else [None]:
        match span:
            case {"version": str(version), "start": int(start), "end": int(end)} if start == at and end >= start:
                at = end
                if end > start:
                    out.append(WeightSpan(version, end - start))
            case _:
                _invalid(f"meta_info.weight_versions has the span {shown(span)} at token {at}", where)
    if at != count:
        _invalid(f"meta_info.weight_versions cover {at} of {count} tokens", where)
    return out
