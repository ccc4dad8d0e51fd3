"""One pass over micro-batches, with or without gradient, and what it saw summed over data parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import TrainerError
from miles_verifiers.system.progress import report
from miles_verifiers.training import loss as losses
from miles_verifiers.training.loss import LossSums, Mismatch
from miles_verifiers.training.megatron import parallel
from miles_verifiers.training.megatron.model import Policy
from miles_verifiers.training.megatron.packing import Key, MicroBatch


@dataclass(slots=True)
class Pass:
    """What one pass saw. `log_probs` [R] nats, by sequence; `loss` is this part's share of the step's loss."""

    log_probs: dict[Key, list[float]] = field(default_factory=dict)
    mismatch: Mismatch = field(default_factory=Mismatch)
    sums: LossSums = field(default_factory=LossSums)
    loss: float = 0.0

    def __add__(self, other: Pass) -> Pass:
        return Pass(
            self.log_probs | other.log_probs,
            self.mismatch + other.mismatch,
            self.sums + other.sums,
            self.loss + other.loss,
        )


def score(policy: Policy, batches: Sequence[MicroBatch], temperature: float) -> Pass:
    """Log-probs and mismatch under the present weights, of this rank's micro-batches and then of all ranks'."""
    seen = Pass()
    with torch.no_grad():
        for done, batch in enumerate(batches):
            report("trainer log-probs", done, len(batches))
            log_probs = _log_probs(policy, batch, temperature)
            seen += _observed(batch, log_probs)
    return _over_ranks(seen)


def accumulate(
    policy: Policy,
    batches: Sequence[MicroBatch],
    settings: TrainingSection,
    *,
    temperature: float,
    total_tokens: int,
) -> Pass:
    """Add the gradient of the policy loss of this rank's micro-batches; returns what all ranks saw.

    The ratio's denominator are the engine's log-probs: those of the policy that really sampled. `total_tokens` counts the
    trained tokens of all ranks, those of forks among them, so gradients of ranks, micro-batches and a rollout's sequences add
    up to that of the whole batch.
    """
    seen = Pass()
    for done, batch in enumerate(batches):
        report("training", done, len(batches))
        log_probs = _log_probs(policy, batch, temperature)
        device = log_probs.device
        loss, sums = losses.policy_loss(
            log_probs,
            batch.rollout_log_probs.to(device),
            batch.advantages.to(device),
            batch.loss_mask.to(device),
            eps_clip=settings.eps_clip,
            eps_clip_high=settings.eps_clip_high,
            total_tokens=total_tokens,
        )
        loss.backward()
        observed = _observed(batch, log_probs.detach())
        seen += Pass(observed.log_probs, observed.mismatch, sums, float(loss.detach()))
    return _over_ranks(seen)


def _log_probs(policy: Policy, batch: MicroBatch, temperature: float) -> torch.Tensor:
    device = policy.device.torch_device
    return policy.log_probs(batch.sequences, batch.rows.to(device), batch.targets.to(device), temperature=temperature)


def _observed(batch: MicroBatch, log_probs: torch.Tensor) -> Pass:
    values = log_probs.float().cpu()
    per_part = values.split(batch.lengths)
    return Pass(
        log_probs={part.key: own.tolist() for part, own in zip(batch.parts, per_part, strict=True)},
        mismatch=losses.mismatch(values, batch.rollout_log_probs, batch.loss_mask),
    )


def _over_ranks(seen: Pass) -> Pass:
    """The sum over data parallel ranks, and the check that all make alike: one that raised alone would leave the rest."""
    total = sum(parallel.from_data_ranks(seen), start=Pass())
    broken = {key[0] for key, values in total.log_probs.items() if not all(map(math.isfinite, values))}
    if broken:
        raise TrainerError(
            f"the trainer's log-probs of {len(broken)} samples are not finite",
            where=f"samples {sorted(broken)[:20]}",
            next_step="the weights are damaged: go back to an earlier checkpoint with a lower training.lr",
        )
    return total
