"""The training loop, a Ray driver in the `stack` interpreter: `python -m miles_verifiers.training.loop RUN_DIR`.

    evaluation -> rollouts (weights v) -> advantages -> training step -> dump -> weights v+1 to the engines -> metrics
    -> checkpoint

Step k samples with weight version k and makes version k+1. A step counts once its checkpoint is there: a run that was
stopped starts again at the newest checkpoint, and what the dump has of later steps is replaced. The checkpoint also says
where the run stands in its row of tasks, so that what follows is what would have followed.

The loop itself knows no Ray, no engine and no trainer but by what it is given; `main` puts it together.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_verifiers import grpo
from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import RolloutError
from miles_verifiers.record import dump, metrics
from miles_verifiers.record.rundir import RunDir
from miles_verifiers.record.samples import as_row
from miles_verifiers.rollout.evaluation import evaluation_due, summary
from miles_verifiers.system import files, process, progress
from miles_verifiers.training.record import eval_record, step_record
from miles_verifiers.training.steps import StepRollouts, renumbered

if TYPE_CHECKING:
    from miles_verifiers.training.engines import Engines
    from miles_verifiers.training.rollouts import Rollouts
    from miles_verifiers.training.trainers import Trainers

TRACKER = "latest_checkpointed_iteration.txt"


class Loop:
    """Engines, trainers and rollouts are started, but need not be ready yet."""

    def __init__(
        self, config: RunConfig, run: RunDir, engines: Engines, trainers: Trainers, rollouts: Rollouts
    ) -> None:
        self._config, self._run = config, run
        self._engines, self._trainers, self._rollouts = engines, trainers, rollouts
        self._steps = config.training.num_steps
        self._cursors: dict[str, Any] = {}
        self._saved = self._evaluated = -1

    def run(self) -> dict[str, Any]:
        """All steps that are still to do; returns the figures of the phase."""
        begun = time.monotonic()
        first = step = self._start()
        ready = time.monotonic()
        while step < self._steps:
            if evaluation_due(self._config.rollout, step):
                self._evaluate(step)
            batch = self._sample(step)
            if batch.samples:
                self._step(step, batch)
                step += 1
            if batch.ending == "tasks ran out":
                progress.report(f"the tasks ran out after step {step}")
                break
        if self._config.rollout.eval_interval is not None and self._evaluated != step:
            self._evaluate(step)
        return {
            "made": f"{step} step(s), {step * self._config.samples_per_step} samples",
            "weights": {"before": self._weights_before, "after": self._weights_hash(step)},
            "start_seconds": round(ready - begun, 1),
            "steps_seconds": round(time.monotonic() - ready, 1),
            "resumed_at": first,
        }

    def _start(self) -> int:
        """Waits for engine, trainer and rollouts, which load side by side; returns the first step."""
        self._engines.wait_ready()
        loaded = self._trainers.wait_loaded(self._tick("loading the trainer"))
        self._rollouts.wait_ready(self._tick("starting the rollout worker"))
        step = int(loaded.get("step", 0))
        self._cursors = dict(loaded.get("rollouts", {}))
        self._saved = step if loaded else -1
        # Also before the first step: the engine then says "0" for its version, and the way of the weights was tried.
        self._sync(step)
        self._weights_before = loaded.get("weights_before") or self._weights_hash(step)
        metrics.truncate_metrics(self._run.path, step)
        return step

    def _step(self, step: int, batch: StepRollouts) -> None:
        clock = _Clock(rollout=self._sampling_seconds)
        samples = batch.samples
        counts = grpo.assign_advantages(samples, self._config.training.normalize_advantages)
        result = self._trainers.train(
            [as_row(sample) for sample in samples], step + 1, self._tick(f"step {step + 1}: training")
        )
        for sample in samples:
            unseen: list[list[float]] = [[] for _ in sample.sequences]
            seen = result["train_log_probs"].get(sample.index, unseen)
            for sequence, log_probs in zip(sample.sequences, seen, strict=True):
                sequence.train_log_probs = log_probs
        clock.lap("train")
        dump.write_rollout(self._run.path, step, samples)
        self._sync(step + 1)
        clock.lap("sync")
        self._cursors = batch.cursors
        # The record comes before the checkpoint: what is resumed from is then complete, and anything newer is cut off.
        record = step_record(step, batch, counts, result, clock.seconds, self._config)
        metrics.append_metrics(self._run.path, record)
        is_last = step + 1 == self._steps or batch.ending == "tasks ran out"
        if (step + 1) % self._config.training.save_interval == 0 or is_last:
            self._save(step + 1)
        progress.report(
            f"step {step + 1}/{self._steps}: pass rate {record['pass_rate']:.2f}, mismatch {record['mismatch_mean'] or 0:.1e}, "
            f"{sum(clock.seconds.values()):.0f} s"
        )

    def _sample(self, step: int) -> StepRollouts:
        """The rollouts of one step. Where there is nothing to train on, what was accepted is saved and the causes are shown."""
        begun = time.monotonic()
        batch = self._rollouts.sample(step, self._cursors, self._show(f"step {step + 1}: rollouts"))
        self._sampling_seconds = time.monotonic() - begun
        stuck = batch.ending == "too many dropped"
        if stuck or (batch.ending == "deadline" and not batch.samples):
            self._keep(step, batch)
            limit = self._config.rollout.max_dropped_groups
            what = f"more than {limit} groups in a row were dropped" if stuck else "no group was finished in time"
            raise RolloutError(
                f"step {step + 1}: {what}\n{batch.why()}",
                where=str(self._run.logs / "rollout.log"),
                next_step="remove the cause and run the same command again: accepted groups are in the checkpoint",
            )
        if self._config.rollout.reward_control == "shuffle":
            shuffled = grpo.shuffled_rewards(batch.samples, seed=self._config.rollout.rollout_seed + step)
            return replace(batch, samples=shuffled)
        return batch

    def _evaluate(self, step: int) -> None:
        """Before step `step`, with its weights. Whatever goes wrong in a task is a missing sample."""
        begun = time.monotonic()
        samples, causes = self._rollouts.evaluate(step, self._show(f"evaluation before step {step + 1}"))
        results = {name: summary(own, self._config.verify.pass_metric) for name, own in samples.items()}
        dump.write_eval(self._run.path, step, renumbered(samples))
        self._evaluated = step
        seconds = time.monotonic() - begun
        metrics.append_metrics(self._run.path, eval_record(step, results, causes, seconds))
        for name, result in results.items():
            progress.report(f"evaluation before step {step + 1}, {name}: {result.line()}, {seconds:.0f} s")

    def _show(self, what: str) -> Any:
        def show(_seconds: float) -> None:
            self._engines.check()
            seen = self._rollouts.progress()
            rate = self._engines.throughput() or seen.get("tokens_per_second", 0.0)
            progress.report(f"{what}, {rate:.0f} tok/s", int(seen.get("done", 0)), int(seen.get("total", 0)) or None)

        return show

    def _sync(self, version: int) -> None:
        """The trainer's weights into the engines, as weight version `version`."""
        progress.report(f"weights, version {version}, to the engine")
        folder = self._run.sync / f"v{version:06d}"
        self._trainers.export_hf(folder)
        stale = self._config.training.weight_sync == "stale"
        loaded = self._run.model(self._config.model.source) if stale else folder
        self._engines.update_weights(loaded, version, self._config.training.sync_timeout)
        for old in self._run.sync.iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _save(self, step: int) -> None:
        progress.report(f"checkpoint {step}")
        self._trainers.save(self._run.checkpoints, step, self._note(step, self._cursors))
        self._saved = step
        kept = sorted(self._run.checkpoints.glob("iter_*"))[-self._config.training.keep_checkpoints :]
        for old in self._run.checkpoints.glob("iter_*"):
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def _keep(self, step: int, batch: StepRollouts) -> None:
        """What was accepted for a step that cannot be trained, into the checkpoint that the step starts from."""
        progress.report("keeping what was accepted")
        if self._saved == step:
            self._trainers.annotate(self._run.checkpoints, step, self._note(step, batch.cursors))
        else:
            self._cursors = batch.cursors
            self._save(step)

    def _note(self, step: int, cursors: dict[str, Any]) -> dict[str, Any]:
        return {"step": step, "weights_before": self._weights_before, "rollouts": cursors}

    def _weights_hash(self, version: int) -> str:
        return weights_hash(self._run.sync / f"v{version:06d}")

    def _tick(self, text: str) -> Any:
        def tick(seconds: float) -> None:
            self._engines.check()
            progress.report(text)

        return tick


