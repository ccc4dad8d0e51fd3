"""Where a run stands in its row of tasks: plain data, part of every checkpoint.

Together with the configuration it says which groups come next, so that a run that was killed and resumed trains on the same
groups as one that was not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_verifiers.errors import RolloutError
from miles_verifiers.record.samples import Sample, as_row, from_row


@dataclass(frozen=True, slots=True)
class Kept:
    """A group that was accepted and not trained on yet."""

    position: int
    samples: tuple[Sample, ...]
    retried: tuple[str, ...] = ()
    """Why rollouts of it were run again, by name."""


@dataclass(frozen=True, slots=True)
class Cursor:
    position: int = 0
    """Of the row of tasks: the next group to start."""
    groups: int = 0
    """Handed out to training so far; the number of the next one."""
    dropped_in_a_row: int = 0
    kept: tuple[Kept, ...] = ()
    """In order of their positions, all below `position`."""

    def as_json(self) -> dict[str, Any]:
        """JSON values; floats keep their exact value."""
        return {
            "position": self.position,
            "groups": self.groups,
            "dropped_in_a_row": self.dropped_in_a_row,
            "kept": [
                {
                    "position": group.position,
                    "samples": [as_row(sample) for sample in group.samples],
                    "retried": list(group.retried),
                }
                for group in self.kept
            ],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Cursor:
        """Raises RolloutError for anything that `as_json` did not make."""
        try:
            kept = tuple(
                Kept(int(group["position"]), tuple(map(from_row, group["samples"])), tuple(map(str, group["retried"])))
                for group in value["kept"]
            )
            cursor = cls(int(value["position"]), int(value["groups"]), int(value["dropped_in_a_row"]), kept)
        except (KeyError, TypeError, ValueError) as error:
            raise RolloutError(
                f"the checkpoint's place in the row of tasks cannot be read: {type(error).__name__}: {error}",
                next_step="go back to an older checkpoint, or start another run",
            ) from error
        positions = [group.position for group in kept]
        if cursor.position < 0 or positions != sorted(set(positions)) or any(p >= cursor.position for p in positions):
            raise RolloutError(
                f"the checkpoint's place in the row of tasks contradicts itself: {cursor.position}, {positions}"
            )
        return cursor
