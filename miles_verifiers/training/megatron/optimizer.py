"""From accumulated gradients to new weights: AdamW with weight decay on matrices only, gradients clipped by global norm."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import TrainerError
from miles_verifiers.training.megatron import parallel


class Updater(Protocol):
    """Megatron's optimizer with what belongs around it on the device."""

    optimizer: Any
    """A MegatronOptimizer: its sharded_state_dict and load_state_dict are what checkpoints use."""

    def zero_grad(self) -> None: ...

    def step(self) -> float:
        """Sum gradients over ranks, clip, update. Returns the norm before clipping; TrainerError if it is not finite."""


class CpuUpdater:
    """Gradients in `.grad`; the sums that Megatron's DDP wrapper and finalize_model_grads would make, over gloo."""

    def __init__(self, model: Any, settings: TrainingSection) -> None:
        self._model = model
        adam = torch.optim.AdamW(
            _parameter_groups(model, settings.weight_decay),
            lr=settings.lr,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )
        self.optimizer: Any = CpuFP32Optimizer(adam, _megatron_settings(settings, torch.float32))

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> float:
        self._sum_over_ranks()
        _, norm, _ = self.optimizer.step()
        return float(norm)

    def _sum_over_ranks(self) -> None:
        tensor_group, data_group = parallel.tensor_group(), parallel.data_group()
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None:
                # A rank without samples still takes part in the sum.
                parameter.grad = torch.zeros_like(parameter)
            # Each tensor parallel rank has the gradient of its own heads only, yet all share these two norms.
            # (finalize_model_grads does the same.) Without it the loss still looks right and the weights drift.
            if tensor_group.size() > 1 and ("q_layernorm" in name or "k_layernorm" in name):
                dist.all_reduce(parameter.grad, group=tensor_group)
            if data_group.size() > 1:
                dist.all_reduce(parameter.grad, group=data_group)


class CpuFP32Optimizer(FP32Optimizer):
    """Megatron's FP32Optimizer with its state on the CPU, and so its own clipping.

    Works around 'cuda' in megatron-core 0.16.1 to 0.19.2: optimizer/optimizer.py (FP32Optimizer.__init__) and
    optimizer/clip_grads.py. What checkpoints need is inherited.
    """

    def __init__(self, adam: Any, config: Any) -> None:
        MegatronOptimizer.__init__(self, adam, config, _empty_adam_state)
        self._scale = torch.ones(1)
        self.is_stub_optimizer = False

    def get_grad_norm(self) -> float:
        # Renamed after 0.16.
        grads = getattr(self, "get_grads_for_grad_norm", None) or self.get_main_grads_for_grad_norm
        squares = torch.zeros((), dtype=torch.float64)
        for grad in grads():
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64) ** 2
        dist.all_reduce(squares, group=self.get_grad_stats_parallel_group())
        return float(squares.sqrt())

    def clip_grad_norm(self, clip_grad: float) -> float:
        norm = _finite(self.get_grad_norm())
        scale = clip_grad / (norm + 1e-6)
        if scale < 1.0:
            for parameter in self.get_parameters():
                parameter.grad.mul_(scale)
        return norm


class StockUpdater:
    """Megatron's DDP wrapper and optimizer as they are, float32 gradients, not sharded over data parallel ranks."""

    def __init__(self, model: Any, config: Any, settings: TrainingSection) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self._wrapped = DistributedDataParallel(config=config, ddp_config=options, module=model)
        self.optimizer: Any = get_megatron_optimizer(_megatron_settings(settings, config.params_dtype), [self._wrapped])

    def zero_grad(self) -> None:
        self._wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> float:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._wrapped])
        _, norm, _ = self.optimizer.step()
        return _finite(float(norm))


def _megatron_settings(settings: TrainingSection, dtype: torch.dtype) -> Any:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_distributed_optimizer=False,
    )


def _parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """As Megatron groups them: no weight decay on biases and norms. The extra keys identify a group in its checkpoints."""
    parameters = list(model.parameters())
    chosen = {1.0: [p for p in parameters if p.ndim > 1], 0.0: [p for p in parameters if p.ndim <= 1]}
    return [
        {
            "params": members,
            "weight_decay": weight_decay * factor,
            "wd_mult": factor,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
        }
        for factor, members in chosen.items()
    ]


def _empty_adam_state(adam: Any, config: Any = None) -> None:
    """State of the right shapes before anything was updated: a checkpoint is loaded into it."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _finite(norm: float) -> float:
    if not math.isfinite(norm):
        raise TrainerError(
            f"the gradient norm is {norm}",
            next_step="the weights were not saved; lower training.lr, or look at the step's samples in the dump",
        )
    return norm
