"""Verification of a run by what it left on disk: rules over the dump, the metrics and the manifest.

`verify` loads a run directory and puts every rule to it. A rule never asserts: it reports findings, each with a place
("dump/rollout/000001.parquet row 3"). All rules run, also after others failed; what cannot be read, and a rule that itself
fails, become findings, too.
"""

from __future__ import annotations

from pathlib import Path

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.verify import evaluations, rewards, structure, training
from miles_verifiers.verify.figures import figures_of
from miles_verifiers.verify.report import Finding, Report, RuleResult, Severity
from miles_verifiers.verify.rule import Rule
from miles_verifiers.verify.run import Rollout, Run

__all__ = ["RULES", "Finding", "Report", "Rollout", "Rule", "RuleResult", "Run", "Severity", "check", "verify"]

RULES: tuple[Rule, ...] = (*structure.RULES, *rewards.RULES, *training.RULES, *evaluations.RULES)


def verify(run_dir: Path, config: RunConfig | None = None, *, vocab_size: int | None = None) -> Report:
    """Puts all rules to the run in `run_dir`.

    `config` defaults to the run's config.toml, `vocab_size` to that of the run's model folder. Raises ConfigError where
    there is no run at all; everything else that is wrong with it is in the report.
    """
    return check(Run.load(run_dir, config, vocab_size=vocab_size))


def check(run: Run, rules: tuple[Rule, ...] = RULES) -> Report:
    """Puts `rules` to a loaded run."""
    results = [rule.apply(run) for rule in rules]
    return Report(run_dir=run.folder, rules=results, figures=figures_of(run))
