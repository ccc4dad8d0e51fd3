"""Samples -> this rank's micro-batches of packed sequences.

A sample has one sequence, or several where its rollout forked: they go through the model each on its own, in whichever
micro-batches and on whichever ranks there is room. What they add to the loss is divided by the tokens of the whole step
(loss.policy_loss), so it does not matter how a rollout's tokens are spread over sequences.

Axis legend: [T] tokens of one sequence, [R] its response tokens, [t] tokens of a micro-batch, [n] response tokens of a
micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from miles_verifiers.errors import TrainerError
from miles_verifiers.record.samples import Sample, TokenSequence, from_row

Key = tuple[int, int]
"""(index of the sample, number of the sequence in it): what tells the sequences of a step apart."""


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence of a sample."""

    key: Key
    sequence: TokenSequence
    advantage: float
    """The sample's; 0.0 where that is None."""

    def __len__(self) -> int:
        return len(self.sequence.tokens)


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model together, one after another without padding.

    Two sequences, tokens [p p a b] and [q c], of which a b and c are the response:

        rows     [1 2 4]   positions whose logits predict a response token
        targets  [a b c]
    """

    parts: tuple[Part, ...]

    @property
    def sequences(self) -> list[list[int]]:
        return [part.sequence.tokens for part in self.parts]

    @cached_property
    def lengths(self) -> list[int]:
        return [part.sequence.response_length for part in self.parts]

    @property
    def rows(self) -> Tensor:
        rows, start = [], 0
        for part, length in zip(self.parts, self.lengths, strict=True):
            end = start + len(part)
            rows.append(torch.arange(end - length - 1, end - 1))
            start = end
        return torch.cat(rows)

    @property
    def targets(self) -> Tensor:
        sequences = [part.sequence for part in self.parts]
        return torch.tensor([token for s in sequences for token in s.tokens[-s.response_length :]])

    @property
    def rollout_log_probs(self) -> Tensor:
        """[n] nats."""
        return torch.tensor([v for part in self.parts for v in part.sequence.rollout_log_probs], dtype=torch.float32)

    @property
    def loss_mask(self) -> Tensor:
        return torch.tensor([v for part in self.parts for v in part.sequence.loss_mask], dtype=torch.float32)

    @property
    def advantages(self) -> Tensor:
        """[n] each token has its sample's."""
        per_part = torch.tensor([part.advantage for part in self.parts], dtype=torch.float32)
        return per_part.repeat_interleave(torch.tensor(self.lengths))


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
    """Of all their sequences."""
    return sum(sample.sampled_tokens for sample in samples)


def parts_of(samples: Iterable[Sample]) -> list[Part]:
    return [
        Part((sample.index, number), sequence, sample.advantage or 0.0)
        for sample in samples
        for number, sequence in enumerate(sample.sequences)
    ]


def by_sample(values: Mapping[Key, list[float]]) -> dict[int, list[list[float]]]:
    """What was computed for each sequence, by sample index in the order of the sample's sequences."""
    whole: dict[int, list[list[float]]] = {}
    for index, number in sorted(values):
        whole.setdefault(index, []).append(values[index, number])
    return whole


def micro_batches(samples: Iterable[Sample], *, max_tokens: int, rank: int, ranks: int) -> list[MicroBatch]:
    """This data parallel rank's share of the samples' sequences, packed into micro-batches of at most `max_tokens` tokens.

    Longest first onto the rank, then into the batch, with the most room: shares come out even and batches full. A sequence
    that is longer than `max_tokens` cannot be cut and gets a micro-batch of its own.
    """
    longest_first = sorted(parts_of(samples), key=lambda part: (-len(part), part.key))
    loads = [0] * ranks
    share: list[Part] = []
    for part in longest_first:
        to = loads.index(min(loads))
        loads[to] += len(part)
        if to == rank:
            share.append(part)

    bins: list[list[Part]] = []
    room: list[int] = []
    for part in share:
        size = len(part)
        fitting = [i for i, left in enumerate(room) if left >= size]
        if fitting:
            into = max(fitting, key=room.__getitem__)
        else:
            into = len(bins)
            bins.append([])
            room.append(max_tokens)
        bins[into].append(part)
        room[into] -= size
    return [MicroBatch(tuple(members)) for members in bins]


def _problem(sample: Sample, vocab_size: int) -> str:
    for number, sequence in enumerate(sample.sequences):
        problem = _problem_of_sequence(sequence, vocab_size)
        if problem:
            return f"fork {number}: {problem}" if number else problem
    if sample.advantage is not None and not math.isfinite(sample.advantage):
        return f"its advantage is {sample.advantage}"
    return ""


def _problem_of_sequence(sequence: TokenSequence, vocab_size: int) -> str:
    tokens, length = sequence.tokens, sequence.response_length
    if not 0 < length < len(tokens):
        return f"a response of {length} tokens in a sequence of {len(tokens)}: prompt and response must not be empty"
    for name in ("loss_mask", "rollout_log_probs"):
        values = getattr(sequence, name)
        if len(values) != length:
            return f"{name} has {len(values)} entries for {length} response tokens"
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        return f"a token id outside the vocabulary of {vocab_size}: {min(tokens)} to {max(tokens)}"
    if not all(math.isfinite(v) for v, m in zip(sequence.rollout_log_probs, sequence.loss_mask, strict=True) if m):
        return "a log-prob of the engine is not finite"
    return ""
