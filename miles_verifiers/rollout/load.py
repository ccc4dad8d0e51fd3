"""Which backend serves the Verifiers that is installed, and everything that it needs, made ready off the event loop."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles_verifiers.config.settings import RolloutSection, RunConfig
from miles_verifiers.rollout import interpreter
from miles_verifiers.rollout.backend import MODEL_NAME, Backend
from miles_verifiers.wire.client import Deadlines
from miles_verifiers.wire.gateway import Gateway, Serving
from miles_verifiers.wire.translate import Limits
from miles_verifiers.wire.transport import MilesSGLangTransport

if TYPE_CHECKING:
    from miles_verifiers.rollout.renderers import RendererChoice


@dataclass(frozen=True, slots=True)
class Loaded:
    backend: Backend
    renderer: RendererChoice
    wire: MilesSGLangTransport | Gateway
    """What the backend reaches the engine through; closed after it."""


def limits_of(rollout: RolloutSection, vocab_size: int) -> Limits:
    """What a request of training or evaluation may ask for."""
    return Limits(
        vocab_size,
        rollout.rollout_max_context_len,
        max(rollout.rollout_max_response_len, rollout.eval_max_response_len or 0),
        rollout.rollout_max_prompt_len,
        tuple(rollout.rollout_stop),
        tuple(rollout.rollout_stop_token_ids),
    )


def settle() -> None:
    """Take all that is loaded out of garbage collection, for good.

    It stays anyway, and a full collection that visits all of Verifiers and transformers stops the event loop for half a second.
    """
    gc.collect()
    gc.freeze()


def load_backend(config: RunConfig, model: Path, engine_urls: Sequence[str], vocab_size: int) -> Loaded:
    """Imports and files, for a thread: verifiers, transformers and an environment take seconds.

    Raises EnvironmentPackageError for a Verifiers that is not supported or not the configured one, or an environment that cannot
    be built, and what renderers.choose_renderer raises.
    """
    api = interpreter.check_verifiers(config.environment.verifiers)
    from miles_verifiers.rollout.renderers import choose_renderer

    rollout = config.rollout
    limits = limits_of(rollout, vocab_size)
    deadlines = Deadlines(total=rollout.request_timeout)
    renderer = choose_renderer(config.environment.renderer, model, config.environment.history)
    if api == "episodes":
        from miles_verifiers.rollout.v02.episodes import EpisodeBackend, provider_error

        transport = MilesSGLangTransport(
            engine_urls, limits=limits, model=MODEL_NAME, deadlines=deadlines, on_error=provider_error
        )
        return Loaded(EpisodeBackend(config.environment, rollout, transport, renderer), renderer, transport)
    from miles_verifiers.rollout.v03.episodes import EnvBackend

    # Rollouts bound the requests already; the gateway must not answer 429 to a rollout that is in flight.
    serving = Serving(max_running=max(rollout.max_concurrency, 1024))
    gateway = Gateway(engine_urls, limits=limits, model=MODEL_NAME, deadlines=deadlines, serving=serving)
    return Loaded(EnvBackend(config.environment, rollout, gateway, renderer, model), renderer, gateway)
