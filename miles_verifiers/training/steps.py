"""What a step of training is given by the rollouts, and what becomes of several environments' answers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_verifiers.record.samples import Sample, from_row
from miles_verifiers.rollout.causes import table
from miles_verifiers.rollout.mixing import interleaved


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The samples of one step, in order of group and sample, and where each environment stands after it."""

    samples: list[Sample]
    cursors: dict[str, Any]
    """Cursor.as_json by environment."""
    ending: str = "full"
    """groups.Ending; of several environments the one that is not `full`."""
    dropped: dict[str, int] = field(default_factory=dict)
    causes: dict[str, int] = field(default_factory=dict)
    retried: dict[str, int] = field(default_factory=dict)

    def why(self) -> str:
        """Tables of what went wrong."""
        lines = table("groups dropped, by cause:", self.dropped) if self.dropped else []
        lines += table("rollouts, by what went wrong with them:", self.causes) if self.causes else []
        return "\n".join(lines)


_ENDINGS = ("too many dropped", "tasks ran out", "deadline", "full")
"""What several environments' step ends with: the first of these that one of them says."""


def merged(
    slots: Sequence[int], answers: Mapping[int, Mapping[str, Any]], labels: Sequence[str], cursors: Mapping[str, Any]
) -> StepRollouts:
    """One step out of the answers of RolloutWorker.generate by environment; groups are numbered through the run."""
    first = sum(int(cursor["groups"]) for cursor in cursors.values())
    groups = interleaved(slots, {number: _groups(answer["rows"]) for number, answer in answers.items()})
    for number, group in enumerate(groups, start=first):
        for k, sample in enumerate(group):
            sample.group_index, sample.index = number, number * len(group) + k
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("dropped", "causes", "retried")}
    for answer in answers.values():
        for name, counter in counts.items():
            counter.update(answer[name])
    endings = {answer["ending"] for answer in answers.values()}
    return StepRollouts(
        samples=[sample for group in groups for sample in group],
        cursors={**cursors, **{labels[number]: answer["cursor"] for number, answer in answers.items()}},
        ending=next(ending for ending in _ENDINGS if ending in endings),
        dropped=dict(counts["dropped"]),
        causes=dict(counts["causes"]),
        retried=dict(counts["retried"]),
    )


def _groups(rows: Sequence[dict[str, Any]]) -> list[list[Sample]]:
    groups: dict[int, list[Sample]] = {}
    for row in rows:
        groups.setdefault(row["group_index"], []).append(from_row(row))
    return list(groups.values())


def renumbered(samples: Mapping[str, Sequence[Sample]]) -> list[Sample]:
    """The samples of several environments' evaluation as one list, numbered through."""
    whole: list[Sample] = []
    groups = 0
    for own in samples.values():
        for sample in own:
            sample.group_index, sample.index = sample.group_index + groups, sample.index + len(whole)
        groups += len({sample.group_index for sample in own})
        whole += own
    return whole
