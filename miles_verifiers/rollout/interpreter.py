"""What the environment's interpreter holds: Verifiers of the configured version, and modules from where they should be."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from miles_verifiers.errors import EnvironmentPackageError

Api = Literal["episodes", "env"]
SUPPORTED: dict[str, Api] = {"0.2.0": "episodes", "0.2.1": "episodes", "0.3.1": "env", "0.4.0": "env"}
"""Verifiers versions that the rollouts were seen to work with, and which of its two APIs each has."""
_MODULES = ("verifiers", "renderers", "openai", "transformers")
_OFFLINE = {
    # Models are local folders by now; a name that is none would be retried on the hub for minutes.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def go_offline() -> None:
    """Let nothing be fetched by name; before huggingface_hub is imported. A variable that is set already stays as it is."""
    for name, value in _OFFLINE.items():
        os.environ.setdefault(name, value)


def check_verifiers(configured: str) -> Api:
    """The API of the configured Verifiers. Raises EnvironmentPackageError unless it is supported and installed here."""
    try:
        installed = version("verifiers")
    except PackageNotFoundError:
        installed = "none"
    supported = f"supported: {', '.join(SUPPORTED)}"
    if configured not in SUPPORTED:
        raise EnvironmentPackageError(
            f"verifiers {configured} is not supported",
            where="environment.verifiers",
            next_step=f"set environment.verifiers to one of those that are {supported}",
        )
    if installed != configured:
        raise EnvironmentPackageError(
            f"verifiers {configured} is configured, {installed} is installed",
            where=f"environment.verifiers, interpreter {sys.executable}",
            next_step=f"{supported}; the interpreter must be made from that version's lock",
        )
    return SUPPORTED[configured]


def stdlib() -> list[str]:
    """Where besides site-packages an import path may lead: the standard library, Ray's own, and an empty working folder."""
    paths = sysconfig.get_paths()
    base = Path(paths["stdlib"])
    zipped = base.parent / f"python{sys.version_info.major}{sys.version_info.minor}.zip"
    ray = [str(Path(found.origin).parent)] if (found := importlib.util.find_spec("ray")) and found.origin else []
    here = [str(Path.cwd())] if not any(Path.cwd().iterdir()) else []
    return [str(base), paths["platstdlib"], str(zipped), *ray, *here]


def origins() -> dict[str, dict[str, str]]:
    """Version and file of each module that matters, as imported, which is not always what was asked for."""
    modules = {name: importlib.import_module(name) for name in _MODULES}
    return {name: {"version": version(name), "origin": str(module.__file__)} for name, module in modules.items()}
