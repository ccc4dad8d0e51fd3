"""Gateway: renderers' HTTP API in front of SGLang, as a server that lives on the event loop of whoever opens it.

    async with Gateway([engine_url], limits=limits, model="policy") as gateway:
        ... a client with base_url=gateway.base_url ...         # http://127.0.0.1:PORT/v1
        turns = gateway.take(session)                            # what was sampled for X-Session-ID: session

    GET  /v1/models               the one model, with its `max_model_len`
    POST /inference/v1/generate   renderers' request (renderers/client.py `generate`, 0.1.8 to 0.1.12)
    GET  /health                  200; 503 while draining. Needs no token
    GET  /metrics                 Prometheus text

Errors have the OpenAI API's shape, {"error": {"message", "type", "param", "code"}}: 4xx for what the caller did, 502 for what the
engine did, 429 and 503 with Retry-After when there is too much to do, 504 for a deadline. `x-should-retry` keeps OpenAI's
client from repeating what was repeated here already (openai/_base_client.py 2.x heeds it). A caller that goes away
takes its request along: the engine is told to stop.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Self

import orjson

from miles_verifiers.errors import (
    EngineBusy,
    HostError,
    ModelUnknown,
    QueueFull,
    RequestRefused,
    WireError,
    shown,
)
from miles_verifiers.wire.admission import Admission
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.core import Counters, Turn, Wire
from miles_verifiers.wire.gateway_errors import error_response, http_error_response
from miles_verifiers.wire.gateway_metrics import CONTENT_TYPE, GatewayMetrics
from miles_verifiers.wire.http.requests import Request
from miles_verifiers.wire.http.server import HttpServer, Response
from miles_verifiers.wire.serving import Serving, check_exposure
from miles_verifiers.wire.token_ids import parsed_request
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import GENERATE_PATH, SESSION_HEADER

__all__ = ["Gateway", "Serving"]

_Handler = Callable[[Request], Awaitable[Response]]
_SESSION = SESSION_HEADER.lower().encode()
_LONGEST_SESSION = 256
"""Characters of a session's id."""


