"""MegatronTrainer: one process of the trainer. Ray starts as many as there are ranks; every rank gets the same calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import ConfigError
from miles_verifiers.record.samples import Sample
from miles_verifiers.system.progress import report
from miles_verifiers.training.megatron import checkpoint as checkpoints
from miles_verifiers.training.megatron import devices, packing, parallel, step
from miles_verifiers.training.megatron.hf_folder import HFFolder
from miles_verifiers.training.megatron.model import Policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True)
class StepResult:
    """One training step; the same on all ranks. Log-probs and divergences are in nats.

    `loss`, `grad_norm`, `clip_fraction`, `ratio_mean` and `kl` are means over the optimizer steps, None where none was
    taken. The mismatch is trainer - engine over the sampled tokens of all usable rows, under the weights that sampled.
    """

    iteration: int
    rows: int
    rows_usable: int
    rows_trained: int
    """Rows with an advantage other than 0.0; the others give no gradient."""
    tokens: int
    """Sampled tokens of the usable rows, over all their sequences."""
    optimizer_steps: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    """Before clipping."""
    clip_fraction: float | None = None
    ratio_mean: float | None = None
    kl: float | None = None
    mismatch_mean: float | None = None
    """Mean |d|; None where there was no token, here and below."""
    mismatch_max: float | None = None
    mismatch_k3: float | None = None
    weight_delta: float = 0.0
    """Largest change of any weight in one optimizer step; 0.0 exactly where none was taken."""
    train_log_probs: dict[int, list[list[float]]] = field(default_factory=dict)
    """By sample index, of the usable rows: [R] for each of the sample's sequences, under the weights that sampled."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By stage: score, gradient, update."""


