"""Several environments in one run: which of them each group of a step comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


class Mixer:
    """An endless sequence of environments in which each has its share, as even as whole numbers allow.

    Every slot goes to the environment that is furthest behind its share of the slots so far (largest deficit; ties go to the
    first), so the count of each differs from its share by less than one, or by less than two with three and more of them. A
    pure function of weights and slot: a resumed run mixes as if it had never stopped.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights must be positive: {list(weights)}")
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._counts = [0] * len(weights)
        self._slots: list[int] = []

    def slots(self, first: int, count: int) -> list[int]:
        """Numbers of the environments of slots `first` to `first + count - 1`."""
        while len(self._slots) < first + count:
            number = len(self._slots) + 1
            # Rounded, so that shares like 0.1 + 0.2 make ties where the numbers on paper do.
            deficits = [round(share * number - had, 9) for share, had in zip(self._shares, self._counts, strict=True)]
            chosen = deficits.index(max(deficits))
            self._counts[chosen] += 1
            self._slots.append(chosen)
        return self._slots[first : first + count]


def interleaved(slots: Sequence[int], groups: Mapping[int, Sequence[T]]) -> list[T]:
    """The groups of each environment, dealt out to the slots; slots of an environment that has too few stay empty."""
    left = {number: iter(own) for number, own in groups.items()}
    dealt = (next(left[number], None) for number in slots)
    return [group for group in dealt if group is not None]
