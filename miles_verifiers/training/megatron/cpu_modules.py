"""What stock megatron-core cannot do without CUDA, as modules that its layer specs take: nothing is patched."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SdpaCoreAttention(MegatronModule):
    """Causal attention over torch's scaled_dot_product_attention, for packed sequences.

    Stands in for DotProductAttention (megatron-core 0.16.1 to 0.19.2, transformer/dot_product_attention.py), which wants
    CUDA's memory buffer and random states and knows no packed sequences.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, groups, d] of sequences one after another -> [t, heads * d]."""
        assert packed_seq_params is not None, "sequences are always packed here"
        ends = packed_seq_params.cu_seqlens_q
        lengths = (ends[1:] - ends[:-1]).tolist()
        each = zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True)
        return torch.cat([self._attend(q, k, v) for q, k, v in each])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=q.size(1) != k.size(1))
        return out.squeeze(0).transpose(0, 1).reshape(query.size(0), -1)


class CpuRotaryEmbedding(RotaryEmbedding):
    """RotaryEmbedding.get_emb moves its frequencies to the current CUDA device.

    Seen in megatron-core 0.16.1 to 0.19.2, models/common/embeddings/rotary_pos_embedding.py.
    """

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]
