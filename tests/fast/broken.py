"""Runs on disk that break a rule and nothing else: what a case is, and where in the good run things are broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from factories import Draft, evaluated_run

from miles_verifiers.record.samples import Sample

Change = Callable[[Draft], Any]
Case = tuple[Change, set[str], str]
"""What is done to the good run, the rules that must fail (all others must pass), the place that is named."""


class Cases(dict[str, Case]):
    """Cases by the name of what is done."""

    def case(self, rules: str, where: str) -> Callable[[Change], Change]:
        def keep(change: Change) -> Change:
            self[change.__name__] = (change, set(rules.split()), where)
            return change

        return keep


ROW_3 = "dump/rollout/000001.parquet row 3"
GROUP_2 = "dump/rollout/000001.parquet group 2"
STEP_1 = "metrics.jsonl step 1"


def row_3(draft: Draft) -> Sample:
    """Of the second step: it did not pass, and is in group 2, where two others did."""
    return draft.steps[1][3]


def row_0(draft: Draft) -> Sample:
    """Of the second step: it passed, and shares most_concise with row 1."""
    return draft.steps[1][0]


def evaluated(draft: Draft) -> Sample:
    """Makes the run one with evaluations; returns a sample of the last of them."""
    other = evaluated_run()
    draft.evaluations, draft.eval_metrics = other.evaluations, other.eval_metrics
    draft.configure(rollout={"eval_interval": 4})
    return draft.evaluations[2][0]


EVAL_2 = "metrics.jsonl evaluation before step 2"