class MegatronTrainer:
    """Model and optimizer of one rank.

    Args:
        model: HF folder; its configuration, and the tokenizer files that exports get.
        checkpoint: root of the Megatron checkpoints; the newest is loaded, with its optimizer where it has one.
        config: the run's training section.
        dtype: "float32" or "bfloat16".
        rank, world_size, init_method: of torch.distributed, for example init_method = "tcp://127.0.0.1:29500".
        temperature: the rollouts' sampling temperature: engine log-probs are those of the tempered distribution.

    Raises InputError (ConfigError, HostError, ModelError) for what cannot be set up, TrainerError for what fails.
    """

    def __init__(
        self,
        *,
        model: Path,
        checkpoint: Path,
        config: TrainingSection,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        init_method: str,
        temperature: float = 1.0,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}", next_step=f"take one of: {', '.join(DTYPES)}")
        self._settings, self._temperature = config, temperature
        device = devices.pick(config, dtype=dtype, rank=rank)
        report("trainer: joining the process group")
        parallel.start(
            device.backend,
            tensor_parallel=config.tensor_model_parallel_size,
            rank=rank,
            world_size=world_size,
            init_method=init_method,
            timeout=max(config.load_timeout, config.step_timeout),
        )
        report("trainer: building the model")
        self._policy = Policy(HFFolder(model), dtype=DTYPES[dtype], device=device)
        self._updater = device.updater(self._policy.model, self._policy.config, config)
        report("trainer: loading the checkpoint")
        self._note = checkpoints.load(checkpoint, self._policy.model, self._updater.optimizer)

    @property
    def loaded_iteration(self) -> int:
        """Of the checkpoint that was loaded; 0 for a converted model."""
        return self._note.iteration

    @property
    def loaded_extra(self) -> dict[str, Any]:
        """What `save` was given as `extra` when the loaded checkpoint was written."""
        return self._note.extra

    def train(self, rows: Sequence[dict[str, Any]], iteration: int) -> StepResult:
        """GRPO on the rows of one rollout (samples.as_row, advantages assigned): score, then one or more optimizer steps.

        Every rank is given all rows and takes its data parallel share. `global_batch_size` rows make an optimizer step; one
        whose rows all have advantage 0.0 or None is left out, so weights and Adam's moments stay bit for bit what they
        were. Raises TrainerError where a row contradicts itself or a number is not finite.
        """
        clock = _Clock()
        samples = packing.usable_samples(rows, self._policy.geometry.vocab_size)
        batches = self._learning_batches(rows, samples)
        result = StepResult(
            iteration=iteration,
            rows=len(rows),
            rows_usable=len(samples),
            rows_trained=sum(map(len, batches)),
            tokens=packing.trained_tokens(samples),
        )

        # The first optimizer step still runs on the weights that sampled, so its own forward pass scores its rows.
        first = {sample.index for sample in batches[0]} if batches else set()
        with clock.stage("score"):
            others = [sample for sample in samples if sample.index not in first]
            scored = step.score(self._policy, self._share(others), self._temperature)
        steps: list[tuple[step.Pass, float]] = []
        for batch in batches:
            steps.append(self._optimizer_step(batch, clock, result))
            if len(steps) == 1:
                scored += step.Pass(steps[0][0].log_probs, steps[0][0].mismatch)

        result.train_log_probs = packing.by_sample(scored.log_probs)
        if scored.mismatch.tokens:
            result.mismatch_mean = scored.mismatch.mean
            result.mismatch_max = scored.mismatch.max
            result.mismatch_k3 = scored.mismatch.k3
        if steps:
            result.optimizer_steps = len(steps)
            result.loss = _mean([seen.loss for seen, _ in steps])
            result.grad_norm = _mean([norm for _, norm in steps])
            result.clip_fraction = _mean([seen.sums.clip_fraction for seen, _ in steps])
            result.ratio_mean = _mean([seen.sums.ratio_mean for seen, _ in steps])
            result.kl = _mean([seen.sums.kl_mean for seen, _ in steps])
        result.seconds = clock.seconds
        return result

    def export_hf(self, folder: Path) -> None:
        """Write the weights as an HF model folder, in the trainer's dtype. Every rank calls, the first writes."""
        report("trainer: exporting weights")
        tensors = {}
        for name, tensor in self._policy.hf_tensors():
            if parallel.is_first():
                tensors[name] = tensor.contiguous().cpu()
        parallel.on_first(lambda: self._policy.hf.write_like(folder, tensors))

    def save(self, root: Path, iteration: int, extra: dict[str, Any] | None = None) -> Path:
        """Write model, optimizer and `extra` (JSON values) as `root/iter_NNNNNNN`. Every rank calls."""
        report("trainer: writing a checkpoint")
        return checkpoints.save(
            root,
            self._policy.model,
            iteration=iteration,
            strategy=self._policy.device.save_strategy(),
            optimizer=self._updater.optimizer,
            extra=extra,
        )

    def annotate(self, root: Path, iteration: int, extra: dict[str, Any]) -> None:
        """Give the checkpoint `iteration`, which is there, another `extra`. Every rank calls."""
        checkpoints.annotate(root, iteration, extra)

    def close(self) -> None:
        """Leave the process group."""
        parallel.stop()

    def _learning_batches(self, rows: Sequence[dict[str, Any]], samples: Sequence[Sample]) -> list[list[Sample]]:
        """Samples that give a gradient, by optimizer step; steps without any are left out."""
        size = self._settings.global_batch_size or max(len(rows), 1)
        by_index = {sample.index: sample for sample in samples if packing.learns(sample)}
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        batches = [[by_index[row["index"]] for row in chunk if row["index"] in by_index] for chunk in chunks]
        return [batch for batch in batches if batch]

    def _share(self, samples: Sequence[Sample]) -> list[packing.MicroBatch]:
        return packing.micro_batches(
            samples,
            max_tokens=self._settings.max_tokens_per_gpu,
            rank=parallel.data_rank(),
            ranks=parallel.data_size(),
        )

    def _optimizer_step(self, batch: list[Sample], clock: _Clock, result: StepResult) -> tuple[step.Pass, float]:
        with clock.stage("gradient"):
            self._updater.zero_grad()
            seen = step.accumulate(
                self._policy,
                self._share(batch),
                self._settings,
                temperature=self._temperature,
                total_tokens=packing.trained_tokens(batch),
            )
        with clock.stage("update"):
            report("optimizer step")
            before = [parameter.detach().clone() for parameter in self._policy.parameters.values()]
            norm = self._updater.step()
            self._updater.zero_grad()
            result.weight_delta = max(result.weight_delta, self._largest_change(before))
        return seen, norm

    def _largest_change(self, before: list[torch.Tensor]) -> float:
        now = self._policy.parameters.values()
        changes = [(new.detach() - old).abs().max().float() for new, old in zip(now, before, strict=True)]
        largest = torch.stack(changes).max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=parallel.tensor_group())
        return float(largest)


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
