"""JSON over HTTP to one engine on this machine, with a deadline for every call. No proxy, no retries, no dependencies."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

# Proxies of the user's environment know nothing of our loopback ports.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoAnswer(Exception):
    """The engine did not answer in time, or broke the connection."""


def call(url: str, body: dict[str, Any] | None = None, *, timeout: float) -> tuple[int, Any]:
    """GET `url`, or POST `body` as JSON. Returns the status and the decoded reply (text where it is not JSON).

    Raises NoAnswer where there is no HTTP reply within `timeout` seconds; any status that arrives is returned.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http to loopback
    try:
        with _OPENER.open(request, timeout=timeout) as reply:
            return reply.status, _decoded(reply.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _decoded(error.read())
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(str(error) or type(error).__name__) from None


def _decoded(raw: bytes) -> Any:
    text = raw.decode(errors="replace")
    try:
        return json.loads(text) if text else None
    except ValueError:
        return text
