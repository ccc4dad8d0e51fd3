"""The three outputs of a report."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from miles_verifiers.errors import VerificationFailed
from miles_verifiers.verify import Finding, Report, RuleResult


def result(name: str, *messages: str, severity: str = "error") -> RuleResult:
    findings = [Finding(name, severity, f"row {k}", message) for k, message in enumerate(messages)]  # type: ignore[arg-type]
    status = "failed" if findings and severity == "error" else "passed"
    return RuleResult(name, f"What {name} demands.", status, findings)  # type: ignore[arg-type]


PASSED = result("counts")
WARNED = result("readable", "torn", severity="warning")
FAILED = result("rewards", *(f"reward {k}" for k in range(8)))
SKIPPED = RuleResult("learning", "Learns.", "not asked for", [])


def report(*results: RuleResult) -> Report:
    return Report(Path("runs/a"), list(results), {"passed": 3, "mismatch_mean_by_step": [8.123456e-06, None]})


def test_summaries() -> None:
    assert report(PASSED, WARNED, SKIPPED).summary == "verify: 2 rules passed"
    assert report(PASSED, FAILED, SKIPPED).summary == "verify: 1 of 2 rules failed"


def test_text_shows_each_rule_some_findings_figures_and_ends_in_the_summary() -> None:
    lines = report(PASSED, FAILED, WARNED, SKIPPED).as_text().splitlines()
    assert lines[0] == "ok      counts: What counts demands."
    assert lines[1] == "FAILED  rewards: What rewards demands."
    assert lines[2] == "        error: row 0: reward 0"
    assert lines[7] == "        and 3 more"
    assert "        warning: row 0: torn" in lines
    assert "-       learning: Learns." in lines
    assert "figure  mismatch_mean_by_step: 8.123e-06 None" in lines
    assert lines[-1] == "verify: 1 of 3 rules failed"


def test_text_holds_no_control_characters() -> None:
    text = report(result("no_errors", "\x1b[31mred\nsecond line\ud800")).as_text()
    assert "\\x1b[31mred\\nsecond line\\ud800" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_json_has_everything_and_is_strict() -> None:
    document = json.loads(report(PASSED, FAILED, SKIPPED).as_json(), parse_constant=pytest.fail)
    assert document["format"] == 1
    assert document["ok"] is False
    assert document["summary"] == "verify: 1 of 2 rules failed"
    assert [rule["status"] for rule in document["rules"]] == ["passed", "failed", "not asked for"]
    assert len(document["rules"][1]["findings"]) == 8
    assert document["rules"][1]["findings"][7] == {
        "rule": "rewards",
        "severity": "error",
        "where": "row 7",
        "message": "reward 7",
    }
    assert document["figures"]["passed"] == 3


def test_junit_has_one_case_per_rule() -> None:
    failed = result("no_errors", "\x1b[31m <&> \x00")
    suite = ET.fromstring(report(PASSED, FAILED, failed, WARNED, SKIPPED).as_junit())
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "2", "1")
    cases = {case.get("name"): case for case in suite}
    assert list(cases) == ["counts", "rewards", "no_errors", "readable", "learning"]
    assert len(cases["counts"]) == 0
    failure = cases["rewards"].find("failure")
    assert failure is not None
    assert failure.get("message") == "What rewards demands."
    assert "error: row 7: reward 7" in (failure.text or "")
    assert "\\x1b[31m <&> \\x00" in (cases["no_errors"].findtext("failure") or "")
    assert cases["readable"].findtext("system-out") == "warning: row 0: torn"
    assert cases["learning"].find("skipped") is not None


def test_a_failed_report_raises_with_the_first_finding_of_each_rule() -> None:
    report(PASSED, WARNED).raise_if_failed()
    with pytest.raises(VerificationFailed) as caught:
        report(PASSED, FAILED).raise_if_failed()
    assert caught.value.exit_code == 1
    assert "rewards: row 0: reward 0" in str(caught.value)
    assert "reward 1" not in str(caught.value)
    assert caught.value.where == "runs/a"
