"""`miles-verifiers gateway`: its options, and what they mean to `serve`. Light: what needs aiohttp is imported when it runs."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_verifiers.wire.gateway import Gateway

TOKEN_VARIABLE = "MILES_VERIFIERS_GATEWAY_TOKEN"
"""Not an option: a command line is for every user of the machine to see."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"renderers' HTTP API in front of SGLang. {TOKEN_VARIABLE}: a bearer token that callers must bring."
    )
    add = parser.add_argument
    add("--engine", action="append", required=True, type=_url, metavar="URL", help="a SGLang server; may be repeated")
    add("--host", default="127.0.0.1", help="other than the loopback only with a token; default: 127.0.0.1")
    add("--port", type=_integer(0, 65535), default=8100, help="0 takes a free one; default: 8100")
    add("--model", help="name to serve under; default: the engine's")
    add("--vocab-size", type=_integer(1), metavar="N", help="default: of config.json in the engine's model folder")
    add("--max-context", type=_integer(2), metavar="N", help="tokens; default: the engine's")
    add("--max-response", type=_integer(1), metavar="N", help="tokens of one reply; default: the context")
    add("--max-first-prompt", type=_integer(1), metavar="N", help="tokens of a session's first prompt")
    add("--max-running", type=_integer(1), default=1024, metavar="N", help="requests at engines at once; default: 1024")
    add("--max-waiting", type=_integer(0), default=4096, metavar="N", help="more are answered 429; default: 4096")
    add("--max-wait", type=_seconds, default=120.0, metavar="S", help="for a turn, then 503; default: 120")
    add("--request-timeout", type=_seconds, default=240.0, metavar="S", help="for an answer, then 504; default: 240")
    add("--first-byte-timeout", type=_seconds, metavar="S", help="for an engine's first byte, then 504; default: none")
    add("--drain", type=_seconds, default=30.0, metavar="S", help="for running requests, on a signal; default: 30")


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal; returns the exit code. Raises what `serve` raises."""
    from miles_verifiers.wire.client import Deadlines
    from miles_verifiers.wire.gateway import Serving
    from miles_verifiers.wire.serve import Wanted, serve

    serve(
        Wanted(
            engines=arguments.engine,
            model=arguments.model,
            vocab_size=arguments.vocab_size,
            max_context=arguments.max_context,
            max_response=arguments.max_response,
            max_first_prompt=arguments.max_first_prompt,
        ),
        Deadlines(first_byte=arguments.first_byte_timeout, total=arguments.request_timeout),
        Serving(
            host=arguments.host,
            port=arguments.port,
            token=os.environ.get(TOKEN_VARIABLE) or None,
            max_running=arguments.max_running,
            max_waiting=arguments.max_waiting,
            max_wait=arguments.max_wait,
        ),
        drain=arguments.drain,
        ready=announce,
    )
    return 0


def announce(gateway: Gateway) -> None:
    from miles_verifiers.wire.scan import COMPILED

    limits, engines = gateway.wire.limits, " ".join(gateway.wire.client.urls)
    what = f"model {gateway.model}, context {limits.max_context}, vocabulary {limits.vocab_size}"
    slower = "" if COMPILED else "; installed without a C compiler, at nearly twice the CPU"
    print(f"gateway {gateway.url} -> {engines}: {what}{slower}", flush=True)


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} does not begin with http:// or https://")
    return text


def _integer(least: int, most: int = 2**31) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return int(text)

    return integer


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
