"""Which renderer makes token ids of messages, decided once, at start, and said aloud.

renderers itself decides `auto` by the checkpoint's name on the hub alone (MODEL_RENDERER_MAP in renderers/base.py, 0.1.8 to
0.1.12), so a local folder of a known model falls back to its default renderer without a word. Here the folder's config
proposes a renderer, and the checkpoint's own chat template must agree with it, id by id, on a conversation.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_verifiers.errors import ConfigError, ModelError
from miles_verifiers.rollout.renderer_probe import Probe, probe

_PROBE: tuple[dict[str, str], ...] = (
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Print 6 * 7\n  in Python."},
    {"role": "assistant", "content": "print(6 * 7)"},
    {"role": "user", "content": "And the word caf\u00e9?"},
)
_BY_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "llama": "llama-3",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm-4.5",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseek-v3",
    "kimi_k2": "kimi-k2",
}
"""Renderer worth trying for a `model_type`; the probe has the last word."""
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class RendererChoice:
    name: str
    reason: str
    tools: bool
    """Whether it can render tools and parse calls of them."""
    turns: Probe
    """Whether a later turn extends the ids of an earlier one."""
    make: Callable[[], Any]
    """A new renderers.Renderer, with a tokenizer of its own: no two threads may share one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its config (renderers/configs.py) besides the name."""

    def line(self) -> str:
        """For people: name, reason, and what it cannot do."""
        cannot = [] if self.tools else ["no tools"]
        if self.turns.extends != "bridge":
            cannot.append("every turn is rendered anew")
        if self.turns.lost:
            cannot.append(
                f"a later turn does not keep {', '.join(self.turns.lost)}: such a rollout forks (environment.history)"
            )
        return f"renderer {self.name}: {self.reason}" + (f" ({'; '.join(cannot)})" if cannot else "")

    def render_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt that `messages` make. Takes milliseconds to seconds: not on an event loop."""
        return list(self.make().render_ids(list(messages), add_generation_prompt=True))


def choose_renderer(requested: str, model: Path, history: str = "template") -> RendererChoice:
    """The renderer for the checkpoint folder `model`. Takes seconds (it loads the tokenizer): not on an event loop.

    Raises ConfigError for an unknown name or one that this tokenizer cannot serve, ModelError for a folder without
    tokenizer or chat template.
    """
    from renderers.base import load_tokenizer

    identity, model_type = _identity(model)
    try:
        tokenizer = load_tokenizer(str(model))
        reference = _template_ids(tokenizer)
    except Exception as error:
        raise ModelError(
            f"the tokenizer cannot render a conversation: {type(error).__name__}: {error}",
            where=str(model),
            next_step="the folder needs tokenizer files with a chat template",
        ) from error
    if requested == "auto":
        name, reason = _by_identity(tokenizer, reference, identity, model_type)
    else:
        name, reason = requested, "as configured"
    return _choice(name, reason, model, tokenizer, {"thinking_retention": "all"} if history == "keep" else {})


def _identity(model: Path) -> tuple[str, str]:
    """Name and `model_type` that config.json gives; empty where it gives none."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"config.json cannot be read: {error}", where=str(model), next_step="give a Hugging Face model folder"
        ) from None
    names = [config.get(key) for key in ("_name_or_path", "_model_name_or_path")] if isinstance(config, dict) else []
    return next((name for name in names if isinstance(name, str) and name), ""), str(config.get("model_type", ""))


def _by_identity(tokenizer: Any, reference: Sequence[int], identity: str, model_type: str) -> tuple[str, str]:
    from renderers.base import MODEL_RENDERER_MAP

    proposals = [
        (MODEL_RENDERER_MAP.get(identity), f"the config's name {identity}"),
        (_BY_MODEL_TYPE.get(model_type), f"the config's model_type {model_type}"),
    ]
    refused = []
    for name, proposed_by in proposals:
        if name is None or name in refused:
            continue
        if _agrees(name, tokenizer, reference):
            return name, f"{proposed_by}, and the chat template agrees"
        refused.append(name)
    if refused:
        return _DEFAULT, f"the chat template is not that of {', '.join(refused)}; it is used as it is"
    return _DEFAULT, f"none is known for model_type {model_type or '-'}; the chat template is used as it is"


def _agrees(name: str, tokenizer: Any, reference: Sequence[int]) -> bool:
    from renderers import config_from_name, create_renderer

    try:
        renderer = create_renderer(tokenizer, config_from_name(name))
        return bool(renderer.render_ids(list(_PROBE), add_generation_prompt=True) == list(reference))
    except Exception:  # a renderer whose special tokens this tokenizer lacks fails in its own way
        return False


def _template_ids(tokenizer: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(list(_PROBE), add_generation_prompt=True, tokenize=True, return_dict=False)
    )


def _choice(name: str, reason: str, model: Path, tokenizer: Any, settings: Mapping[str, Any]) -> RendererChoice:
    from renderers import config_from_name, create_renderer

    try:
        config = config_from_name(name)
    except ValueError as error:
        raise ConfigError(f"unknown renderer {name!r}: {error}", where="environment.renderer") from None
    if config is None:
        raise ConfigError("a renderer name other than auto is needed here", where="environment.renderer")

    def make() -> Any:
        return create_renderer(copy.deepcopy(tokenizer), type(config)(**settings))

    try:
        renderer = make()
        turns = probe(renderer, tokenizer)
    except Exception as error:
        raise ConfigError(
            f"the renderer {name} does not fit this tokenizer: {type(error).__name__}: {error}",
            where=f"environment.renderer, {model}",
            next_step=(
                "set environment.history = 'template'" if settings else "set environment.renderer = 'auto' or 'default'"
            ),
        ) from error
    return RendererChoice(name, reason, bool(getattr(renderer, "supports_tools", True)), turns, make, settings)
