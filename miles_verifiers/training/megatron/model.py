"""HF configuration -> Megatron's GPTModel, and the two things a policy is asked: logits and token log-probs.

Axis legend: [t] tokens of packed sequences, [n] selected positions, V padded vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from miles_verifiers.errors import ModelError
from miles_verifiers.training.megatron import mapping, noise, parallel
from miles_verifiers.training.megatron.devices import Device
from miles_verifiers.training.megatron.hf_folder import HFFolder
from miles_verifiers.training.megatron.logprobs import token_log_probs
from miles_verifiers.training.megatron.mapping import Geometry

_VOCAB_MULTIPLE = 128
"""Megatron's default of --make-vocab-size-divisible-by; times the tensor parallel size."""


class Policy:
    """A GPTModel on its device, with the HF folder that it is described by. Weights are not loaded here."""

    def __init__(self, hf: HFFolder, *, dtype: torch.dtype, device: Device, tensor_parallel: int | None = None) -> None:
        """`tensor_parallel` pads the vocabulary for that many ranks; None: for those that there are."""
        self.hf, self.device = hf, device
        check_supported(hf)
        config = hf.config
        self.geometry = geometry(config, tensor_parallel or parallel.tensor_size())
        with noise.hushed():
            self.config = transformer_config(config, dtype, parallel.tensor_size(), device)
            self.model: Any = GPTModel(
                config=self.config,
                transformer_layer_spec=device.layer_spec(self.config),
                vocab_size=self.geometry.padded_vocab_size,
                max_sequence_length=config.max_position_embeddings,
                position_embedding_type="rope",
                rotary_base=rope_theta(config),
                share_embeddings_and_output_weights=config.tie_word_embeddings,
                parallel_output=True,
            )
        device.place(self.model, head_size=self.geometry.head_size, rotary_base=rope_theta(config))
        self.parameters: dict[str, Any] = dict(self.model.named_parameters())
        self._rules = mapping.plan(self.parameters, None, tied=config.tie_word_embeddings, where=str(hf.path))
        for name, parameter in self.parameters.items():
            # megatron-core 0.16.1, tensor_parallel/layers.py, forgets this mark where it does not initialize weights; the
            # gradient norm then counts one rank's shard only.
            parameter.tensor_model_parallel = self._rules[name].shard_dim is not None

    def load_hf(self) -> None:
        """Weights from the HF folder. Raises ModelError if a name or a shape has no counterpart."""
        rules = mapping.plan(
            self.parameters, self.hf.names, tied=self.hf.config.tie_word_embeddings, where=str(self.hf.path)
        )
        rank, size = parallel.tensor_rank(), parallel.tensor_size()
        mapping.load(self.parameters, rules, self.hf.tensor, self.geometry, rank=rank, size=size)

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, unsharded tensor); every tensor parallel rank has to iterate."""
        return mapping.export(self.parameters, self._rules, parallel.from_tensor_ranks, self.geometry)

    def logits(self, sequences: Sequence[Sequence[int]], rows: Tensor | None = None) -> Tensor:
        """[n, V / tensor parallel size] logits of packed sequences at `rows` of their t tokens, or [t, ...] at all."""
        lengths = [len(sequence) for sequence in sequences]
        tokens = torch.tensor([token for sequence in sequences for token in sequence], device=self.device.torch_device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(tokens.device)
        with noise.hushed(), self._head_sees(rows):
            out: Tensor = self.model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                attention_mask=None,
                packed_seq_params=self._packed(lengths),
            )
        return out.squeeze(0)

    def log_probs(
        self, sequences: Sequence[Sequence[int]], rows: Tensor, targets: Tensor, *, temperature: float
    ) -> Tensor:
        """[n] log-probs, nats, of `targets` [n] as the tokens that follow `rows` [n]."""
        return token_log_probs(
            self.logits(sequences, rows),
            targets,
            vocab_size=self.geometry.vocab_size,
            temperature=temperature,
            rank=parallel.tensor_rank(),
            group=parallel.tensor_group(),
        )

    @contextmanager
    def _head_sees(self, rows: Tensor | None) -> Iterator[None]:
        """Compute the output layer at `rows` only: logits of prompt tokens are large and nobody reads them."""
        if rows is None:
            yield
            return

        def select(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0].index_select(0, rows), *args[1:])

        handle = self.model.output_layer.register_forward_pre_hook(select)
        try:
            yield
        finally:
            handle.remove()

    def _packed(self, lengths: Sequence[int]) -> Any:
        ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        ends = ends.to(self.device.torch_device)
        longest = max(lengths)
        return PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )


def check_supported(hf: HFFolder) -> None:
    """Raises ModelError for a model that this room would compute wrongly, before anything is built."""
    kind = hf.raw_config.get("model_type")
    if kind not in mapping.SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"model_type {kind!r} is not supported",
            where=str(hf.path / "config.json"),
            next_step=f"supported are: {', '.join(mapping.SUPPORTED_MODEL_TYPES)}",
        )
    config = hf.config
    rope = _rope(config)
    scaling = rope.get("rope_type", rope.get("type", "default"))
    wrong = {
        "hidden_act": config.hidden_act != "silu" and config.hidden_act,
        "rope scaling": scaling != "default" and scaling,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0 and rope["partial_rotary_factor"],
        "use_sliding_window": bool(getattr(config, "use_sliding_window", False)),
    }
    found = [f"{name} = {value}" for name, value in wrong.items() if value]
    if found:
        raise ModelError(
            f"this variant of {kind} is not supported: {', '.join(found)}",
            where=str(hf.path / "config.json"),
            next_step="use a model with SiLU, unscaled rotary embeddings over whole heads, and full attention",
        )


def transformer_config(hf: Any, dtype: torch.dtype, tensor_parallel: int, device: Device) -> Any:
    """Raises ModelError if heads cannot be shared evenly among tensor parallel ranks."""
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(hf, name) % tensor_parallel:
            raise ModelError(
                f"{name} = {getattr(hf, name)} cannot be split over {tensor_parallel} tensor parallel ranks",
                next_step="choose a training.tensor_model_parallel_size that divides it",
            )
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        kv_channels=_head_size(hf),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=bool(getattr(hf, "attention_bias", False)) or hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Every weight comes from a checkpoint.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Gradients are summed over data parallel ranks, since the loss is divided by the tokens of all of them.
        calculate_per_token_loss=True,
        # Fused kernels are CUDA's; without them both devices compute the same.
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **device.config_fields(),
    )


def geometry(hf: Any, tensor_parallel: int) -> Geometry:
    multiple = _VOCAB_MULTIPLE * tensor_parallel
    return Geometry(
        groups=hf.num_key_value_heads,
        heads_per_group=hf.num_attention_heads // hf.num_key_value_heads,
        head_size=_head_size(hf),
        vocab_size=hf.vocab_size,
        padded_vocab_size=math.ceil(hf.vocab_size / multiple) * multiple,
    )


def rope_theta(hf: Any) -> float:
    return float(_rope(hf).get("rope_theta", getattr(hf, "rope_theta", 10000.0)))


def _rope(hf: Any) -> dict[str, Any]:
    """transformers 5 keeps everything rotary in `rope_parameters`, 4 had `rope_scaling` beside `rope_theta`."""
    return dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})


def _head_size(hf: Any) -> int:
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