class Gateway:
    """See the module. `open` and `close` it, or use it as a context, on one event loop.

    `keep_turns` is for whoever trains in this process and calls `take` for each session.
    Raises InputError for settings that cannot work and HostError for an address that cannot be listened on.
    """

    def __init__(
        self,
        engine_urls: str | Sequence[str],
        *,
        limits: Limits,
        model: str = "policy",
        deadlines: Deadlines | None = None,
        serving: Serving | None = None,
        keep_turns: bool = True,
    ) -> None:
        self.serving = serving or Serving()
        check_exposure(self.serving)
        self.model = model
        self.wire = Wire(
            engine_urls,
            limits=limits,
            deadlines=deadlines,
            max_connections=self.serving.max_running,
            keep_turns=keep_turns,
        )
        self.url = ""
        """http://HOST:PORT once it is open."""
        self._admission = Admission(self.serving.max_running, self.serving.max_waiting, self.serving.max_wait)
        self._metrics = GatewayMetrics()
        self._routes: dict[str, tuple[str, _Handler]] = {
            GENERATE_PATH: ("POST", self._generate),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._show_metrics),
        }
        self._server = HttpServer(self, largest_body=self.serving.max_body, read_timeout=self.serving.read_timeout)

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes for its base url."""
        return f"{self.url}/v1"

    @property
    def counters(self) -> Counters:
        return self.wire.counters

    def take(self, session: str) -> list[Turn]:
        """The turns of `session`, once, as of MilesSGLangTransport."""
        return self.wire.take(session)

    def cancel(self, session: str) -> int:
        """Give up the requests of `session` that are running; they are answered 502. Returns how many there were."""
        return self.wire.cancel(session)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        try:
            host, port = await self._server.open(self.serving.host, self.serving.port)
        except OSError as error:
            await self.close()
            raise HostError(
                f"the gateway cannot listen: {error.strerror or error}",
                where=f"{self.serving.host}:{self.serving.port}",
                next_step="choose another port; 0 takes a free one",
            ) from None
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def drain(self, seconds: float) -> bool:
        """Refuse new requests and let those that were taken on end, for `seconds` at most. True if all did."""
        self._admission.draining = True
        deadline = asyncio.get_running_loop().time() + seconds
        while self._admission.running or self._admission.waiting:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    async def close(self) -> None:
        """Give up what is running, tell the engines, and stop listening. `drain` before for a gentle end."""
        self._admission.draining = True
        await self.wire.close()
        await self._server.close(grace=1.0)

    def refuse(self, request: Request) -> Response | None:
        """What can be said before a body is read: the token before anything else."""
        try:
            return self._refusal(request)
        except WireError as error:
            return self._failed(request, error)

    async def answer(self, request: Request) -> Response:
        try:
            response = await self._routes[request.path][1](request)
        except asyncio.CancelledError:
            self._metrics.gone += 1
            raise
        except WireError as error:
            return self._failed(request, error)
        self._metrics.answered(request.path, response.status)
        return response

    def broken(self, status: HTTPStatus, what: str, request: Request | None = None) -> Response:
        return self._http_error(status, what, request)

    def _refusal(self, request: Request) -> Response | None:
        if self.serving.token is not None and request.path != "/health" and not self._is_authorised(request):
            what = "the Authorization header does not carry the gateway's bearer token"
            return self._http_error(HTTPStatus.UNAUTHORIZED, what, request, {"WWW-Authenticate": "Bearer"})
        route = self._routes.get(request.path)
        said = f"{request.method} {request.path}"
        if route is None:
            return self._http_error(HTTPStatus.NOT_FOUND, f"{said}: Not Found", request)
        if request.method != route[0]:
            what = f"{said}: Method Not Allowed"
            return self._http_error(HTTPStatus.METHOD_NOT_ALLOWED, what, request, {"Allow": route[0]})
        if request.length is not None and request.length > self.serving.max_body:
            what = f"the request body is over the limit of {self.serving.max_body} bytes"
            return self._http_error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, what, request)
        if request.path == GENERATE_PATH:
            self._admission.check()
        return None

    async def _generate(self, request: Request) -> Response:
        started = time.perf_counter()
        session = _session(request)
        body = _parsed(request.body)
        self._check_model(body)
        await self._admission.enter()
        try:
            content = await self.wire.generate(body, session)
        finally:
            self._admission.leave(time.perf_counter() - started)
        self._metrics.took(time.perf_counter() - started)
        return Response(200, content)

    def _check_model(self, body: Any) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if model is not None and model != self.model:
            raise ModelUnknown(
                f"the model {shown(model)} does not exist", next_step=f"the gateway serves {self.model!r}"
            )

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "miles_verifiers",
            "max_model_len": self.wire.limits.max_context,
        }
        return Response(200, orjson.dumps({"object": "list", "data": [card]}))

    async def _health(self, request: Request) -> Response:
        draining = self._admission.draining
        body = orjson.dumps({"status": "draining" if draining else "ok"})
        return Response(503 if draining else 200, body)

    async def _show_metrics(self, request: Request) -> Response:
        text = self._metrics.as_text(self.wire, self._admission)
        return Response(200, text.encode(), content_type=CONTENT_TYPE)

    def _failed(self, request: Request, error: WireError) -> Response:
        error.at(f"session {request.header(_SESSION) or '-'}")
        retry_after = self._admission.retry_after() if isinstance(error, (EngineBusy, QueueFull)) else None
        response = error_response(error, retry_after)
        self._metrics.answered(request.path, response.status)
        return response

    def _http_error(
        self, status: HTTPStatus, what: str, request: Request | None = None, headers: dict[str, str] | None = None
    ) -> Response:
        known = request is not None and request.path in self._routes
        self._metrics.answered(request.path if request is not None and known else "other", status)  # there must be few
        return http_error_response(status, what, headers or {})

    def _is_authorised(self, request: Request) -> bool:
        assert self.serving.token is not None
        expected = f"Bearer {self.serving.token}".encode()
        return hmac.compare_digest(request.headers.get(b"authorization", b""), expected)


def _session(request: Request) -> str | None:
    session = request.header(_SESSION) or None
    if session is not None and len(session) > _LONGEST_SESSION:
        raise RequestRefused(f"{SESSION_HEADER} has {len(session)} characters, the limit is {_LONGEST_SESSION}")
    return session


def _parsed(raw: bytes) -> Any:
    try:
        return parsed_request(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the request body is not JSON: {error}") from None
