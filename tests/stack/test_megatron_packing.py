"""Micro-batches: which positions predict which tokens, and who gets which sample."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.samples import Sample
from miles_verifiers.training.megatron.packing import MicroBatch, micro_batches


def sample(index: int, prompt: list[int], response: list[int], **fields) -> Sample:
    fields = {"loss_mask": [1] * len(response), "rollout_log_probs": [-1.0] * len(response)} | fields
    return Sample(
        group_index=0, index=index, task_index=0, tokens=prompt + response, response_length=len(response), **fields
    )


def test_rows_and_targets_by_hand():
    batch = MicroBatch((sample(0, [1, 2], [3, 4], advantage=0.5), sample(1, [5], [6], advantage=None)))
    assert batch.rows.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [3, 4, 6]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.0]
    flat = [token for sequence in batch.sequences for token in sequence]
    assert [flat[row + 1] for row in batch.rows.tolist()] == batch.targets.tolist()


@given(st.lists(st.integers(2, 60), min_size=0, max_size=40), st.integers(1, 100), st.integers(1, 4))
def test_every_sample_goes_to_exactly_one_micro_batch(lengths, max_tokens, ranks):
    samples = [sample(i, [1], [2] * (length - 1)) for i, length in enumerate(lengths)]
    shares = [micro_batches(samples, max_tokens=max_tokens, rank=rank, ranks=ranks) for rank in range(ranks)]
    seen = sorted(s.index for share in shares for batch in share for s in batch.samples)
    assert seen == list(range(len(lengths)))
    for batch in (batch for share in shares for batch in share):
        assert sum(len(s.tokens) for s in batch.samples) <= max_tokens or len(batch.samples) == 1
    loads = [sum(len(s.tokens) for batch in share for s in batch.samples) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_shares_do_not_depend_on_the_order_of_rows():
    samples = [sample(i, [1], [2] * (i % 5 + 1)) for i in range(20)]
    shuffled = random.Random(0).sample(samples, len(samples))
    one, other = (
        [[s.index for s in batch.samples] for batch in micro_batches(rows, max_tokens=12, rank=1, ranks=2)]
        for rows in (samples, shuffled)
    )
    assert one == other
