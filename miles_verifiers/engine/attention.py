"""Attention of the CPU engine: SGLang's `torch_native` backend, with one call per layer when it decodes.

The stock backend attends sequence by sequence (TorchNativeAttnBackend._run_sdpa_forward_decode in
sglang/srt/layers/attention/torch_native_backend.py, 0.5.23): 32 sequences on 30 layers are 960 small calls for each token.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """One new token of each of B sequences against its own cached ones.

    query [B, Hq, D], keys and values [S, Hkv, D] of all S cache slots, slots [B, L] those of each sequence (anything valid
    behind its end), lengths [B] how many of them count. Returns [B, Hq, D].
    """
    counts = torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]  # [B, L]
    out = scaled_dot_product_attention(
        query.unsqueeze(2),
        keys[slots].transpose(1, 2).to(query.dtype),
        values[slots].transpose(1, 2).to(query.dtype),
        attn_mask=counts[:, None, None, :],
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return out.squeeze(2)


class DecoderBackend(TorchNativeAttnBackend):
    """Decoding of decoders is `_decode`'s; that of encoders and cross attention stays SGLang's."""

    WINDOWS = False
    """Whether `_decode` knows sliding windows."""

    @abstractmethod
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
        """One new token of each of B sequences, as in `attend`; `window` tokens before it count, None is all."""

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
        if encoder_lens is not None or is_cross_attn or (sliding_window_size is not None and not self.WINDOWS):
            rest = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
            stock: Any = super()._run_sdpa_forward_decode
            return stock(query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest)
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        return output.copy_(self._decode(query, k_cache, v_cache, slots, seq_lens, scaling, sliding_window_size))


class BatchedDecodeBackend(DecoderBackend):
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
        return attend(query, keys, values, slots, lengths, scaling)


def take_over_torch_native() -> None:
    """Serve the name `torch_native`, so that SGLang's own special cases for that name hold for ours, too."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def create(runner: Any) -> TorchNativeAttnBackend:
        from sglang.srt.runtime_context import get_exec

        from miles_verifiers.engine.attention_blocks import BlockBackend

        exact = get_exec().deterministic.enable_deterministic_inference
        return BlockBackend(runner) if exact else BatchedDecodeBackend(runner)

    register_attention_backend("torch_native")(create)
