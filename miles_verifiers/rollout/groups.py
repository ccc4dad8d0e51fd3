"""The groups of one training step, collected: which to start, which to take, when it is enough. Pure, no event loop.

    collector = Collector(cursor, want=..., wave=...)
    while not collector.done:
        start the groups at collector.to_start(), wait for one, collector.finish(it)
    batch = collector.batch()

Groups end in any order, and are taken in that of their positions: what a step trains on then depends on what was sampled,
never on what was faster, and a resumed run makes the same choice. Groups start in waves of `wave`; another wave starts as
soon as those accepted and those running cannot fill the step any more. What was started and not needed is either done again
by a later step, under the weights of that step (`surplus` "rerun"), or waited for and handed to the next step ("keep").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.cursor import Cursor, Kept
from miles_verifiers.rollout.policies import Verdict

Surplus = Literal["rerun", "keep"]
Ending = Literal["full", "tasks ran out", "deadline", "too many dropped"]


@dataclass(frozen=True, slots=True)
class Group:
    """A finished group: `samples` of the task at `position` of the row, and what becomes of them."""

    position: int
    samples: Sequence[Sample]
    verdict: Verdict
    retried: Sequence[str] = ()
    """Why rollouts of it were run again, by name."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains on. `groups` are in order; fewer than wanted where `ending` says why."""

    groups: list[Group]
    cursor: Cursor
    """Of the run once this batch was trained on."""
    ending: Ending
    dropped: Counter[str] = field(default_factory=Counter)
    """Groups by cause."""
    discarded: list[Group] = field(default_factory=list)
    """The groups behind `dropped`."""


class Collector:
    """`last` is the end of the row of tasks, None where it is endless; `max_dropped` bounds drops in a row."""

    def __init__(
        self,
        cursor: Cursor,
        *,
        want: int,
        wave: int,
        surplus: Surplus = "rerun",
        max_dropped: int = 64,
        last: int | None = None,
    ) -> None:
        if want < 1 or wave < 1 or max_dropped < 0:
            raise ValueError(f"want = {want}, wave = {wave} and max_dropped = {max_dropped} make no batch")
        self._cursor, self._want, self._wave = cursor, want, wave
        self._surplus, self._max_dropped, self._last = surplus, max_dropped, last
        self._next = cursor.position
        self._running: set[int] = set()
        self._finished = {
            kept.position: Group(kept.position, kept.samples, Verdict(), kept.retried) for kept in cursor.kept
        }
        self._closed = False

    def to_start(self) -> list[int]:
        """Positions of the groups to start now; each is given once."""
        starting: list[int] = []
        while not self._closed and not self._stuck() and self._hopeful() < self._want:
            end = self._next + self._wave if self._last is None else min(self._next + self._wave, self._last)
            if end <= self._next:
                break
            wave = range(self._next, end)
            self._running.update(wave)
            starting += wave
            self._next = end
        return starting

    def finish(self, group: Group) -> None:
        self._running.remove(group.position)
        self._finished[group.position] = group

    def close(self) -> None:
        """The step's deadline is over: nothing is started any more."""
        self._closed = True

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def accepted(self) -> int:
        return sum(group.verdict.kept for group in self._finished.values())

    @property
    def done(self) -> bool:
        """Whether `batch` may be called: nothing more is to be waited for. Groups that still run are not needed."""
        if self._stuck() or (self._surplus == "rerun" and self._is_filled()):
            return True
        return not self._running and (self._closed or self.accepted >= self._want or self._next == self._last)

    def batch(self) -> Batch:
        """The first `want` accepted groups, and where the run stands behind them."""
        assert self.done, "the batch was asked for too early"
        known = self._known()
        if self._stuck():
            return self._stopped(known)
        taken = [group for group in known if group.verdict.kept][: self._want]
        full = len(taken) == self._want
        if full and self._surplus == "rerun":
            known = known[: known.index(taken[-1]) + 1]
        rest = [group for group in known if group.verdict.kept][len(taken) :]
        cursor = Cursor(
            # Kept groups of before lie below the cursor; without a new one it stays where it was.
            position=max(self._cursor.position, known[-1].position + 1 if known else 0),
            groups=self._cursor.groups + len(taken),
            dropped_in_a_row=self._dropped_in_a_row(known),
            kept=self._kept(rest if self._surplus == "keep" else self._later(taken)),
        )
        ending: Ending = "full" if full else "deadline" if self._closed else "tasks ran out"
        return Batch(taken, cursor, ending, *_dropped(known))

    def _stopped(self, known: list[Group]) -> Batch:
        """Nothing to train on, and everything accepted so far kept: a run that is started again goes on from here."""
        accepted = [group for group in known if group.verdict.kept]
        position = max(self._cursor.position, known[-1].position + 1)
        cursor = Cursor(position, self._cursor.groups, 0, self._kept(accepted))
        return Batch([], cursor, "too many dropped", *_dropped(known))

    def _later(self, taken: Sequence[Group]) -> list[Group]:
        """Groups that an earlier step left behind and this one did not need either."""
        before = {kept.position for kept in self._cursor.kept} - {group.position for group in taken}
        return [self._finished[position] for position in sorted(before)]

    def _kept(self, groups: Sequence[Group]) -> tuple[Kept, ...]:
        return tuple(Kept(group.position, tuple(group.samples), tuple(group.retried)) for group in groups)

    def _known(self) -> list[Group]:
        """Finished groups up to the first that still runs, in order."""
        first = min(self._running, default=self._next)
        return [self._finished[position] for position in sorted(self._finished) if position < first]

    def _is_filled(self) -> bool:
        return sum(group.verdict.kept for group in self._known()) >= self._want

    def _hopeful(self) -> int:
        return self.accepted + len(self._running)

    def _stuck(self) -> bool:
        """Too many in a row were dropped before the step was full, seen in order of the positions."""
        count, accepted = self._cursor.dropped_in_a_row, 0
        for group in self._known():
            if accepted == self._want:
                break
            accepted += group.verdict.kept
            count = 0 if group.verdict.kept else count + 1
            if count > self._max_dropped:
                return True
        return False

    def _dropped_in_a_row(self, known: Sequence[Group]) -> int:
        count = self._cursor.dropped_in_a_row
        for group in known:
            count = 0 if group.verdict.kept else count + 1
        return count


def _dropped(known: Sequence[Group]) -> tuple[Counter[str], list[Group]]:
    discarded = [group for group in known if not group.verdict.kept]
    return Counter(group.verdict.cause for group in discarded), discarded
