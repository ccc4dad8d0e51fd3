"""Attention whose bits a token's own sequence and position decide: the CPU engine's under deterministic inference.

The stock backend attends with as many queries as an extension of a sequence has tokens, to as many keys as the sequence has by
then (torch_native_backend.py, 0.5.23). So a prompt's first tokens get other bits in a short prompt than in a long one, and
those that come out of the prefix cache others than those computed anew. Here the token at position p is always query p % ROWS
of ROWS, attending to the first (p // ROWS + 1) * ROWS keys, of which those behind p are masked: in a prompt or while decoding,
with a cached prefix or without, alone or beside others.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

ROWS = 16
"""Queries of a block. Decoding fills one of them; 8 to 32 took about the same time for 32 sequences of 200 tokens."""


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    firsts: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
    window: int | None = None,
) -> torch.Tensor:
    """The tokens firsts[b] .. lengths[b] - 1 of each of B sequences against themselves and what is before them.

    query [T, Hq, D] of these tokens, one sequence after the other; keys and values [S, Hkv, D] of all S cache slots; slots
    [B, L] those of each sequence, L at least the longest length; `window` tokens before a token count, None is all.
    Returns [T, Hq, D].
    """
    output = torch.empty_like(query)
    counts = lengths - firsts
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)  # [T]
    begins = torch.cumsum(counts, 0) - counts
    positions = torch.arange(query.shape[0]) - (begins - firsts)[owners]
    for block in torch.unique(positions // ROWS).tolist():
        end = (block + 1) * ROWS
        tokens = torch.nonzero(positions // ROWS == block)[:, 0]
        sequences, place = torch.unique(owners[tokens], return_inverse=True)
        queries = query.new_zeros(len(sequences), ROWS, *query.shape[1:])
        queries[place, positions[tokens] % ROWS] = query[tokens]
        # Behind its end a sequence's last slot: masked, but it must be a number, because 0 times NaN is none.
        columns = torch.minimum(torch.arange(end), lengths[sequences, None] - 1)
        chosen = torch.gather(slots[sequences].long(), 1, columns.long())
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys[chosen].transpose(1, 2).to(query.dtype),
            values[chosen].transpose(1, 2).to(query.dtype),
            attn_mask=_mask(block, window),
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        output[tokens] = attended.transpose(1, 2)[place, positions[tokens] % ROWS]
    return output


def _mask(block: int, window: int | None) -> torch.Tensor:
    """[ROWS, keys], True where a query may look."""
    query = torch.arange(block * ROWS, (block + 1) * ROWS)[:, None]
    key = torch.arange((block + 1) * ROWS)[None, :]
    allowed = key <= query
    return allowed if window is None else allowed & (key >= query - window)


class BlockBackend(TorchNativeAttnBackend):
    """Only the attention of decoders is made of blocks; encoders and cross attention are left as they are."""

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn or not causal:
            rest = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
            lengths = (seq_lens, extend_prefix_lens, extend_seq_lens)
            stock: Any = super()._run_sdpa_forward_extend
            return stock(query, output, k_cache, v_cache, req_to_token, req_pool_indices, *lengths, *rest)
        slots = req_to_token[req_pool_indices]
        firsts, ends = extend_prefix_lens.long(), seq_lens.long()
        return output.copy_(attend(query, k_cache, v_cache, slots, firsts, ends, scaling, sliding_window_size))

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> torch.Tensor:
        if encoder_lens is not None or is_cross_attn:
            rest = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
            stock: Any = super()._run_sdpa_forward_decode
            return stock(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest)
        ends = seq_lens.long()
        slots = req_to_token[req_pool_indices, : int(ends.max())]
        return output.copy_(attend(query, k_cache, v_cache, slots, ends - 1, ends, scaling, sliding_window_size))
