"""Does a later turn extend the token ids of an earlier one? Asked of the real renderer, at start, with sampled-like replies.

A rollout of several turns is one training sequence only if each prompt begins with the ids of the turn before it, the sampled
ones included. Templates break that: those that drop earlier thinking, that trim white space, or that number the turns. And
a reply that is rendered anew comes back in the tokenizer's own split, which need not be the one that was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Extension = Literal["bridge", "template", "none"]

_OPENING: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Print 6 * 7\n  in Python."},
)
_NEXT: dict[str, Any] = {"role": "user", "content": "Again."}
# Each reply as the pieces in which it is encoded, so that the split of the last is not the tokenizer's own.
_REPLIES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("a plain reply", ("print(6 * 7)",)),
    ("a reply with thinking", ("<think>\nSix sevens.\n</think>\n\nprint(42)",)),
    ("white space around a reply", ("\n  print(42)  \n",)),
    ("a reply in another split", tuple("print(42)")),
)


@dataclass(frozen=True, slots=True)
class Probe:
    """`extends` says how a later turn keeps the earlier one's ids: `bridge` keeps them as they are, `template` found them
    again on every probe, `none` lost them on some."""

    extends: Extension
    lost: tuple[str, ...] = ()
    """What was lost, in words."""


def probe(renderer: Any, tokenizer: Any) -> Probe:
    """Ask `renderer` (renderers.Renderer) for a second turn after each kind of reply. Raises what the renderer raises."""
    prompt = _ids(renderer.render(list(_OPENING), add_generation_prompt=True))
    end = list(renderer.get_stop_token_ids())[:1]
    bridged, lost = True, []
    for what, pieces in _REPLIES:
        reply = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)] + end
        bridge = renderer.bridge_to_next_turn(prompt, reply, [_NEXT])
        if bridge is None:
            bridged = False
            following = _rendered(renderer, reply)
        else:
            following = _ids(bridge)
        if following[: len(prompt) + len(reply)] != [*prompt, *reply]:
            lost.append(what)
    if lost:
        return Probe("none", tuple(lost))
    return Probe("bridge" if bridged else "template")


def _rendered(renderer: Any, reply: Sequence[int]) -> list[int]:
    """The second turn rendered from text, as it is where no bridge is possible."""
    parsed = renderer.parse_response(list(reply))
    message = {"role": "assistant", "content": parsed.content or ""}
    if getattr(parsed, "reasoning_content", None):
        message["reasoning_content"] = parsed.reasoning_content
    return _ids(renderer.render([*_OPENING, message, _NEXT], add_generation_prompt=True))


def _ids(rendered: Any) -> list[int]:
    return list(rendered.token_ids)
