"""The table of fields as Markdown: `python -m miles_verifiers.wire.field_table` prints docs/wire-fields.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from miles_verifiers.wire.fields import BODY, NOT_SENT, SAMPLING, SENT, Field

_HEAD = """\
# Fields of the wire

Made by `python -m miles_verifiers.wire.field_table > docs/wire-fields.md` from `miles_verifiers/wire/fields.py`; a test fails
when they differ. A field that is in no table is refused by name with status 400. Contract tests fail when an installed
renderers or SGLang has a field that is in no table.
"""
_SET = {
    "rid": "a name of its own for every attempt",
    "input_ids": "from `token_ids`",
    "sampling_params": "see above; always with `n` 1, `no_stop_trim` true, `skip_special_tokens` and "
    "`spaces_between_special_tokens` false: what is trained on is what was sampled",
    "return_logprob": "true",
    "priority": "from `priority`",
    "extra_key": "from `cache_salt`",
    "lora_path": "from `lora_path`",
}


def as_markdown() -> str:
    parts = [
        _HEAD,
        "## Body of `POST /inference/v1/generate` (renderers 0.1.8 to 0.1.12)\n",
        _rows(("field", "becomes", "type", "why"), map(_field, BODY.items())),
        "## `sampling_params` (names of vLLM and of SGLang 0.5.15 to 0.5.23)\n",
        _rows(("field", "becomes", "type", "why"), map(_field, SAMPLING.items())),
        "## Fields of SGLang's `/generate` that are set\n",
        _rows(("field", "how"), ((f"`{name}`", _SET[name]) for name in sorted(SENT))),
        "## Fields of SGLang's `/generate` that are left at their defaults\n",
        _rows(("why", "fields"), ((why, ", ".join(names)) for why, names in _by_reason(NOT_SENT).items())),
    ]
    return "\n".join(parts)


def _field(item: tuple[str, Field]) -> tuple[str, ...]:
    name, field = item
    if field.action == "map":
        return f"`{name}`", f"`{field.target}`", field.kind, ""
    return f"`{name}`", "dropped" if field.action == "drop" else "**refused**", "", field.reason


def _by_reason(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        grouped.setdefault(reason, []).append(f"`{name}`")
    return grouped


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    print(as_markdown(), end="")
