"""Errors as the OpenAI API shapes them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from http import HTTPStatus

import orjson
from aiohttp import web

from miles_verifiers.errors import ModelUnknown, PromptTooLong, QueueFull, WireError

_CODES: dict[type[WireError], str] = {PromptTooLong: "context_length_exceeded", ModelUnknown: "model_not_found"}
"""OpenAI's own codes; the other errors carry their class's name."""


def error_response(error: WireError, retry_after: int | None = None) -> web.Response:
    """The answer to a request that failed. `retry_after`, in seconds, is for when there was too much to do."""
    code = _CODES.get(type(error)) or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    headers = {"x-should-retry": "true" if isinstance(error, QueueFull) else "false"}
    if retry_after is not None:
        headers["Retry-After"] = str(retry_after)
    return _shaped(error.status, str(error), code, headers)


def http_error_response(error: web.HTTPException, request: web.BaseRequest) -> web.Response:
    """The answer where HTTP itself is the matter: an unknown path, a method, a size, a missing token."""
    phrase = HTTPStatus(error.status).phrase
    headers = {"x-should-retry": "false"}
    headers |= {name: error.headers[name] for name in ("Allow", "WWW-Authenticate") if name in error.headers}
    message = f"{request.method} {request.path}: {phrase}"
    if error.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        message = f"the request body is over the limit of {request.client_max_size} bytes"
    if error.status == HTTPStatus.UNAUTHORIZED:
        message = "the Authorization header does not carry the gateway's bearer token"
    return _shaped(error.status, message, phrase.lower().replace(" ", "_"), headers)


def _shaped(status: int, message: str, code: str, headers: dict[str, str]) -> web.Response:
    # Headers and paths may hold bytes that are no text, and messages name them.
    message = message.encode(errors="replace").decode()
    error = {"message": message, "type": _kind(status), "param": None, "code": code}
    body = orjson.dumps({"error": error})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _kind(status: int) -> str:
    if status == HTTPStatus.UNAUTHORIZED:
        return "authentication_error"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "rate_limit_error"
    return "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
