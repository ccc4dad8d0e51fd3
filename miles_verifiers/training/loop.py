"""The training loop, a Ray driver in the `stack` interpreter: `python -m miles_verifiers.training.loop RUN_DIR`.

    rollouts (weights v) -> advantages -> training step -> dump -> checkpoint -> weights v+1 into the engines -> metrics

Step k samples with weight version k and makes version k+1. A step counts once its checkpoint is there: a run that was
stopped starts again at the newest checkpoint, and what the dump has of later steps is replaced.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from miles_verifiers import config as configuration
from miles_verifiers import dump, files, grpo, metrics, process, progress
from miles_verifiers.config import RunConfig
from miles_verifiers.errors import RolloutError
from miles_verifiers.rollout.worker import RolloutWorker
from miles_verifiers.rundir import RunDir
from miles_verifiers.samples import Sample, as_row, from_row
from miles_verifiers.training import cluster
from miles_verifiers.training.engines import Engines, engines_of
from miles_verifiers.training.record import step_record
from miles_verifiers.training.trainers import Trainers

TRACKER = "latest_checkpointed_iteration.txt"


class Loop:
    def __init__(self, config: RunConfig, run: RunDir, engines: Engines) -> None:
        self._config, self._run, self._engines = config, run, engines
        self._steps = config.training.num_steps

    def run(self) -> dict[str, Any]:
        """All steps that are still to do; returns the figures of the phase."""
        begun = time.monotonic()
        first = self._start()
        ready = time.monotonic()
        for step in range(first, self._steps):
            self._step(step)
        return {
            "made": f"{self._steps} step(s), {self._steps * self._config.samples_per_step} samples",
            "weights": {"before": self._weights_before, "after": self._weights_hash(self._steps)},
            "start_seconds": round(ready - begun, 1),
            "steps_seconds": round(time.monotonic() - ready, 1),
            "resumed_at": first,
        }

    def _start(self) -> int:
        """Engine, trainer and rollouts at once, since each waits for the disk most of the time; returns the first step."""
        config, run = self._config, self._run
        resumed = (run.checkpoints / TRACKER).exists()
        source = run.checkpoints if resumed else run.torch_dist(config.model.source)
        model = run.model(config.model.source)
        self._engines.start()
        self._trainers = Trainers(config, run, source)
        self._rollouts = cluster.start_actor(
            RolloutWorker,
            config.model_dump(),
            str(model),
            self._engines.urls,
            vocabulary_size(model),
            str(run.logs / "rollout.log"),
            python=run.python("env"),
            pass_variables=config.environment.pass_variables,
        )
        self._engines.wait_ready()
        loaded = self._trainers.wait_loaded(self._tick("loading the trainer"))
        cluster.wait(
            [self._rollouts.preflight.remote()],
            what="starting the rollout worker",
            timeout=config.rollout.setup_timeout,
            error=RolloutError,
            on_tick=self._tick("starting the rollout worker"),
        )
        step = int(loaded.get("step", 0))
        # Also before the first step: the engine then says "0" for its version, and the way of the weights was tried.
        self._sync(step)
        self._weights_before = loaded.get("weights_before") or self._weights_hash(step)
        metrics.truncate_metrics(run.path, step)
        return step

    def _step(self, step: int) -> None:
        clock = _Clock()
        samples = self._sample(step)
        clock.lap("rollout")
        counts = grpo.assign_advantages(samples, self._config.training.normalize_advantages)
        result = self._trainers.train(
            [as_row(sample) for sample in samples], step + 1, self._tick(f"step {step + 1}: training")
        )
        for sample in samples:
            sample.train_log_probs = result["train_log_probs"].get(sample.index, [])
        clock.lap("train")
        dump.write_rollout(self._run.path, step, samples)
        self._sync(step + 1)
        clock.lap("sync")
        # The record comes before the checkpoint: what is resumed from is then complete, and anything newer is cut off.
        record = step_record(step, samples, counts, result, clock.seconds, self._config)
        metrics.append_metrics(self._run.path, record)
        if (step + 1) % self._config.training.save_interval == 0 or step + 1 == self._steps:
            self._save(step + 1)
        progress.report(
            f"step {step + 1}/{self._steps}: pass rate {record['pass_rate']:.2f}, mismatch {record['mismatch_mean'] or 0:.1e}, "
            f"{sum(clock.seconds.values()):.0f} s"
        )

    def _sample(self, step: int) -> list[Sample]:
        """The rollouts of one step, in order."""
        before = time.monotonic()

        def show(_seconds: float) -> None:
            self._engines.check()
            seen = cluster.ask(self._rollouts.progress.remote(), timeout=5) or {}
            rate = self._engines.throughput() or seen.get("tokens_per_second", 0.0)
            progress.report(f"step {step + 1}: rollouts, {rate:.0f} tok/s", seen.get("done", 0), seen.get("total"))

        rows = cluster.wait(
            [self._rollouts.generate.remote(step)],
            what=f"the rollouts of step {step + 1}",
            timeout=self._config.rollout.batch_timeout,
            error=RolloutError,
            on_tick=show,
        )[0]
        samples = [from_row(row) for row in rows]
        if not any(sample.usable for sample in samples):
            causes = sorted({sample.error for sample in samples if sample.error}) or ["no sampled tokens"]
            raise RolloutError(
                f"all {len(samples)} rollouts of step {step + 1} failed after {time.monotonic() - before:.0f} s: {causes[0]}",
                where=str(self._run.logs / "rollout.log"),
                next_step=f"{len(causes)} different cause(s); the log has all of them",
            )
        return self._with_training_reward(step, samples)

    def _with_training_reward(self, step: int, samples: list[Sample]) -> list[Sample]:
        if self._config.rollout.reward_control == "shuffle":
            return grpo.shuffled_rewards(samples, seed=self._config.rollout.rollout_seed + step)
        return samples

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
        self._trainers.save(self._run.checkpoints, step, {"step": step, "weights_before": self._weights_before})
        kept = sorted(self._run.checkpoints.glob("iter_*"))[-self._config.training.keep_checkpoints :]
        for old in self._run.checkpoints.glob("iter_*"):
            if old not in kept:
                shutil.rmtree(old, ignore_errors=True)

    def _weights_hash(self, version: int) -> str:
        return weights_hash(self._run.sync / f"v{version:06d}")

    def _tick(self, text: str) -> Any:
        def tick(seconds: float) -> None:
            self._engines.check()
            progress.report(text)

        return tick


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
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
    run = RunDir(run_dir)
    config = configuration.read(run.config)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, run.sync, ignore_errors=True)
        engines = stack.enter_context(engines_of(config, run))
        progress.report("starting Ray")
        stack.enter_context(cluster.local_cluster(config.training.num_gpus))
        figures = Loop(config, run, engines).run()
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(process.main_of_child(lambda: main(Path(sys.argv[1]))))
