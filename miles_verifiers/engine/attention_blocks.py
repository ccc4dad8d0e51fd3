"""Attention whose bits a token's own sequence and position decide: the CPU engine's under deterministic inference.

The stock backend attends with as many queries as an extension of a sequence has tokens, to as many keys as the sequence has by
then (torch_native_backend.py, 0.5.23). So a prompt's first tokens get other bits in a short prompt than in a long one, and
those that come out of the prefix cache others than those computed anew. Here the token at position p is always query p % ROWS
of ROWS, attending to the first (p // ROWS + 1) * ROWS keys, of which those behind p are masked: in a prompt or while decoding,
with a cached prefix or without, alone or beside others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from miles_verifiers.engine.attention import DecoderBackend

ROWS = 16
"""Queries of a block. Decoding fills one of them; 8 to 32 took about the same time for 32 sequences of 200 tokens."""


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [N] of one forward pass whose positions have the same quotient by ROWS, of B sequences with L keys each."""

    tokens: torch.Tensor
    sequences: torch.Tensor
    """[N] 0 .. B - 1, of each token."""
    rows: torch.Tensor
    """[N] 0 .. ROWS - 1."""
    slots: torch.Tensor
    """[B, L] of the cache."""
    mask: torch.Tensor
    """[ROWS, L], True where a query may look."""


def plan(slots: torch.Tensor, firsts: torch.Tensor, lengths: torch.Tensor, window: int | None = None) -> list[Block]:
    """How the tokens firsts[b] .. lengths[b] - 1 of each of B sequences attend to themselves and to what is before them.

    slots [B, L] are those of each sequence in the cache, L at least the longest length; tokens are counted through, one sequence
    after the other; `window` tokens before a token count, None is all.
    """
    counts = lengths - firsts
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)  # [T]
    begins = torch.cumsum(counts, 0) - counts
    positions = torch.arange(len(owners)) - (begins - firsts)[owners]
    numbers = positions // ROWS
    blocks = []
    for number in torch.unique(numbers).tolist():
        tokens = torch.nonzero(numbers == number)[:, 0]
        sequences, place = torch.unique(owners[tokens], return_inverse=True)
        # Behind its end a sequence's last slot: masked, but it must be a number, because 0 times NaN is none.
        columns = torch.minimum(torch.arange((number + 1) * ROWS), lengths[sequences, None] - 1)
        chosen = torch.gather(slots[sequences].long(), 1, columns)
        blocks.append(Block(tokens, place, positions[tokens] % ROWS, chosen, _mask(number, window)))
    return blocks


def _mask(number: int, window: int | None) -> torch.Tensor:
    query = torch.arange(number * ROWS, (number + 1) * ROWS)[:, None]
    key = torch.arange((number + 1) * ROWS)[None, :]
    allowed = key <= query
    return allowed if window is None else allowed & (key >= query - window)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, blocks: Sequence[Block], scaling: float | None
) -> torch.Tensor:
    """query [T, Hq, D] of the tokens that `blocks` are of; keys and values [S, Hkv, D] of all slots. Returns [T, Hq, D]."""
    output = torch.empty_like(query)
    for block in blocks:
        queries = query.new_zeros(len(block.slots), ROWS, *query.shape[1:])
        queries[block.sequences, block.rows] = query[block.tokens]
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys[block.slots].transpose(1, 2).to(query.dtype),
            values[block.slots].transpose(1, 2).to(query.dtype),
            attn_mask=block.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        output[block.tokens] = attended.transpose(1, 2)[block.sequences, block.rows]
    return output


class BlockBackend(DecoderBackend):
    """Only the attention of decoders is made of blocks; encoders and cross attention are left as they are."""

    WINDOWS = True

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self._planned_for: torch.Tensor | None = None
        self._plans: dict[int | None, list[Block]] = {}
        """Of the forward pass in work, by window; its layers share them."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called at the begin of every forward pass."""
        super().init_forward_metadata(forward_batch)
        self._planned_for = None

    def _plan(
        self, slots: torch.Tensor, firsts: torch.Tensor, lengths: torch.Tensor, window: int | None
    ) -> list[Block]:
        if self._planned_for is not lengths:
            self._planned_for, self._plans = lengths, {}
        if window not in self._plans:
            self._plans[window] = plan(slots, firsts.long(), lengths.long(), window)
        return self._plans[window]

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
        blocks = self._plan(req_to_token[req_pool_indices], extend_prefix_lens, seq_lens, sliding_window_size)
        return output.copy_(attend(query, k_cache, v_cache, blocks, scaling))

    def _decode(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        scaling: float | None,
        window: int | None,
    ) -> torch.Tensor:
        return attend(query, keys, values, self._plan(slots, lengths - 1, lengths, window), scaling)
