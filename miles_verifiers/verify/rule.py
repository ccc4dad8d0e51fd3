"""A rule: a name, what it demands, and a function from a run to the problems that it sees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from miles_verifiers.verify.report import Finding, RuleResult, Severity, Status
from miles_verifiers.verify.run import Run


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding, as a rule states it. `where` names file and row, or the like."""

    where: str
    message: str
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Rule:
    name: str
    description: str
    check: Callable[[Run], Iterable[Problem]]
    asked: Callable[[Run], bool]
    """Whether the run's configuration asks for this rule."""

    def apply(self, run: Run) -> RuleResult:
        """The rule's result; an exception inside the rule is a finding that fails it."""
        if not self.asked(run):
            return RuleResult(self.name, self.description, "not asked for", [])
        findings: list[Finding] = []
        try:
            for problem in self.check(run):
                findings.append(Finding(self.name, problem.severity, problem.where, problem.message))
        except Exception as error:
            message = f"the rule itself failed: {type(error).__name__}: {error}"
            findings.append(Finding(self.name, "error", "", message))
        failed = any(finding.severity == "error" for finding in findings)
        status: Status = "failed" if failed else "passed"
        return RuleResult(self.name, self.description, status, findings)


def rule(*, asked: Callable[[Run], bool] = lambda run: True) -> Callable[[Callable[[Run], Iterable[Problem]]], Rule]:
    """Decorator: the function's name becomes the rule's, the first line of its docstring the description."""

    def decorate(check: Callable[[Run], Iterable[Problem]]) -> Rule:
        description, _, _ = (check.__doc__ or "").strip().partition("\n")
        assert description, f"rule {check.__name__} does not say what it demands"
        return Rule(check.__name__, description, check, asked)

    return decorate
