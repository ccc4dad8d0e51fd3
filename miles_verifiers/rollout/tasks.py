"""Which tasks a step trains on. A pure function of the step, so that a resumed run goes on exactly where it would have been."""

from __future__ import annotations

import random


def tasks_for_step(n_tasks: int, step: int, batch: int, seed: int, shuffle: bool) -> list[int]:
    """Positions in the taskset of the `batch` tasks of step `step` (0, 1, ...).

    The steps cut an endless row of epochs into batches. Each epoch holds every task once, in the taskset's order or, with
    `shuffle`, in an order made from `seed` and the number of the epoch. A batch may reach over the end of an epoch.
    """
    if n_tasks < 1 or batch < 1 or step < 0:
        raise ValueError(f"n_tasks = {n_tasks} and batch = {batch} must be positive, step = {step} not negative")
    positions = range(step * batch, (step + 1) * batch)
    orders = {epoch: _order(n_tasks, epoch, seed, shuffle) for epoch in {at // n_tasks for at in positions}}
    return [orders[at // n_tasks][at % n_tasks] for at in positions]


def _order(n_tasks: int, epoch: int, seed: int, shuffle: bool) -> list[int]:
    order = list(range(n_tasks))
    if shuffle:
        # Seeded by text: hashed the same on every machine and Python version, and epochs of near seeds do not overlap.
        random.Random(f"tasks {seed} {epoch}").shuffle(order)  # noqa: S311 - an order, not a secret
    return order
