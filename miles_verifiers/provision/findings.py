"""What `doctor` found, as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    found: str
    problem: str = ""
    """Empty, or the next step."""


@dataclass(frozen=True, slots=True)
class Findings:
    findings: list[Finding]
    stack: dict[str, Any] = field(default_factory=dict)
    """See fingerprint.of; empty where there is no stack yet."""

    @property
    def ok(self) -> bool:
        return not any(finding.problem for finding in self.findings)

    def rows(self) -> list[list[str]]:
        return [[finding.what, finding.found, finding.problem or "ok"] for finding in self.findings]

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "stack": self.stack, "findings": [asdict(finding) for finding in self.findings]}
