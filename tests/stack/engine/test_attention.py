"""Batched decoding gives what one sequence after the other gives; test_engine_server.py compares whole replies."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from miles_verifiers.engine.attention import attend


def one_by_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    rows = []
    for q, row, length in zip(query, slots, lengths.tolist(), strict=True):
        k, v = keys[row[:length]].movedim(0, 1), values[row[:length]].movedim(0, 1)
        rows.append(scaled_dot_product_attention(q[:, None], k, v, scale=0.3, enable_gqa=True)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4)])
def test_a_batch_is_what_its_sequences_are(heads: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(5, heads, 16)
    keys, values = torch.randn(2, 200, kv_heads, 16)
    slots = torch.randperm(200)[: 5 * 30].view(5, 30)
    lengths = torch.tensor([1, 30, 7, 29, 16])
    expected = one_by_one(query, keys, values, slots, lengths)
    assert torch.allclose(attend(query, keys, values, slots, lengths, 0.3), expected, atol=1e-6)
    # The controls: one cached token too many or too few, and another scale, all show.
    assert not torch.allclose(attend(query, keys, values, slots, lengths.clamp(max=28), 0.3), expected, atol=1e-3)
    assert not torch.allclose(attend(query, keys, values, slots, (lengths + 1).clamp(max=30), 0.3), expected, atol=1e-3)
    assert not torch.allclose(attend(query, keys, values, slots, lengths, None), expected, atol=1e-3)
