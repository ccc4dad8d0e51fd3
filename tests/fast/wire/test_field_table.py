"""The documented table is the one that the wire follows."""

from __future__ import annotations

from miles_verifiers.system import resources
from miles_verifiers.wire import fields
from miles_verifiers.wire.field_table import as_markdown


def test_the_document_is_current() -> None:
    written = (resources.root() / "docs" / "wire-fields.md").read_text(encoding="utf-8")
    assert written == as_markdown(), "run: python -m miles_verifiers.wire.field_table > docs/wire-fields.md"


def test_every_field_has_its_row() -> None:
    text = as_markdown()
    for name in [*fields.BODY, *fields.SAMPLING, *fields.SENT, *fields.NOT_SENT]:
        assert f"`{name}`" in text
    for field in [*fields.BODY.values(), *fields.SAMPLING.values()]:
        assert field.action == "map" or field.reason
        assert (field.reason or f"`{field.target}`") in text
