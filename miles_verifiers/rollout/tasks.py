"""The row of tasks that a run works off, and the seeds that go with them. Pure, so that a resumed run goes on exactly where
it would have been: a position in the row says which task, and with which seeds, whatever happened before."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class TaskRow:
    """Epochs of one taskset, one after the other, endless unless `num_epoch` says how many.

    Each epoch holds every task once, in the taskset's order or, with `shuffle`, in an order made from `seed` and the number
    of the epoch.
    """

    n_tasks: int
    seed: int = 0
    shuffle: bool = True
    num_epoch: int | None = None

    def __post_init__(self) -> None:
        if self.n_tasks < 1 or (self.num_epoch is not None and self.num_epoch < 1):
            raise ValueError(f"n_tasks = {self.n_tasks} and num_epoch = {self.num_epoch} must be positive")

    @property
    def end(self) -> int | None:
        """The first position behind the row, None where it is endless."""
        return None if self.num_epoch is None else self.num_epoch * self.n_tasks

    def task(self, position: int) -> int:
        """Number in the taskset of the task at `position` (0, 1, ...)."""
        if position < 0 or (self.end is not None and position >= self.end):
            raise ValueError(f"there is no position {position} in a row of {self.end or 'endless'} tasks")
        epoch, at = divmod(position, self.n_tasks)
        return _order(self.n_tasks, epoch, self.seed, self.shuffle)[at]


@lru_cache(maxsize=4)
def _order(n_tasks: int, epoch: int, seed: int, shuffle: bool) -> tuple[int, ...]:
    order = list(range(n_tasks))
    if shuffle:
        # Seeded by text: hashed the same on every machine and Python version, and epochs of near seeds do not overlap.
        random.Random(f"tasks {seed} {epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
    return tuple(order)


def sampling_seed(seed: int, environment: str, position: int, rollout: int, attempt: int) -> int:
    """Seed of one rollout's sampling, 0 <= s < 2^31: its own for each position of the row, rollout of the group and attempt."""
    text = f"{seed} {environment} {position} {rollout} {attempt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
