"""Samples -> this rank's micro-batches of packed sequences.

Axis legend: [T] tokens of one sample, [R] its response tokens, [t] tokens of a micro-batch, [n] response tokens of a
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from miles_verifiers.errors import TrainerError
from miles_verifiers.samples import Sample, from_row


@dataclass(frozen=True)
class MicroBatch:
    """Samples that go through the model together, one after another without padding.

    Two samples, tokens [p p a b] and [q c], of which a b and c are the response:

        rows     [1 2 4]   positions whose logits predict a response token
        targets  [a b c]
    """

    samples: tuple[Sample, ...]

    @property
    def sequences(self) -> list[list[int]]:
        return [sample.tokens for sample in self.samples]

    @cached_property
    def lengths(self) -> list[int]:
        return [sample.response_length for sample in self.samples]

    @property
    def rows(self) -> Tensor:
        rows, start = [], 0
        for sample in self.samples:
            end = start + len(sample.tokens)
            rows.append(torch.arange(end - sample.response_length - 1, end - 1))
            start = end
        return torch.cat(rows)

    @property
    def targets(self) -> Tensor:
        return torch.tensor([token for s in self.samples for token in s.tokens[-s.response_length :]])

    @property
    def rollout_log_probs(self) -> Tensor:
        """[n] nats."""
        return torch.tensor([value for s in self.samples for value in s.rollout_log_probs], dtype=torch.float32)

    @property
    def loss_mask(self) -> Tensor:
        return torch.tensor([value for s in self.samples for value in s.loss_mask], dtype=torch.float32)

    @property
    def advantages(self) -> Tensor:
        """[n] each token has its sample's; 0.0 where that is None."""
        per_sample = torch.tensor([s.advantage or 0.0 for s in self.samples], dtype=torch.float32)
        return per_sample.repeat_interleave(torch.tensor(self.lengths))


def usable_samples(rows: Iterable[dict[str, Any]], vocab_size: int) -> list[Sample]:
    """The samples that training may look at. Raises TrainerError, naming the sample, where one contradicts itself."""
    samples = [sample for sample in map(from_row, rows) if sample.usable]
    for sample in samples:
        problem = _problem(sample, vocab_size)
        if problem:
            raise TrainerError(
                problem,
                where=f"sample {sample.index} of group {sample.group_index}",
                next_step="this is a defect of what made the sample; the trainer's weights are unchanged",
            )
    return samples


def learns(sample: Sample) -> bool:
    """Whether the sample gives a gradient at all."""
    return bool(sample.advantage)


def trained_tokens(samples: Iterable[Sample]) -> int:
    return sum(sum(sample.loss_mask) for sample in samples)


def micro_batches(samples: Sequence[Sample], *, max_tokens: int, rank: int, ranks: int) -> list[MicroBatch]:
    """This data parallel rank's share, packed into micro-batches of at most `max_tokens` tokens.

    Longest first onto the rank, then into the batch, with the most room: shares come out even and batches full. A sample
    that is longer than `max_tokens` cannot be cut and gets a micro-batch of its own.
    """
    longest_first = sorted(samples, key=lambda sample: (-len(sample.tokens), sample.index))
    loads = [0] * ranks
    share: list[Sample] = []
    for sample in longest_first:
        to = loads.index(min(loads))
        loads[to] += len(sample.tokens)
        if to == rank:
            share.append(sample)

    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in share:
        size = len(sample.tokens)
        fitting = [i for i, left in enumerate(room) if left >= size]
        if fitting:
            into = max(fitting, key=room.__getitem__)
        else:
            into = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[into].append(sample)
        room[into] -= size
    return [MicroBatch(tuple(members)) for members in bins]


def _problem(sample: Sample, vocab_size: int) -> str:
    length = sample.response_length
    if not 0 < length < len(sample.tokens):
        return f"a response of {length} tokens in a sequence of {len(sample.tokens)}: prompt and response must not be empty"
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sample, name)
        if len(values) != length:
            return f"{name} has {len(values)} entries for {length} response tokens"
    if not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
        return f"a token id outside the vocabulary of {vocab_size}: {min(sample.tokens)} to {max(sample.tokens)}"
    if not all(math.isfinite(v) for v, m in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if m):
        return "a log-prob of the engine is not finite"
    if sample.advantage is not None and not math.isfinite(sample.advantage):
        return f"its advantage is {sample.advantage}"
    return ""
