"""A run as verification sees it: everything that its directory holds, loaded as far as it can be read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import ConfigError, MilesVerifiersError
from miles_verifiers.record.dump import Kind, read_rollout, rollout_files
from miles_verifiers.record.manifest import Manifest
from miles_verifiers.record.metrics import load_metrics
from miles_verifiers.record.rundir import RunDir
from miles_verifiers.record.samples import Sample, TokenSequence
from miles_verifiers.system.progress import report


@dataclass(frozen=True, slots=True)
class Rollout:
    """One file of samples."""

    step: int
    name: str
    """The file, relative to the run directory."""
    samples: list[Sample]

    def placed(self) -> Iterator[tuple[str, Sample]]:
        """Every sample with its place, for findings; rows count from 0."""
        for number, sample in enumerate(self.samples):
            yield f"{self.name} row {number}", sample

    def groups(self) -> dict[int, list[Sample]]:
        """The samples by group index, in order of appearance."""
        groups: dict[int, list[Sample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.group_index, []).append(sample)
        return groups


@dataclass(slots=True)
class Run:
    folder: Path
    config: RunConfig
    rollouts: list[Rollout] = field(default_factory=list)
    """The files that could be read, in order of their steps."""
    evaluations: list[Rollout] = field(default_factory=list)
    """The files of dump/eval."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """Records of training steps."""
    eval_metrics: list[dict[str, Any]] = field(default_factory=list)
    """Records of evaluations."""
    manifest: Manifest | None = None
    vocab_size: int | None = None
    """Token ids of the run's model are below it; None where the model's configuration cannot be read."""
    torn: str = ""
    """What an interruption left of the last line of metrics.jsonl."""
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """(where, message) of what could not be read."""

    @classmethod
    def load(cls, run_dir: Path, config: RunConfig | None = None, *, vocab_size: int | None = None) -> Self:
        """Raises ConfigError where `run_dir` is no directory, or has no configuration and none is given."""
        if not run_dir.is_dir():
            raise ConfigError("no such run directory", where=str(run_dir), next_step="name the directory of a run")
        run = cls(run_dir, config or loading.read(RunDir(run_dir).config), vocab_size=vocab_size)
        run._load_rollouts()
        run._load_metrics()
        run._load_manifest()
        if vocab_size is None:
            run._load_vocab_size()
        return run

    @property
    def ran_out(self) -> bool:
        """Whether the run ended because its tasks did."""
        return bool(self.metrics) and self.metrics[-1].get("ending") == "tasks ran out"

    @property
    def num_steps(self) -> int:
        """Steps that the run has to have."""
        configured = self.config.training.num_steps
        return min(configured, self.metrics[-1]["step"] + 1) if self.ran_out else configured

    def samples(self) -> Iterator[tuple[str, Sample]]:
        """Every sample of the run with its place."""
        for rollout in self.rollouts:
            yield from rollout.placed()

    def groups(self) -> Iterator[tuple[str, list[Sample]]]:
        """Every group of the run with its place."""
        for rollout in self.rollouts:
            for index, samples in rollout.groups().items():
                yield f"{rollout.name} group {index}", samples

    def metrics_of(self, step: int) -> dict[str, Any] | None:
        """The first record of a step."""
        return next((record for record in self.metrics if record["step"] == step), None)

    def passed(self, sample: Sample) -> bool:
        """Whether the rollout succeeded, by the metric that the configuration names."""
        return sample.metrics.get(self.config.verify.pass_metric) == 1

    def _load_rollouts(self) -> None:
        kinds: tuple[tuple[Kind, list[Rollout]], ...] = (("rollout", self.rollouts), ("eval", self.evaluations))
        for kind, loaded in kinds:
            files = rollout_files(self.folder, kind)
            for done, (step, path) in enumerate(files.items(), start=1):
                name = path.relative_to(self.folder).as_posix()
                try:
                    loaded.append(Rollout(step, name, read_rollout(path)))
                except MilesVerifiersError as error:
                    self.unreadable.append((name, error.what))
                report("reading the dump", done, len(files))

    def _load_metrics(self) -> None:
        try:
            file = load_metrics(self.folder)
            self.metrics, self.torn, self.eval_metrics = file.records, file.torn, file.evaluations
        except MilesVerifiersError as error:
            self.unreadable.append(("metrics.jsonl", f"{error.what} ({Path(error.where).name})"))

    def _load_manifest(self) -> None:
        try:
            self.manifest = Manifest.load(self.folder)
        except MilesVerifiersError as error:
            self.unreadable.append(("manifest.json", error.what))

    def _load_vocab_size(self) -> None:
        path = RunDir(self.folder).model(self.config.model.source) / "config.json"
        try:
            self.vocab_size = _vocab_size(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            self.unreadable.append((path.relative_to(self.folder).as_posix(), f"no vocabulary size: {error}"))


def sequences(samples: Iterable[tuple[str, Sample]]) -> Iterator[tuple[str, Sample, TokenSequence]]:
    """Every token sequence of placed samples, with its place and its sample; forks count from 1."""
    for where, sample in samples:
        for number, sequence in enumerate(sample.sequences):
            yield (f"{where} fork {number}" if number else where), sample, sequence


def _vocab_size(model: Any) -> int:
    """From a Hugging Face config.json; models with more than text keep it in `text_config`."""
    tables = (model, model.get("text_config")) if isinstance(model, dict) else ()
    for table in tables:
        if isinstance(table, dict) and isinstance(table.get("vocab_size"), int):
            return int(table["vocab_size"])
    raise ValueError("it has no vocab_size")
