"""The roles of a run and the venvs that they work in.

base    the image's Python, or the venv built from locks/stack-cpu.txt; never holds anything of ours
stack   over the base: this package, and what of its dependencies the base lacks; engine, trainer, conversion
env     over the base: Verifiers, renderers, the environment's package; rollouts
test    over the base: pytest; the tests that need torch
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from miles_verifiers import resources
from miles_verifiers.config import EnvironmentSection, RunConfig
from miles_verifiers.errors import ConfigError, EnvironmentPackageError, ProcessFailed
from miles_verifiers.process import run as run_child
from miles_verifiers.provision import venvs
from miles_verifiers.provision.stack import Interpreter, candidate_python, image_stack, probe

_BASE_BYTES = 9_000_000_000
_OVERLAY_BYTES = 1_000_000_000


class Roles:
    """Builds the venvs of one configuration, each at most once."""

    def __init__(self, gpus: int, cache: Path, *, log: Path, offline: bool = False) -> None:
        self._gpus, self._cache, self._log, self._offline = gpus, cache, log, offline
        self._base: Interpreter | None = None

    @classmethod
    def of(cls, config: RunConfig, cache: Path, *, log: Path, offline: bool = False) -> Roles:
        return cls(gpus_needed(config), cache, log=log, offline=offline)

    def base(self) -> Interpreter:
        """The interpreter that provides the stack."""
        if self._base is None:
            if self._gpus:
                self._base = image_stack(self._gpus)
            else:
                self._base = probe(venvs.python_of(self._ensure(base_recipe())))
        return self._base

    def stack(self) -> Path:
        """Python of the role `stack`."""
        base = self.base()
        return self._overlay(
            venvs.Recipe(
                "stack", base, below=base, locks=(locks() / "package.txt",), fill=True, disk_bytes=_OVERLAY_BYTES
            )
        )

    def env(self, environment: EnvironmentSection) -> Path:
        """Python of the role `env`, in which the environment's package was imported once."""
        return self._env("env", environment)

    def contract(self, environment: EnvironmentSection) -> Path:
        """Python of the role `contract`."""
        return self._env("contract", environment, locks() / "test.txt")

    def test(self) -> Path:
        """Python of the role `test`."""
        base = self.base()
        return self._overlay(
            venvs.Recipe("test", base, below=base, locks=(locks() / "test.txt",), fill=True, disk_bytes=_OVERLAY_BYTES)
        )

    def _env(self, role: str, environment: EnvironmentSection, *more: Path) -> Path:
        folder = environment_folder(environment.source)
        base = self.base()
        python = self._overlay(
            venvs.Recipe(
                role,
                base,
                below=base,
                locks=(environment_lock(environment.verifiers), *more),
                package=folder,
                excludes=locks() / "env.excludes",
                disk_bytes=_OVERLAY_BYTES,
                forbidden=tuple(_listed(locks() / "env.excludes")),
            )
        )
        self._import_environment(python, folder)
        return python

    def _ensure(self, recipe: venvs.Recipe) -> Path:
        return venvs.ensure(recipe, self._cache, log=self._log, offline=self._offline)

    def _overlay(self, recipe: venvs.Recipe) -> Path:
        return venvs.python_of(self._ensure(recipe))

    def _import_environment(self, python: Path, folder: Path) -> None:
        module = module_of(folder)
        try:
            run_child(
                [python, "-P", "-c", f"import {module}"],
                what=f"import {module}",
                timeout=120,
                log=self._log,
            )
        except ProcessFailed as error:
            raise EnvironmentPackageError(
                f"the environment {module} cannot be imported: {error.tail[-1] if error.tail else error.what}",
                where=f"{folder}, in {python}",
                next_step=f"mend the package, or name what it lacks in {folder / 'pyproject.toml'}; details: {self._log}",
            ) from None


def base_recipe() -> venvs.Recipe:
    return venvs.Recipe(
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


def environment_folder(source: str) -> Path:
    """The folder of an environment's package; a relative source is looked up in the project."""
    folder = Path(source).expanduser()
    if not folder.is_absolute():
        folder = resources.root() / folder
    if not (folder / "pyproject.toml").is_file():
        have = sorted(
            str(p.parent.relative_to(resources.root())) for p in resources.root().glob("environments/*/pyproject.toml")
        )
        raise EnvironmentPackageError(
            f"no environment package {source!r}: there is no pyproject.toml",
            where=str(folder),
            next_step=f"name a folder with a Python project in environment.source; the project has: {', '.join(have)}",
        )
    return folder.resolve()


def module_of(folder: Path) -> str:
    """The module that an environment's project installs: by Verifiers' convention its name with underscores."""
    try:
        name = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, KeyError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EnvironmentPackageError(
            f"the environment's pyproject.toml has no readable project.name ({error})", where=str(folder)
        ) from None
    return venvs.normalised(str(name)).replace("-", "_")


def _listed(file: Path) -> list[str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [venvs.normalised(line.strip()) for line in lines if line.strip() and not line.startswith("#")]
