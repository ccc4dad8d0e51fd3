"""Traces of Verifiers' Env API (0.3.1, 0.4.0) as `traces` reads them. Pure: reads the trace, changes nothing.

What differs from 0.2.x, and what becomes of it (verifiers/v1/trace.py and rollout.py, 0.3.1 and 0.4.0):

- A reward is a score with a weight, or None where scoring did not run: None is a failed scoring by name, never zero.
- `errors` keeps those of attempts that were repeated with success: only `ok` says whether the last attempt failed.
- An engine's error crosses HTTP and arrives as a ProviderError whose text holds ours: it gets its name back.
- A prompt over the context ends the rollout under `context_length` in 0.3.1; 0.4.0 only notes a failed call and calls the rollout
  good: it is given the older name.
- The agent's deadline is an error in 0.3.1 and the stop condition `agent_timeout` in 0.4.0, where the rollout is truncated: both
  get the older name `harness_timeout`. Those of setup, finalize and scoring are errors here as in the older versions.
- Branches that 0.4.0 marks as not trainable (compaction that was tried and thrown away) are left out.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from miles_verifiers import errors
from miles_verifiers.rollout.branches import Branch, Node

CONTEXT_LENGTH = "context_length"
HARNESS_TIMEOUT = "harness_timeout"
_OVER_CONTEXT = ("context length", "prompttoolong", "the first prompt has")
"""Parts of what renderers (client.py, 0.1.10 to 0.1.12), SGLang and the wire say of a prompt that is too long; lower case."""
_TIMEOUTS = {
    "setup_timeout": "task setup timed out",
    "finalize_timeout": "task finalize timed out",
    "scoring_timeout": "scoring timed out",
}
"""What Verifiers 0.2 and 0.3 say of a deadline (errors.py `boundary`), by the stop condition of 0.4.0."""
_WIRE_ERRORS = {
    "context_length_exceeded": "PromptTooLong",
    "model_not_found": "ModelUnknown",
    **{
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.WireError)
    },
}
"""Names of our errors by the code that the gateway gives them (wire/gateway_errors.py)."""


@dataclass(frozen=True, slots=True)
class NamedError:
    type: str
    message: str


@dataclass(frozen=True, slots=True)
class TraceView:
    """What `traces.Trace` asks for, read off an Env-API trace once."""

    nodes: Sequence[Node]
    branches: Sequence[Branch]
    rewards: dict[str, float]
    metrics: dict[str, float]
    error: NamedError | None
    stop_condition: str | None
    is_truncated: bool
    last_reply: str


def view_of(trace: Any) -> TraceView:
    over_context = trace.stop_condition == CONTEXT_LENGTH or is_over_context(_last_call_error(trace))
    last_error = None if trace.ok or not trace.errors else trace.errors[-1]
    error = named_error(last_error.type, last_error.message) if last_error is not None else None
    if error is not None and over_context and error.type in ("ProviderError", "PromptTooLong"):
        error = None
    if error is None and trace.stop_condition in _TIMEOUTS:
        error = NamedError("TaskError", _TIMEOUTS[trace.stop_condition])
    timed_out = trace.stop_condition == "agent_timeout" or (error is not None and "agent timeout: " in error.message)
    stop_condition = CONTEXT_LENGTH if over_context else HARNESS_TIMEOUT if timed_out else trace.stop_condition
    return TraceView(
        nodes=trace.nodes,
        branches=[branch for branch in trace.branches if getattr(branch, "trainable", True)],
        rewards={name: reward.value for name, reward in trace.rewards.items() if reward is not None},
        metrics={name: value for name, value in trace.metrics.items() if value is not None},
        error=error,
        stop_condition=stop_condition,
        is_truncated=bool(trace.is_truncated or over_context or timed_out),
        last_reply=trace.last_reply,
    )


def scoring_problem(trace: Any) -> str:
    """Why a rollout that did not fail has no complete score, or nothing."""
    if not trace.ok:
        return ""
    missing = sorted(name for name, reward in trace.rewards.items() if reward is None)
    return f"the reward {', '.join(map(repr, missing))} was not given" if missing else ""


def named_error(kind: str, message: str) -> NamedError:
    """An error as traces record it; one that the gateway answered with gets its own name and text back.

    openai puts an error answer into its exception's text as a Python literal (openai/_base_client.py 2.54):

        ProviderError: Error code: 502 - {'error': {'message': 'the reply ...', 'code': 'reply_invalid', ...}}
    """
    start = message.find("{")
    if kind != "ProviderError" or start < 0:
        return NamedError(kind, message)
    try:
        body = ast.literal_eval(message[start:])
        answer = body.get("error", body)
        return NamedError(_WIRE_ERRORS[answer["code"]], str(answer["message"]))
    except (ValueError, SyntaxError, AttributeError, KeyError, TypeError):
        return NamedError(kind, message)


def _last_call_error(trace: Any) -> str:
    """Text of the error of the last model call; empty where that went well."""
    error = trace.calls[-1].error if trace.calls else None
    return "" if error is None or error.status_code not in (400, 413) else str(error.message)


def is_over_context(message: str) -> bool:
    """Whether an error's text says that a prompt is over the context."""
    return any(part in message.casefold() for part in _OVER_CONTEXT)
