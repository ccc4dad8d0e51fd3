"""MilesSGLangTransport: what renderers takes for its OpenAI client, in front of SGLang's native API, in process.

Verifiers 0.2.x hands its TrainClient an "openai" object of which renderers uses four things (renderers/client.py 0.1.8 to
0.1.10): `.base_url`, `.get("/models")` for the context length, `.post(url, body=..., options={"headers": ...})` whose result
has `.content`, and `.close()`. The transport is that object; Verifiers 0.3 and newer want a server: see gateway.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_verifiers.errors import RequestRefused, WireError
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.core import Counters, Turn, Wire
from miles_verifiers.wire.translate import Limits

__all__ = ["GENERATE_PATH", "SESSION_HEADER", "Counters", "MilesSGLangTransport", "Turn", "WireResponse"]

GENERATE_PATH = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"
"""Verifiers sends the trace's id under it (verifiers/v1/clients/client.py 0.2.0)."""


@dataclass(frozen=True, slots=True)
class WireResponse:
    """The part of an HTTP response that renderers reads."""

    content: bytes
    status_code: int = 200


class MilesSGLangTransport(Wire):
    """See the module. `on_error` turns our error into the one that the caller's framework expects."""

    def __init__(
        self,
        engine_urls: str | Sequence[str],
        *,
        limits: Limits,
        model: str = "policy",
        deadlines: Deadlines | None = None,
        max_connections: int = 1024,
        on_error: Callable[[WireError], Exception] | None = None,
    ) -> None:
        super().__init__(engine_urls, limits=limits, deadlines=deadlines, max_connections=max_connections)
        self.model = model
        self.base_url = f"{self.client.urls[0]}/v1"
        self._on_error = on_error

    async def get(self, path: str, *, cast_to: object = None, **_: object) -> dict[str, Any]:
        """The list of models, with the context length that prompts must keep to."""
        if path != "/models":
            raise self._failure(RequestRefused(f"GET {path} is not known", next_step="GET /models is"))
        return {"object": "list", "data": [{"id": self.model, "max_model_len": self.limits.max_context}]}

    async def post(
        self,
        endpoint: str,
        *,
        cast_to: object = None,
        body: object = None,
        options: Mapping[str, Any] | None = None,
        **_: object,
    ) -> WireResponse:
        """Answer renderers' generate request. Raises what `on_error` makes of a WireError."""
        headers = (options or {}).get("headers") or {}
        session = headers.get(SESSION_HEADER)
        try:
            if not endpoint.endswith(GENERATE_PATH):
                raise RequestRefused(f"POST {endpoint} is not known", next_step=f"POST {GENERATE_PATH} is")
            return WireResponse(await self.generate(body, session))
        except WireError as error:
            failure = self._failure(error.at(f"session {session}" if session else ""))
            if failure is error:
                raise
            raise failure from error

    def _failure(self, error: WireError) -> Exception:
        return error if self._on_error is None else self._on_error(error)
