"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from http import HTTPStatus

import orjson

from miles_verifiers.errors import ModelUnknown, PromptTooLong, QueueFull, WireError
from miles_verifiers.wire.http.server import Response

_CODES: dict[type[WireError], str] = {PromptTooLong: "context_length_exceeded", ModelUnknown: "model_not_found"}
"""OpenAI's own codes; the other errors carry their class's name."""


def error_response(error: WireError, retry_after: int | None = None) -> Response:
    """The answer to a request that failed. `retry_after`, in seconds, is for when there was too much to do."""
    code = _CODES.get(type(error)) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    headers = {"x-should-retry": "true" if isinstance(error, QueueFull) else "false"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return _shaped(error.status, str(error), code, headers)


def http_error_response(status: HTTPStatus, what: str, headers: dict[str, str]) -> Response:
    """The answer where HTTP itself is the matter: an unknown path, a method, a size, a missing token."""
    code = status.phrase.lower().replace(" ", "_")
    return _shaped(status, what, code, {"x-should-retry": "false", **headers})


def _shaped(status: int, message: str, code: str, headers: dict[str, str]) -> Response:
    # Headers and paths may hold bytes that are no text, and messages name them.
    message = message.encode(errors="replace").decode()
    error = {"message": message, "type": _kind(status), "param": None, "code": code}
    body = orjson.dumps({"error": error})
    return Response(int(status), body, headers)


def _kind(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
