"""Log-probs of given tokens from logits whose vocabulary is spread over tensor parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabParallelLogProb(torch.autograd.Function):
    """log softmax(logits / temperature)[target] with at most one tensor of the logits' size kept for backward.

    The gradient is that of cross entropy: d logp / d logits = (onehot(target) - softmax) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, first: int, valid: int, temperature: float, group: Any
    ) -> Tensor:
        top = logits[:, :valid].amax(-1) if valid else logits.new_full((logits.size(0),), -torch.inf)
        top = top.float()
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        # From here on in place: the logits are the largest tensor of a training step by far.
        weights = logits.float() - top.unsqueeze(-1)
        if temperature != 1.0:
            weights.div_(temperature)
        weights[:, valid:] = -torch.inf
        here = (target >= first) & (target < first + weights.size(-1))
        local = torch.where(here, target - first, 0).unsqueeze(-1)
        chosen = torch.where(here, weights.gather(-1, local).squeeze(-1), 0.0)
        weights.exp_()
        total = weights.sum(-1)
        dist.all_reduce(total, group=group)
        dist.all_reduce(chosen, group=group)
        ctx.save_for_backward(weights, total, local, here)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return chosen - total.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, total, local, here = ctx.saved_tensors
        grad = grad / ctx.temperature
        # In place again: backward runs once, nothing reads the saved weights after it.
        out = weights.mul_((-grad / total).unsqueeze(-1))
        out.scatter_add_(-1, local, (grad * here).unsqueeze(-1))
        return out.to(ctx.dtype), None, None, None, None, None


def token_log_probs(
    logits: Tensor, targets: Tensor, *, vocab_size: int, temperature: float, rank: int, group: Any
) -> Tensor:
    """Log-probs, nats, float32 [n], of targets [n] under logits [n, V / tensor parallel size] of this rank.

    Rows of the vocabulary beyond `vocab_size` are Megatron's padding and have probability 0. The temperature divides the
    logits, as engines do before they sample (SGLang 0.5, layers/sampler.py).
    """
    width = logits.size(-1)
    first = rank * width
    valid = max(0, min(width, vocab_size - first))
    out: Tensor = _VocabParallelLogProb.apply(logits, targets, first, valid, temperature, group)
    return out
