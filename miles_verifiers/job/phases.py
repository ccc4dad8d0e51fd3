"""The job as a list of phases: prepare -> convert -> train -> verify.

A phase is finished once per fingerprint of its inputs, and the manifest remembers: a run that was stopped goes on at its
first unfinished phase. What needs torch runs as a child in the run's `stack` interpreter, by the commands of `plan`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout
from pydantic import JsonValue

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import HostError, InputError
from miles_verifiers.job.plan import Command, convert_command, preflight_command, train_command
from miles_verifiers.provision import environments, expectations
from miles_verifiers.provision import fingerprint as fingerprints
from miles_verifiers.provision.models.sources import check_model_folder, ensure_model, parse_source
from miles_verifiers.provision.roles import Roles, environment_lock, gpus_needed, megatron_folder
from miles_verifiers.provision.stack import image_stack
from miles_verifiers.record.manifest import Manifest, PhaseRecord, fingerprint, manifest_path
from miles_verifiers.record.rundir import RunDir, env_role
from miles_verifiers.system import console, environ, files, memory, process, progress
from miles_verifiers.system.temporary import short_folder
from miles_verifiers.verify import Report, verify

PHASES = ("prepare", "convert", "train", "verify")
_RUN_BYTES = 4_000_000_000
"""A run with a model of 135 M parameters in float32: torch_dist, checkpoints with Adam's state, weights on their way."""


class Job:
    """One run directory and what is done in it. Use within `opened`."""

    def __init__(self, config: RunConfig, run: RunDir, cache: Path, manifest: Manifest, *, offline: bool) -> None:
        self.config, self.run, self.cache, self.manifest = config, run, cache, manifest
        self._offline = offline

    def prepare(self) -> None:
        """Venvs, the environment's package, the model, and a look from inside workers. Idempotent."""
        before = self.manifest.phases.get("prepare")
        with console.phase("prepare", self.run.log), self._recorded("prepare", fingerprint(self.config)) as finish:
            roles = Roles.of(self.config, self.cache, log=self.run.log, offline=self._offline)
            self.manifest.stack = fingerprints.marks(roles.base())
            pythons = {"stack": roles.stack()}
            expected = [roles.expected_stack(pythons["stack"])]
            for number, environment in enumerate(self.config.all_environments):
                role = env_role(number)
                pythons[role] = roles.env(environment)
                expected.append(roles.expected_env(role, pythons[role], environment))
            source = parse_source(self.config.model.source)
            model = ensure_model(source, cache=self.cache, stack_python=pythons["stack"], offline=self._offline)
            for role, python in pythons.items():
                _link(self.run.path / "venvs" / role, python.parent.parent)
            _link(self.run.model(self.config.model.source), model)

            expectations.write(self.run.expected, expected)
            made: list[JsonValue] = [*(python.parent.parent.name for python in pythons.values()), model.name]
            if before is not None and before.finished and before.figures.get("made") == made:
                figures = before.figures  # nothing changed since the workers were looked at
            else:
                figures = {"made": made, "preflight": json.loads(self._child(preflight_command(self.run)))}
            finish(", ".join(map(str, made)), figures)

    def convert(self) -> None:
        """Hugging Face checkpoint -> Megatron torch_dist, with the parity to transformers."""
        self._needs("prepare")
        target = self.run.torch_dist(self.config.model.source)
        inputs = fingerprint(self.config.model, self.config.training.tensor_model_parallel_size, self._model())
        if self.manifest.is_done("convert", inputs) and target.is_dir():
            return
        with console.phase("convert", self.run.log), self._recorded("convert", inputs) as finish:
            figures = json.loads(self._child(convert_command(self.config, self.run)))
            finish(str(target.relative_to(self.run.path)), figures)

    def train(self) -> None:
        """Rollouts, GRPO steps, weights into the engine, dump; resumes at the last checkpoint."""
        self._needs("convert")
        inputs = fingerprint(self.config)
        if self.manifest.is_done("train", inputs):
            return
        with console.phase("train", self.run.log), self._recorded("train", inputs) as finish, memory.peak() as peak:
            figures = json.loads(self._child(train_command(self.config, self.run)))
            for when, digest in figures.pop("weights").items():
                self.manifest.record_weights(when, digest)
            finish(figures.pop("made"), {**figures, "peak_memory_gb": round(peak.bytes / 1e9, 2)})

    def verify(self) -> Report:
        """Every rule over the dump. Raises VerificationFailed when one does not hold; that too finishes the run."""
        with console.phase("verify", self.run.log), self._recorded("verify", fingerprint(self.config)) as finish:
            report = verify(self.run.path, self.config)
            finish(report.summary, {"passed": report.ok, **report.figures})
        report.raise_if_failed()
        return report

    def summary(self) -> None:
        """The closing table."""
        rows = [
            [name, f"{record.seconds or 0:.1f}", record.made]
            for name, record in self.manifest.phases.items()
            if record.finished is not None
        ]
        console.table("", ["phase", "seconds", "what was made"], rows)
        console.out.print(f"run directory: {self.run.path}")

    def _model(self) -> str:
        return str(self.run.model(self.config.model.source).resolve())

    def _child(self, command: Command) -> str:
        """Run one of the plan's commands; its last line is its result as JSON."""
        with short_folder() as temporary:
            # Whatever a library leaves in a temporary folder or in a cache of its own is gone with this one.
            env = environ.without_secrets(process.child_environment()) | command.environment
            passed = {name for each in self.config.all_environments for name in each.pass_variables}
            env |= {name: os.environ[name] for name in passed if name in os.environ}
            env |= {"TMPDIR": temporary, "SGLANG_CACHE_DIR": temporary}
            lines = process.run(
                command.argv, what=command.what, timeout=command.timeout, log=self.run.log, env=env, cwd=self.run.path
            )
        return lines[-1] if lines else "{}"

    @contextmanager
    def _recorded(self, phase: str, inputs: str) -> Iterator[Callable[[str, dict[str, Any]], PhaseRecord]]:
        self.manifest.begin(phase, inputs)
        progress.report("starting")
        yield lambda made, figures: self.manifest.finish(phase, made=made, figures=figures)

    def _needs(self, phase: str) -> None:
        record = self.manifest.phases.get(phase)
        if record is None or record.finished is None:
            getattr(self, phase)()


