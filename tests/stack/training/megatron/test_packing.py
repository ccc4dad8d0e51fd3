"""Micro-batches: which positions predict which tokens, and who gets which sample."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from miles_verifiers.record.samples import Fork, Sample
from miles_verifiers.training.megatron.packing import MicroBatch, by_sample, micro_batches, parts_of, trained_tokens


def sample(index: int, prompt: list[int], response: list[int], **fields) -> Sample:
    fields = {"loss_mask": [1] * len(response), "rollout_log_probs": [-1.0] * len(response)} | fields
    return Sample(
        group_index=0, index=index, task_index=0, tokens=prompt + response, response_length=len(response), **fields
    )


def fork(shared: list[int], prompt: list[int], response: list[int]) -> Fork:
    tokens = [*shared, *prompt, *response]
    return Fork(tokens, len(response), [1] * len(response), [-2.0] * len(response), shared_length=len(shared))


def test_rows_and_targets_by_hand():
    samples = [sample(0, [1, 2], [3, 4], advantage=0.5), sample(1, [5], [6], advantage=None)]
    batch = MicroBatch(tuple(parts_of(samples)))
    assert batch.rows.tolist() == [1, 2, 4]
    assert batch.targets.tolist() == [3, 4, 6]
    assert batch.advantages.tolist() == [0.5, 0.5, 0.0]
    flat = [token for sequence in batch.sequences for token in sequence]
    assert [flat[row + 1] for row in batch.rows.tolist()] == batch.targets.tolist()


def test_a_fork_has_its_samples_advantage_and_its_own_tokens():
    forked = sample(7, [1, 2], [3, 4], advantage=0.5, forks=[fork([1, 2], [8], [9]), fork([], [6], [5, 4])])
    parts = parts_of([forked])
    assert [part.key for part in parts] == [(7, 0), (7, 1), (7, 2)]
    batch = MicroBatch(tuple(parts))
    assert batch.rows.tolist() == [1, 2, 6, 8, 9]
    assert batch.targets.tolist() == [3, 4, 9, 5, 4]
    assert batch.advantages.tolist() == [0.5] * 5
    assert batch.rollout_log_probs.tolist() == [-1.0, -1.0, -2.0, -2.0, -2.0]
    assert trained_tokens([forked]) == 5
    assert by_sample({(7, 1): [0.1], (8, 0): [0.4], (7, 0): [0.2, 0.3]}) == {7: [[0.2, 0.3], [0.1]], 8: [[0.4]]}


@given(
    st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=4), max_size=20), st.integers(1, 100), st.integers(1, 4)
)
def test_every_sequence_goes_to_exactly_one_micro_batch(lengths, max_tokens, ranks):
    """Those of a forked sample each on their own: wherever there is room."""
    samples = [
        sample(i, [1], [2] * (own - 1), forks=[fork([1], [], [2] * (length - 1)) for length in forks])
        for i, (own, *forks) in enumerate(lengths)
    ]
    shares = [micro_batches(samples, max_tokens=max_tokens, rank=rank, ranks=ranks) for rank in range(ranks)]
    seen = sorted(part.key for share in shares for batch in share for part in batch.parts)
    assert seen == [(i, number) for i, own in enumerate(lengths) for number in range(len(own))]
    for batch in (batch for share in shares for batch in share):
        assert sum(map(len, batch.parts)) <= max_tokens or len(batch.parts) == 1
    loads = [sum(len(part) for batch in share for part in batch.parts) for share in shares]
    assert max(loads) - min(loads) <= max((length for own in lengths for length in own), default=0)


def test_shares_do_not_depend_on_the_order_of_rows():
    samples = [sample(i, [1], [2] * (i % 5 + 1)) for i in range(20)]
    shuffled = random.Random(0).sample(samples, len(samples))
    one, other = (
        [[part.key for part in batch.parts] for batch in micro_batches(rows, max_tokens=12, rank=1, ranks=2)]
        for rows in (samples, shuffled)
    )
    assert one == other
