"""Every rule, against a run on disk that breaks it and nothing else (or names what else it must break)."""

from __future__ import annotations

from pathlib import Path

import pytest
from broken_forks import CASES as FORKS
from broken_rollouts import CASES as ROLLOUTS
from broken_training import CASES as TRAINING
from factories import Draft, evaluated_run, good_run

from miles_verifiers import verify as verification
from miles_verifiers.errors import VerificationFailed
from miles_verifiers.record.samples import WeightSpan
from miles_verifiers.verify import Report, verify

CASES = {**ROLLOUTS, **TRAINING, **FORKS}


def judged(draft: Draft, run_dir: Path) -> Report:
    return verify(draft.write(run_dir))


def test_a_good_run_passes_every_rule(tmp_path: Path) -> None:
    report = judged(good_run(), tmp_path / "run")
    assert report.findings == []
    unasked = {"learning", "evaluation_files", "evaluation_weights", "evaluation_figures"}
    assert report.summary == f"verify: {len(verification.RULES) - len(unasked)} rules passed"
    assert {result.name for result in report.rules if result.status == "not asked for"} == unasked
    report.raise_if_failed()


def test_a_good_run_with_evaluations_passes_every_rule(tmp_path: Path) -> None:
    report = judged(evaluated_run(), tmp_path / "run")
    assert report.findings == []
    assert [result.name for result in report.rules if result.status == "not asked for"] == ["learning"]


def test_a_run_may_end_when_its_tasks_do(tmp_path: Path) -> None:
    draft = good_run()
    draft.configure(training={"num_steps": 9})
    del draft.steps[1][4:]
    draft.metrics[1].update(
        ending="tasks ran out", samples=4, groups=1, sampled_tokens=8, pass_rate=0.5, reward_mean=0.75
    )
    assert judged(draft, tmp_path / "run").findings == []


def test_groups_left_over_by_the_step_before_may_be_kept(tmp_path: Path) -> None:
    """Their log-probs are those of other weights than the trainer's: the gate looks at the others alone."""
    draft = good_run()
    for member in draft.steps[1][:4]:
        member.weight_versions = [WeightSpan("0", 2)]
        member.train_log_probs = [-1.5, -0.25]
    draft.metrics[1].update(mismatch_mean=(4 * 1.0 + 4 * 2e-5) / 16, mismatch_max=1.0)
    draft.configure(rollout={"surplus_groups": "keep"})
    assert judged(draft, tmp_path / "kept").findings == []
    # Control: a run that says that it keeps none may have none.
    draft.configure(rollout={"surplus_groups": "rerun"})
    assert set(judged(draft, tmp_path / "run").failed) == {"weight_versions", "mismatch_gate"}


@pytest.mark.parametrize("name", CASES)
def test_a_broken_run_fails_exactly_the_rules_that_it_breaks(name: str, tmp_path: Path) -> None:
    change, rules, where = CASES[name]
    draft = good_run()
    change(draft)
    report = judged(draft, tmp_path / "run")
    assert set(report.failed) == rules, report.as_text()
    assert where in {finding.where for finding in report.findings}
    assert not any("the rule itself failed" in finding.message for finding in report.findings)
    with pytest.raises(VerificationFailed, match=f"{len(rules)} of "):
        report.raise_if_failed()


def test_every_rule_has_a_case_that_breaks_it() -> None:
    broken = set().union(*(rules for _, rules, _ in CASES.values()))
    assert broken | {"readable"} == {rule.name for rule in verification.RULES}
    assert len({rule.name for rule in verification.RULES}) == len(verification.RULES)
