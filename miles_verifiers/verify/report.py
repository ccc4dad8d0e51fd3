"""What verification found, as text for people, JSON for programs and JUnit XML for CI."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from miles_verifiers.errors import VerificationFailed

FORMAT = 1
_SHOWN = 5
"""Findings of one rule in a text; one broken kernel may give one finding per sample."""

Severity = Literal["error", "warning"]
Status = Literal["passed", "failed", "not asked for"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. A warning is shown but does not fail its rule."""

    rule: str
    severity: Severity
    where: str
    message: str


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What one rule said; `description` is what it demands."""

    name: str
    description: str
    status: Status
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class Report:
    """All rules' results, in order, and figures of the run that nobody has to agree with."""

    run_dir: Path
    rules: list[RuleResult]
    figures: dict[str, Any]

    @property
    def findings(self) -> list[Finding]:
        return [finding for result in self.rules for finding in result.findings]

    @property
    def failed(self) -> list[str]:
        """Names of the rules that failed."""
        return [result.name for result in self.rules if result.status == "failed"]

    @property
    def ok(self) -> bool:
        return not self.failed

    @property
    def summary(self) -> str:
        """`verify: 24 rules passed`, or `verify: 2 of 24 rules failed`; rules that were not asked for do not count."""
        asked = sum(result.status != "not asked for" for result in self.rules)
        return f"verify: {asked} rules passed" if self.ok else f"verify: {len(self.failed)} of {asked} rules failed"

    def raise_if_failed(self) -> None:
        """Raises VerificationFailed, with the first finding of each failed rule, unless all rules passed."""
        if self.ok:
            return
        first = [next(f for f in r.findings if f.severity == "error") for r in self.rules if r.status == "failed"]
        lines = [f"  {finding.rule}: {_line(finding)}" for finding in first]
        raise VerificationFailed(
            "\n".join([self.summary, *lines]),
            where=str(self.run_dir),
            next_step="`miles-verifiers verify RUN_DIR` lists all findings",
        )

    def as_text(self) -> str:
        """One line per rule, its findings below it, the figures, and the summary as the last line."""
        lines: list[str] = []
        for result in self.rules:
            lines.append(f"{_MARKS[result.status]}  {result.name}: {result.description}")
            lines += [f"        {finding.severity}: {_line(finding)}" for finding in result.findings[:_SHOWN]]
            if len(result.findings) > _SHOWN:
                lines.append(f"        and {len(result.findings) - _SHOWN} more")
        lines += [f"figure  {name}: {_figure(value)}" for name, value in self.figures.items()]
        return "\n".join([*lines, self.summary])

    def as_json(self) -> str:
        """One strict JSON object with all findings; `format` counts its versions."""
        document = {
            "format": FORMAT,
            "run_dir": str(self.run_dir),
            "ok": self.ok,
            "summary": self.summary,
            "rules": [asdict(result) for result in self.rules],
            "figures": self.figures,
        }
        return json.dumps(document, indent=2, allow_nan=False)

    def as_junit(self) -> str:
        """JUnit XML with one test case per rule, as CI systems show it."""
        suite = ET.Element("testsuite", name="verify", tests=str(len(self.rules)), failures=str(len(self.failed)))
        suite.set("skipped", str(sum(result.status == "not asked for" for result in self.rules)))
        suite.set("errors", "0")
        for result in self.rules:
            case = ET.SubElement(suite, "testcase", classname="verify", name=result.name)
            text = "\n".join(f"{f.severity}: {_line(f)}" for f in result.findings)
            if result.status == "failed":
                ET.SubElement(case, "failure", message=result.description).text = text
            elif result.status == "not asked for":
                ET.SubElement(case, "skipped", message=result.status)
            elif result.findings:
                ET.SubElement(case, "system-out").text = text
        return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


_MARKS: dict[Status, str] = {"passed": "ok    ", "failed": "FAILED", "not asked for": "-     "}


def _line(finding: Finding) -> str:
    # Errors of rollouts may quote what a model wrote: neither a terminal nor XML 1.0 should see its control characters.
    text = f"{finding.where}: {finding.message}" if finding.where else finding.message
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return " ".join(_figure(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_figure(item)}" for key, item in value.items())
    return str(value)
