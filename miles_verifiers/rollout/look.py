"""`python -m miles_verifiers.rollout.look TASKSET`: import an environment and load its taskset, whatever the Verifiers version.

TASKSET is the configuration's `environment.taskset` as JSON. Prints what was found as JSON; used after every install.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
from types import ModuleType
from typing import Any

from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.system import process


def main(taskset: dict[str, Any]) -> None:
    name = taskset_id(taskset)
    verifiers = loaders()
    try:
        module = verifiers.import_taskset(name)
    except Exception as error:  # whatever an environment's own code raises while it is imported
        raise _failed(f"{name} cannot be imported", error) from error
    refuse_classic(name, module)
    try:
        config = verifiers.taskset_config_type(name).model_validate(taskset)
        first = next(iter(verifiers.load_taskset(config).load()), None)
    except Exception as error:
        raise _failed(f"the taskset of {name} cannot be loaded", error) from error
    if first is None:
        raise EnvironmentPackageError(f"the taskset of {name} is empty", where=str(module.__file__))
    print(
        json.dumps({"id": name, "origin": str(module.__file__), "verifiers": importlib.metadata.version("verifiers")})
    )


def taskset_id(taskset: dict[str, Any]) -> str:
    """The `id` of a configuration's taskset. Raises EnvironmentPackageError unless it is the id of a package.

    An owner/name id would make Verifiers install from its hub, into this interpreter, in the middle of a run.
    """
    name = taskset.get("id")
    if not isinstance(name, str) or not name or "/" in name:
        raise EnvironmentPackageError(
            f"environment.taskset.id is {name!r}",
            where=f"interpreter {sys.executable}",
            next_step="give the id of an installed package",
        )
    return name


def loaders() -> ModuleType:
    """The module that Verifiers loads plugins with; 0.3 moved it."""
    try:
        return importlib.import_module("verifiers.v1.utils.loaders")
    except ModuleNotFoundError:
        return importlib.import_module("verifiers.v1.loaders")


def refuse_classic(name: str, module: ModuleType) -> None:
    """Raises EnvironmentPackageError for a package of the API that Verifiers had before tasksets.

    Such a package has a function `load_environment` and no taskset. Verifiers 0.2.x and 0.3.1 still run it beside the new API
    (`LegacyEnvServer`, verifiers/v1/legacy.py 0.2.0); 0.4.0 dropped it.
    """
    from verifiers.v1 import Taskset

    exported = [getattr(module, entry, None) for entry in getattr(module, "__all__", ())]
    if any(isinstance(entry, type) and issubclass(entry, Taskset) for entry in exported):
        return
    if callable(getattr(module, "load_environment", None)):
        raise EnvironmentPackageError(
            f"{name} is made for Verifiers' classic API (`load_environment`), which is not supported",
            where=str(module.__file__),
            next_step="take a release of the package that exports a taskset (verifiers.v1), or put its rows and its scoring "
            "into a taskset: environments/code_golf is one",
        )


def _failed(what: str, error: Exception) -> EnvironmentPackageError:
    return EnvironmentPackageError(
        f"{what}: {type(error).__name__}: {error}",
        where=f"interpreter {sys.executable}",
        next_step="mend the package, name what it lacks in its dependencies, or correct environment.taskset",
    )


if __name__ == "__main__":
    sys.exit(process.main_of_child(lambda: main(json.loads(sys.argv[1]))))