class _Clock:
    def __init__(self, **before: float) -> None:
        self.seconds = {name: round(seconds, 3) for name, seconds in before.items()}
        self._at = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._at, 3)
        self._at = now


def vocabulary_size(model: Path) -> int:
    """Rows of the embedding, from a model folder's config.json: ids at or above it kill the engine."""
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def weights_hash(folder: Path) -> str:
    """SHA-256 over the hashes of a model folder's safetensors files."""
    hashes = [files.sha256(file) for file in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def main(run_dir: Path) -> None:
    # Here, so that the loop can be imported where there is no Ray.
    from miles_verifiers.training import cluster
    from miles_verifiers.training.engines import engines_of
    from miles_verifiers.training.rollouts import Rollouts
    from miles_verifiers.training.trainers import Trainers

    run = RunDir(run_dir)
    config = loading.read(run.config)
    model = run.model(config.model.source)
    resumed = (run.checkpoints / TRACKER).exists()
    source = run.checkpoints if resumed else run.torch_dist(config.model.source)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run.sync, ignore_errors=True)
        engines = stack.enter_context(engines_of(config, run))
        progress.report("starting Ray")
        stack.enter_context(cluster.local_cluster(config.training.num_gpus))
        engines.start()
        trainers = Trainers(config, run, source)
        rollouts = Rollouts(config, run, model, engines.urls, vocabulary_size(model))
        figures = Loop(config, run, engines, trainers, rollouts).run()
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(process.main_of_child(lambda: main(Path(sys.argv[1]))))
