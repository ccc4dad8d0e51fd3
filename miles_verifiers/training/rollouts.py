"""The rollout workers of a run, one Ray actor for each environment, each in its own interpreter, driven as one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import RolloutError
from miles_verifiers.record.rundir import RunDir, env_role
from miles_verifiers.record.samples import Sample, from_row
from miles_verifiers.rollout.mixing import Mixer
from miles_verifiers.rollout.worker import RolloutWorker
from miles_verifiers.training import cluster
from miles_verifiers.training.steps import StepRollouts, merged

Tick = Callable[[float], None]
GRACE_S = 60.0
"""Workers end their rollouts at a deadline of their own; this is for stopping children and aborting requests after it."""


class Rollouts:
    """`log` names the workers' log files in the run directory."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDir,
        model: Path,
        engine_urls: Sequence[str],
        vocab_size: int,
        log: str = "rollout",
    ) -> None:
        self._config = config
        self._labels = [environment.label for environment in config.all_environments]
        self._mixer = Mixer([environment.weight for environment in config.all_environments])
        self._actors = [
            cluster.start_actor(
                RolloutWorker,
                config.of_environment(number).model_dump(),
                str(model),
                list(engine_urls),
                vocab_size,
                str(run.logs / (f"{log}.log" if number == 0 else f"{log}-{number}.log")),
                python=run.python(env_role(number)),
                pass_variables=environment.pass_variables,
            )
            for number, environment in enumerate(config.all_environments)
        ]

    def wait_ready(self, on_tick: Tick = lambda _seconds: None, timeout: float | None = None) -> list[dict[str, Any]]:
        """What each worker's interpreter says of itself (RolloutWorker.preflight)."""
        return cluster.wait(
            [actor.preflight.remote() for actor in self._actors],
            what="starting the rollout worker",
            timeout=timeout or self._config.rollout.setup_timeout,
            error=RolloutError,
            on_tick=on_tick,
        )

    def sample(self, step: int, cursors: dict[str, Any], on_tick: Tick) -> StepRollouts:
        """The groups of a step, those of several environments mixed by weight; `cursors` by environment."""
        batch = self._config.rollout.rollout_batch_size
        slots = self._mixer.slots(step * batch, batch)
        asked = {number: slots.count(number) for number in range(len(self._actors)) if number in slots}
        answers = cluster.wait(
            [
                self._actors[number].generate.remote(step, cursors.get(self._labels[number]), want)
                for number, want in asked.items()
            ],
            what=f"the rollouts of step {step + 1}",
            timeout=self._config.rollout.batch_timeout + GRACE_S,
            error=RolloutError,
            on_tick=on_tick,
        )
        return merged(slots, dict(zip(asked, answers, strict=True)), self._labels, cursors)

    def evaluate(self, step: int, on_tick: Tick) -> tuple[dict[str, list[Sample]], dict[str, int]]:
        """Samples of the evaluation before `step` by environment, and rollouts by what went wrong with them."""
        answers = cluster.wait(
            [actor.evaluate.remote(step) for actor in self._actors],
            what=f"the evaluation before step {step + 1}",
            timeout=self._config.rollout.eval_timeout + GRACE_S,
            error=RolloutError,
            on_tick=on_tick,
        )
        samples = {
            label: [from_row(row) for row in answer["rows"]]
            for label, answer in zip(self._labels, answers, strict=True)
        }
        causes: Counter[str] = Counter()
        for answer in answers:
            causes.update(answer["causes"])
        return samples, dict(causes)

    def progress(self) -> dict[str, float]:
        """Of the step in work, all workers together; empty where none answers at once."""
        total: Counter[str] = Counter()
        for actor in self._actors:
            total.update(cluster.ask(actor.progress.remote(), timeout=5) or {})
        return dict(total)
