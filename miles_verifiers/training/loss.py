"""The clipped policy loss and the engine/trainer mismatch, over flat lists of tokens. Torch only, no Megatron.

Axis legend: [N] response tokens of several sequences, one after another.

Both results come as sums, not means: micro-batches and data parallel ranks hold unequal numbers of tokens, and only sums
add up to the value of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_verifiers.errors import TrainerError


@dataclass(frozen=True, slots=True)
class LossSums:
    """Statistics of the policy loss, each summed over the trained tokens."""

    tokens: float = 0.0
    clipped: float = 0.0
    """Tokens whose gradient the clip took away."""
    ratio: float = 0.0
    kl: float = 0.0
    """(r - 1) - log r with r = new / old probability: Schulman's k3 estimate of KL(old || new), nats."""

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            self.tokens + other.tokens, self.clipped + other.clipped, self.ratio + other.ratio, self.kl + other.kl
        )

    @property
    def clip_fraction(self) -> float:
        return _mean(self.clipped, self.tokens)

    @property
    def ratio_mean(self) -> float:
        return _mean(self.ratio, self.tokens)

    @property
    def kl_mean(self) -> float:
        return _mean(self.kl, self.tokens)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the trainer's log-probs are from the engine's, d = trainer - engine, nats. NaN where no token was seen."""

    tokens: float = 0.0
    abs_sum: float = 0.0
    abs_max: float = 0.0
    k3_sum: float = 0.0

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.tokens + other.tokens,
            self.abs_sum + other.abs_sum,
            _worse(self.abs_max, other.abs_max),
            self.k3_sum + other.k3_sum,
        )

    @property
    def mean(self) -> float:
        """Mean |d|."""
        return _mean(self.abs_sum, self.tokens)

    @property
    def max(self) -> float:
        """Largest |d|."""
        return self.abs_max if self.tokens else math.nan

    @property
    def k3(self) -> float:
        """Mean of exp(d) - 1 - d (Schulman, "Approximating KL divergence", 2020): KL(engine || trainer), never negative."""
        return _mean(self.k3_sum, self.tokens)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    eps_clip: float,
    eps_clip_high: float,
    total_tokens: float,
) -> tuple[Tensor, LossSums]:
    """Sum over masked tokens of -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A), divided by `total_tokens`.

    r = exp(log_probs - old_log_probs), per token. The objective is PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7);
    the two bounds and the division by the tokens of the whole batch are DAPO's (Yu et al. 2025, arXiv:2503.14476, eq. 8).

    Over the rollouts i of an optimizer step, each with sequences S_i (its own and its forks') that train |o_i| tokens in all:

        loss = - sum_i sum_{s in S_i} sum_{t trained in s} min(r_t A_i, clip(r_t) A_i)  /  sum_i |o_i|

    A rollout weighs by the tokens that it sampled, each of them once, in however many sequences they lie.

    Args:
        log_probs: [N] of the weights in training, nats; the gradient flows through it.
        old_log_probs: [N] of the weights that sampled.
        advantages: [N] the advantage of each token's sample.
        loss_mask: [N] 1 where the token counts, else 0; what the other tensors hold there does not matter.
        total_tokens: masked tokens of the whole optimizer step, over all sequences, micro-batches and ranks.

    Returns the scalar loss and detached sums. Raises TrainerError if shapes differ or total_tokens is not positive.
    """
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages, "loss_mask": loss_mask}
    _same_shape(tensors)
    if not total_tokens > 0:
        raise TrainerError(f"the loss of a step with {total_tokens} trained tokens is not defined")
    counted = loss_mask > 0
    # Masked places may hold anything, and 0 * inf would still be NaN: replace, do not multiply.
    log_ratio = torch.where(counted, log_probs - old_log_probs, 0.0)
    advantage = torch.where(counted, advantages, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    loss = torch.where(counted, torch.maximum(unclipped, clipped), 0.0).sum() / total_tokens

    with torch.no_grad():
        exact = log_ratio.detach().double()
        sums = LossSums(
            tokens=float(counted.sum()),
            clipped=float((counted & (clipped > unclipped)).sum()),
            ratio=float(exact.exp()[counted].sum()),
            kl=float((torch.expm1(exact) - exact)[counted].sum()),
        )
    return loss, sums


@torch.no_grad()
def mismatch(train_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Compare the trainer's log-probs of the sampled tokens, [N], with the engine's, [N], where loss_mask, [N], is 1.

    In double precision: k3 of two float32 engines is about 1e-11, far below float32's own rounding of exp(d) - 1 - d.
    Raises TrainerError if the shapes differ.
    """
    _same_shape({"train_log_probs": train_log_probs, "rollout_log_probs": rollout_log_probs, "loss_mask": loss_mask})
    d = (train_log_probs.double() - rollout_log_probs.double())[loss_mask > 0]
    if not d.numel():
        return Mismatch()
    return Mismatch(
        tokens=float(d.numel()),
        abs_sum=float(d.abs().sum()),
        abs_max=float(d.abs().max()),
        k3_sum=float((torch.expm1(d) - d).sum()),
    )


def _same_shape(tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise TrainerError(f"tensors of the loss must be flat and of one length, but are {listed}")


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _worse(a: float, b: float) -> float:
    """The maximum, except that NaN wins: Python's max() would drop it or keep it by the order of its arguments."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
