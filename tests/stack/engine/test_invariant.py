"""Products and attention of the deterministic engine: right, and the same bits whatever is computed beside a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from miles_verifiers.engine import attention, attention_blocks, invariant

SHAPES = [(576, 960), (576, 3072), (1536, 576), (64, 320)]
"""[K, N] of SmolLM2-135M's layers and of the tiny model's output."""


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(k: int, n: int) -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(75, k), torch.randn(n, k), torch.randn(n)
    whole, biased = invariant.mm(rows, weight.t()), invariant.addmm(bias, rows, weight.t())
    assert torch.allclose(whole, rows @ weight.t(), atol=1e-3)
    assert torch.allclose(biased, torch.addmm(bias, rows, weight.t()), atol=1e-3)
    for first, count in ((0, 1), (74, 1), (3, 7), (40, 32), (5, 70)):
        part = slice(first, first + count)
        assert torch.equal(invariant.mm(rows[part], weight.t()), whole[part])
        assert torch.equal(invariant.addmm(bias, rows[part], weight.t()), biased[part])


def test_blocks_cover_all_rows_once() -> None:
    for available in ((32,), (8, 16, 32, 64, 128), (8, 32)):
        for count in (0, 1, 8, 31, 33, 75, 300):
            blocks = list(invariant._blocks(count, available))
            assert all(size in available for _, size in blocks)
            assert [start for start, _ in blocks] == [sum(size for _, size in blocks[:i]) for i in range(len(blocks))]
            assert count <= sum(size for _, size in blocks) < count + available[-1]
    assert list(invariant._blocks(200, (8, 16, 32, 64, 128))) == [(0, 128), (128, 128)]
    assert list(invariant._blocks(9, (8, 16, 32))) == [(0, 16)]


def test_sizes_that_give_other_bits_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(960, 576).t()
    monkeypatch.setattr(invariant, "_sizes", {})
    monkeypatch.setattr(invariant, "_OTHERS", (128, 1))
    assert 1 not in invariant.sizes(weight), "the control: a single row is computed by another kernel"
    assert invariant.BLOCK in invariant.sizes(weight)


def test_without_blocks_the_bits_differ() -> None:
    """Control: torch's own product of one row is not that row of the product of many."""
    torch.manual_seed(0)
    rows, weight = torch.randn(75, 576), torch.randn(960, 576)
    assert not torch.equal(torch.mm(rows[:1], weight.t()), torch.mm(rows, weight.t())[:1])


def test_scaled_sums() -> None:
    torch.manual_seed(0)
    bias, left, right = torch.randn(5, 6), torch.randn(5, 4), torch.randn(4, 6)
    expected = 0.5 * bias + 3 * (left @ right)
    assert torch.allclose(invariant.addmm(bias, left, right, beta=0.5, alpha=3), expected, atol=1e-5)


class Sequences:
    """Three sequences in a cache of 400 slots, and queries for all their tokens."""

    def __init__(self, heads: int = 9, kv_heads: int = 3) -> None:
        torch.manual_seed(0)
        self.lengths = torch.tensor([75, 33, 16])
        self.keys, self.values = torch.randn(2, 400, kv_heads, 16)
        self.slots = torch.randperm(400)[: 3 * 80].view(3, 80)
        self.queries = [torch.randn(int(length), heads, 16) for length in self.lengths]

    def attend(
        self, chosen: list[int], firsts: list[int], lengths: list[int], window: int | None = None
    ) -> torch.Tensor:
        query = torch.cat([self.queries[i][a:b] for i, a, b in zip(chosen, firsts, lengths, strict=True)])
        blocks = attention_blocks.plan(self.slots[chosen], torch.tensor(firsts), torch.tensor(lengths), window)
        return attention_blocks.attend(query, self.keys, self.values, blocks, 0.3)

    def expected(self, i: int, position: int, window: int | None = None) -> torch.Tensor:
        """One query after the formula, in double precision."""
        seen = self.slots[i, max(0, position - window) if window is not None else 0 : position + 1]
        repeat = self.queries[i].shape[1] // self.keys.shape[1]
        k, v = (cache[seen].double().repeat_interleave(repeat, 1) for cache in (self.keys, self.values))
        weights = torch.softmax(torch.einsum("hd,lhd->hl", self.queries[i][position].double(), k) * 0.3, -1)
        return torch.einsum("hl,lhd->hd", weights, v).float()


@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(9, 3, None), (4, 4, None), (9, 3, 20)])
def test_attention_is_what_the_formula_says(heads: int, kv_heads: int, window: int | None) -> None:
    sequences = Sequences(heads, kv_heads)
    found = sequences.attend([0, 1, 2], [70, 0, 15], [75, 33, 16], window)
    places = [(0, p) for p in range(70, 75)] + [(1, p) for p in range(33)] + [(2, 15)]
    expected = torch.stack([sequences.expected(i, p, window) for i, p in places])
    assert torch.allclose(found, expected, atol=1e-5)
    # The controls: one key fewer, and no window, would show.
    one_less = torch.stack([sequences.expected(i, max(p - 1, 0), window) for i, p in places])
    assert not torch.allclose(found, one_less, atol=1e-2)
    if window is not None:
        assert not torch.allclose(found, torch.stack([sequences.expected(i, p) for i, p in places]), atol=1e-2)


def test_a_token_has_the_same_bits_however_it_came_there() -> None:
    """In a whole prompt, behind a cached prefix, decoded alone, decoded beside others."""
    sequences = Sequences()
    whole = sequences.attend([0], [0], [75])
    for first in (1, 31, 32, 70):
        assert torch.equal(sequences.attend([0], [first], [75]), whole[first:])
    for position in (0, 15, 16, 33, 74):
        assert torch.equal(sequences.attend([0], [position], [position + 1]), whole[position : position + 1])
        beside = sequences.attend([2, 0, 1], [15, position, 3], [16, position + 1, 33])
        assert torch.equal(beside[1:2], whole[position : position + 1])


def test_the_faster_attention_depends_on_its_neighbours() -> None:
    """Control: the attention that is used without deterministic inference gives other bits beside a longer sequence."""
    sequences = Sequences()
    lengths = torch.tensor([75, 33, 16])
    query = torch.stack([sequences.queries[i][length - 1] for i, length in enumerate(lengths.tolist())])
    together = attention.attend(query, sequences.keys, sequences.values, sequences.slots, lengths, 0.3)
    alone = [
        attention.attend(
            query[i : i + 1], sequences.keys, sequences.values, sequences.slots[i : i + 1, :n], lengths[i : i + 1], 0.3
        )[0]
        for i, n in enumerate(lengths.tolist())
    ]
    assert not all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))
