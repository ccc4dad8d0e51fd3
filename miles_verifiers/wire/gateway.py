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
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import orjson
from aiohttp import web

from miles_verifiers.errors import (
    EngineBusy,
    HostError,
    ModelUnknown,
    QueueFull,
    RequestRefused,
    WireError,
)
from miles_verifiers.wire.admission import Admission
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.core import Counters, Turn, Wire
from miles_verifiers.wire.gateway_errors import error_response, http_error_response
from miles_verifiers.wire.gateway_metrics import CONTENT_TYPE, GatewayMetrics
from miles_verifiers.wire.serving import Serving, check_exposure
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import GENERATE_PATH, SESSION_HEADER

__all__ = ["Gateway", "Serving"]

log = logging.getLogger(__name__)

_Handler = Callable[[web.BaseRequest], Awaitable[web.Response]]
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
        self._runner: web.ServerRunner | None = None

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
        # aiohttp's low-level server: an Application's routing and middlewares cost a third of what a request costs here.
        # A caller that goes away cancels its handler, and with it the request to the engine.
        server = web.Server(
            self._answer, request_factory=self._make_request, handler_cancellation=True, access_log=None
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.serving.host, self.serving.port).start()
        except OSError as error:
            await self.close()
            raise HostError(
                f"the gateway cannot listen: {error.strerror or error}",
                where=f"{self.serving.host}:{self.serving.port}",
                next_step="choose another port; 0 takes a free one",
            ) from None
        host, port = self._runner.addresses[0][:2]
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
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.BaseRequest) -> web.Response:
        self._admission.check()
        started = time.perf_counter()
        session = _session(request)
        body = _parsed(await self._read(request))
        self._check_model(body)
        await self._admission.enter()
        try:
            content = await self.wire.generate(body, session)
        finally:
            self._admission.leave(time.perf_counter() - started)
        self._metrics.took(time.perf_counter() - started)
        return web.Response(body=content, content_type="application/json")

    async def _read(self, request: web.BaseRequest) -> bytes:
        if request.content.is_eof():  # all of it is here, as nearly always
            return await request.read()
        if request.headers.get("Expect", "").lower() == "100-continue":  # curl, for bodies from a megabyte on
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self.serving.read_timeout):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None

    def _check_model(self, body: Any) -> None:
        model = body.get("model") if isinstance(body, dict) else None
        if model is not None and model != self.model:
            raise ModelUnknown(
                f"the model {model!r:.80} does not exist", next_step=f"the gateway serves {self.model!r}"
            )

    async def _models(self, request: web.BaseRequest) -> web.Response:
        card = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "miles_verifiers",
            "max_model_len": self.wire.limits.max_context,
        }
        return _json({"object": "list", "data": [card]})

    async def _health(self, request: web.BaseRequest) -> web.Response:
        draining = self._admission.draining
        return _json({"status": "draining" if draining else "ok"}, status=503 if draining else 200)

    async def _show_metrics(self, request: web.BaseRequest) -> web.Response:
        text = self._metrics.as_text(self.wire, self._admission)
        return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """The token before anything else, and no error but in the API's shape."""
        known = request.path in self._routes
        try:
            if self.serving.token is not None and request.path != "/health":
                self._authorise(request)
            response = await self._handler(request)(request)
        except asyncio.CancelledError:
            self._metrics.gone += 1
            raise
        except WireError as error:
            error.at(f"session {request.headers.get(SESSION_HEADER, '-')}")
            retry_after = self._admission.retry_after() if isinstance(error, (EngineBusy, QueueFull)) else None
            response = error_response(error, retry_after)
        except web.HTTPException as error:
            response = http_error_response(error, request)
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            response = http_error_response(web.HTTPInternalServerError(), request)
        self._metrics.answered(request.path if known else "other", response.status)  # there must be few
        return response

    def _handler(self, request: web.BaseRequest) -> _Handler:
        route = self._routes.get(request.path)
        if route is None:
            raise web.HTTPNotFound
        method, handler = route
        if request.method != method:
            raise web.HTTPMethodNotAllowed(request.method, [method])
        return handler

    def _make_request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        """As web.Server's own (aiohttp/web_server.py 3.14), with our limit on bodies."""
        loop = asyncio.get_running_loop()
        return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self.serving.max_body)

    def _authorise(self, request: web.BaseRequest) -> None:
        assert self.serving.token is not None
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {self.serving.token}".encode()):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})


def _session(request: web.BaseRequest) -> str | None:
    session = request.headers.get(SESSION_HEADER) or None
    if session is not None and len(session) > _LONGEST_SESSION:
        raise RequestRefused(f"{SESSION_HEADER} has {len(session)} characters, the limit is {_LONGEST_SESSION}")
    return session


def _parsed(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestRefused(f"the request body is not JSON: {error}") from None


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")
