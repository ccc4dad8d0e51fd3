"""The roles of a run and the venvs that they work in.

base    the image's Python, or the venv built from locks/stack-cpu.txt; never holds anything of ours
stack   over the base: this package, and what of its dependencies the base lacks; engine, trainer, conversion
env     over the base: Verifiers, renderers, the environment's package; rollouts
test    over the base: pytest; the tests that need torch
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from miles_verifiers.config.settings import EnvironmentSection, RunConfig
from miles_verifiers.errors import ConfigError, HostError
from miles_verifiers.provision import environments, venvs
from miles_verifiers.provision.expectations import Expected
from miles_verifiers.provision.install import TRIED
from miles_verifiers.provision.looks import look_at
from miles_verifiers.provision.recipes import Recipe, locked_versions, normalised
from miles_verifiers.provision.stack import Interpreter, candidate_python, check_version, image_stack, probe
from miles_verifiers.system import resources

_BASE_BYTES = 9_000_000_000
_OVERLAY_BYTES = 1_000_000_000


class Roles:
    """Builds the venvs of one configuration, each at most once."""

    def __init__(
        self, gpus: int, cache: Path, *, log: Path, offline: bool = False, megatron: str | None = None
    ) -> None:
        self._gpus, self._cache, self._log, self._offline, self._megatron = gpus, cache, log, offline, megatron
        self._base: Interpreter | None = None

    @classmethod
    def of(cls, config: RunConfig, cache: Path, *, log: Path, offline: bool = False) -> Roles:
        megatron = config.training.megatron_path
        return cls(gpus_needed(config), cache, log=log, offline=offline, megatron=megatron)

    def base(self) -> Interpreter:
        """The interpreter that provides the stack."""
        if self._base is None:
            image = image_stack(self._gpus) if self._gpus else probe(candidate_python())
            check_version(image)
            # Also without GPUs: where an image provides the stack, a second one would be 6 GB for nothing.
            self._base = probe(venvs.python_of(self._ensure(base_recipe()))) if image.missing else image
        return self._base

    def stack(self) -> Path:
        """Python of the role `stack`."""
        base = self.base()
        return self._overlay(
            Recipe(
                "stack",
                base,
                below=base,
                frozen=self._frozen(),
                locks=(locks() / "package.txt",),
                fill=True,
                first=(megatron_folder(self._megatron),) if self._megatron else (),
                disk_bytes=_OVERLAY_BYTES,
            )
        )

    def env(self, environment: EnvironmentSection) -> Path:
        """Python of the role `env`, in which the environment's taskset was loaded once."""
        return self._env("env", environment)

    def contract(self, environment: EnvironmentSection) -> Path:
        """Python of the role `contract`: that of `env`, with pytest and the public environments of the tests."""
        return self._env("contract", environment, locks() / "test.txt", locks() / "publics.txt")

    def expected_stack(self, python: Path) -> Expected:
        """What a worker of the role `stack`, whose interpreter is `python`, should see."""
        first = (megatron_folder(self._megatron),) if self._megatron else ()
        return Expected("stack", python, self.base().stack_versions, frozenset(), self.base().site_packages, first)

    def expected_env(self, role: str, python: Path, environment: EnvironmentSection) -> Expected:
        """What a worker of `role`, one of the run's environments whose interpreter is `python`, should see."""
        locked = locked_versions(environment_lock(environment.verifiers))
        versions = {name: version for name, version in locked.items() if name in TRIED}
        own = frozenset({*TRIED, "openai", *_names(environment.allow_shadow)})
        return Expected(role, python, self.base().stack_versions | versions, own, self.base().site_packages)

    def test(self) -> Path:
        """Python of the role `test`."""
        base = self.base()
        return self._overlay(
            Recipe(
                "test",
                base,
                below=base,
                frozen=self._frozen(),
                locks=(locks() / "test.txt",),
                fill=True,
                disk_bytes=_OVERLAY_BYTES,
            )
        )

    def _env(self, role: str, environment: EnvironmentSection, *more: Path) -> Path:
        base = self.base()
        package = environments.resolve(environment, self._cache, log=self._log, offline=self._offline)
        python = self._overlay(
            Recipe(
                role,
                base,
                below=base,
                frozen=self._frozen(),
                locks=(environment_lock(environment.verifiers), *more),
                package=package,
                protected=protected(),
                exclude=_names(environment.exclude),
                allow_shadow=_names(environment.allow_shadow),
                disk_bytes=_OVERLAY_BYTES,
            )
        )
        look_at(environment, package, python, log=self._log, offline=self._offline)
        return python

    def _frozen(self) -> bool:
        return not self.base().executable.is_relative_to(self._cache)

    def _ensure(self, recipe: Recipe) -> Path:
        return venvs.ensure(recipe, self._cache, log=self._log, offline=self._offline)

    def _overlay(self, recipe: Recipe) -> Path:
        return venvs.python_of(self._ensure(recipe))


def base_recipe() -> Recipe:
    return Recipe(
        "stack-cpu",
        probe(candidate_python()),
        locks=(locks() / "stack-cpu.txt",),
        with_ourselves=False,
        disk_bytes=_BASE_BYTES,
    )


def gpus_needed(config: RunConfig) -> int:
    engines = config.engine.num_engines * config.engine.gpus_per_engine if config.engine.device == "cuda" else 0
    trainers = config.training.num_gpus
    return max(engines, trainers) if config.training.colocate else engines + trainers


def locks() -> Path:
    return resources.root() / "locks"


def environment_lock(verifiers: str) -> Path:
    path = locks() / f"env-verifiers-{verifiers}.txt"
    if not path.is_file():
        known = sorted(p.stem.removeprefix("env-verifiers-") for p in locks().glob("env-verifiers-*.txt"))
        raise ConfigError(
            f"no lock for Verifiers {verifiers}",
            where=str(path),
            next_step=f"set environment.verifiers to one of: {', '.join(known)}",
        )
    return path


def protected() -> tuple[str, ...]:
    """What the stack provides and pins, and no environment's venv may hold."""
    return _names((locks() / "env.excludes").read_text(encoding="utf-8").splitlines())


def megatron_folder(text: str) -> Path:
    """A Megatron-LM checkout, as `training.megatron_path` names it. Raises HostError where it is none."""
    folder = Path(text).expanduser().resolve()
    if not (folder / "megatron" / "core" / "__init__.py").is_file():
        raise HostError(
            "not a Megatron-LM checkout: there is no megatron/core/__init__.py",
            where=str(folder),
            next_step="name the folder that holds `megatron`, in MILES_E2E_MEGATRON_PATH or training.megatron_path",
        )
    return folder


def _names(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(normalised(line.strip()) for line in lines if line.strip() and not line.startswith("#"))