@contextmanager
def opened(config: RunConfig, run: RunDir, cache: Path, *, offline: bool = False) -> Iterator[Job]:
    """The job of `run`, which is made if it is not there; held by one process at a time.

    Raises InputError where the machine cannot run the configuration or the folder cannot be used, before anything is made.
    """
    source = parse_source(config.model.source)
    if source.scheme == "path":
        check_model_folder(Path(source.name).expanduser())
    for environment in config.all_environments:
        environments.parse(environment.source)
        environment_lock(environment.verifiers)
    if config.training.megatron_path is not None:
        megatron_folder(config.training.megatron_path)
    if gpus_needed(config):
        image_stack(gpus_needed(config))
    if manifest_path(run.path).exists():
        manifest = Manifest.load(run.path)
        if manifest.config_hash != fingerprint(config):
            raise InputError(
                "the run directory belongs to another configuration",
                where=str(run.config),
                next_step="take another --run-dir, or leave --run-dir out: a new one is made",
            )
    _make(run)
    with _held(run):
        if not manifest_path(run.path).exists():
            _check_disk(run.path)
            files.write_text(run.config, tomli_w.dumps(config.model_dump(exclude_none=True)))
            Manifest.create(run.path, profile=config.profile, config_hash=fingerprint(config))
        yield Job(config, run, cache, Manifest.load(run.path), offline=offline)


def choose_run_dir(config: RunConfig, root: Path) -> RunDir:
    """The unfinished run of this configuration below `root`, else the next free number."""
    for number in range(1, 1_000_000):
        run = RunDir(root / f"{config.profile}-{number:03d}")
        if not run.path.exists():
            return run
        if manifest_path(run.path).exists():
            manifest = Manifest.load(run.path)
            done = manifest.phases.get("verify")
            if manifest.config_hash == fingerprint(config) and (done is None or done.finished is None):
                return run
    raise HostError("there are a million runs", where=str(root), next_step="remove old ones")


def newest_run(root: Path) -> RunDir:
    """The run that was worked on last."""
    runs = sorted(root.glob("*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not runs:
        raise InputError("there is no run yet", where=str(root), next_step="make one: miles-verifiers e2e")
    return RunDir(runs[-1].parent)


@contextmanager
def _held(run: RunDir) -> Iterator[None]:
    lock = FileLock(run.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise HostError(
            "another process is working in this run directory",
            where=str(run.path),
            next_step="wait for it, or take another --run-dir",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _make(run: RunDir) -> None:
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        run.lock.touch()
    except OSError as error:
        raise HostError(
            f"the run directory cannot be written: {error.strerror}",
            where=str(run.path),
            next_step="name another one with --run-dir",
        ) from None


def _check_disk(path: Path) -> None:
    free = shutil.disk_usage(path).free
    if free < _RUN_BYTES:
        raise HostError(
            f"a run needs about {_RUN_BYTES / 1e9:.0f} GB, {free / 1e9:.1f} GB are free",
            where=str(path),
            next_step="free some, or name another disk with --run-dir",
        )


def _link(link: Path, target: Path) -> None:
    """Point `link` at `target`, replacing an older link whole."""
    link.parent.mkdir(parents=True, exist_ok=True)
    aside = link.with_name(f".{link.name}.new")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)
