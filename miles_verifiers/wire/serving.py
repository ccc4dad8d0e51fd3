"""How a gateway listens and how much it takes on."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address

from miles_verifiers.errors import InputError


@dataclass(frozen=True, slots=True)
class Serving:
    """How the gateway listens, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    token: str | None = None
    """What `Authorization: Bearer` must carry; needed where `host` is not the loopback."""
    max_running: int = 1024
    """Requests at the engines at once."""
    max_waiting: int = 4096
    """Requests that wait for their turn; one more is answered 429."""
    max_wait: float = 120.0
    """Seconds that a request waits for its turn; then it is answered 503."""
    max_body: int = 16 * 2**20
    """Bytes of a request; a prompt of a million tokens has about 6 MiB."""
    read_timeout: float = 60.0
    """Seconds until a request's body must be there; then it is answered 408."""


def check_exposure(serving: Serving) -> None:
    """Raise InputError for settings under which anyone could use the engines, or nobody the gateway."""
    if serving.token is not None and not (serving.token.isascii() and serving.token.isprintable() and serving.token):
        raise InputError("the gateway's token must be of printable ASCII characters")
    if serving.token is None and not _is_loopback(serving.host):
        raise InputError(
            f"the gateway would listen on {serving.host or 'every address'} for everyone",
            next_step="give it a token, or let it listen on 127.0.0.1",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
