"""CPU or CUDA: the one place of the training room that knows the difference.

CPU: gloo, the local layer spec with our attention, a plain optimizer. CUDA: NCCL and stock megatron-core throughout, that
is Transformer Engine's layer spec, its DDP wrapper, its mixed precision optimizer and its checkpoint writer.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.enums import AttnBackend

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import ConfigError, HostError
from miles_verifiers.training.megatron import cpu_checkpoint, cpu_modules, optimizer


class Device(Protocol):
    backend: str
    """Of torch.distributed."""
    torch_device: torch.device

    def config_fields(self) -> dict[str, Any]:
        """Fields of TransformerConfig that only this device has."""

    def layer_spec(self, config: Any) -> Any:
        """Megatron's specification of one transformer layer."""

    def place(self, model: Any, *, head_size: int, rotary_base: float) -> None:
        """Bring a model built in CPU memory to the device."""

    def updater(self, model: Any, config: Any, settings: TrainingSection) -> optimizer.Updater:
        """What turns accumulated gradients into new weights."""

    def save_strategy(self) -> Any:
        """Megatron's writer of sharded tensors; None for its own."""


class Cpu:
    backend = "gloo"
    torch_device = torch.device("cpu")

    def config_fields(self) -> dict[str, Any]:
        return {}

    def layer_spec(self, config: Any) -> Any:
        spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
        spec.submodules.self_attention.submodules.core_attention = cpu_modules.SdpaCoreAttention
        return spec

    def place(self, model: Any, *, head_size: int, rotary_base: float) -> None:
        model.rotary_pos_emb = cpu_modules.CpuRotaryEmbedding(
            kv_channels=head_size, rotary_percent=1.0, rotary_base=rotary_base, use_cpu_initialization=True
        )

    def updater(self, model: Any, config: Any, settings: TrainingSection) -> optimizer.Updater:
        return optimizer.CpuUpdater(model, settings)

    def save_strategy(self) -> Any:
        return cpu_checkpoint.CpuTorchDistSave()


class Cuda:
    backend = "nccl"

    def __init__(self, rank: int, attention_backend: str) -> None:
        if not torch.cuda.is_available():
            raise HostError(
                "training.num_gpus asks for GPUs, torch sees none",
                next_step="check nvidia-smi and CUDA_VISIBLE_DEVICES, or take the cpu profile",
            )
        # Ray shows each trainer its own GPU, other launchers show all of the host.
        self.torch_device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.torch_device)
        self._attention = AttnBackend[attention_backend]

    def config_fields(self) -> dict[str, Any]:
        return {"attention_backend": self._attention}

    def layer_spec(self, config: Any) -> Any:
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)

    def place(self, model: Any, *, head_size: int, rotary_base: float) -> None:
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        # Transformer Engine asks for Megatron's random states even where nothing is dropped out.
        model_parallel_cuda_manual_seed(0)
        model.to(self.torch_device)

    def updater(self, model: Any, config: Any, settings: TrainingSection) -> optimizer.Updater:
        return optimizer.StockUpdater(model, config, settings)

    def save_strategy(self) -> Any:
        return None


def pick(settings: TrainingSection, *, dtype: str, rank: int) -> Device:
    """The device that a run's training section names. Raises ConfigError or HostError where the two do not fit."""
    if settings.num_gpus:
        backends = [backend.name for backend in AttnBackend]
        if settings.attention_backend not in backends:
            raise ConfigError(
                f"training.attention_backend = {settings.attention_backend!r} is unknown on a GPU",
                next_step=f"take one of: {', '.join(backends)}",
            )
        return Cuda(rank, settings.attention_backend)
    if settings.attention_backend != "sdpa":
        raise ConfigError(
            f"training.attention_backend = {settings.attention_backend!r} needs a GPU",
            next_step='set training.attention_backend = "sdpa", or training.num_gpus',
        )
    if dtype != "float32":
        raise ConfigError(
            f"training on the CPU is done in float32, not {dtype}",
            next_step='set model.dtype = "float32", or training.num_gpus',
        )
    return Cpu()
