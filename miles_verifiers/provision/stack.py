"""The stack: which interpreter provides torch, SGLang, Megatron-core and Ray on this machine, and what else it has.

On a GPU image it is the image's Python, which is never written to. Elsewhere it is a venv that we build from
locks/stack-cpu.txt. Either way other venvs are laid over it, and all that they need to know is in `Stack`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from miles_verifiers.errors import ComponentError, HostError
from miles_verifiers.system.process import child_environment

STACK_PYTHON_VARIABLE = "MILES_VERIFIERS_STACK_PYTHON"
SUPPORTED = ((3, 11), (3, 13))
"""First and last Python that the locks hold for."""
REQUIRED = ("torch", "sglang", "megatron-core", "ray", "transformers")

# Runs in the interpreter that is looked at: no import of ours, no import of anything heavy.
_PROBE = """
import importlib.metadata as m, json, site, sys, sysconfig, os
dists = {}
for d in m.distributions():
    name = (d.metadata["Name"] or "").lower().replace("_", "-").replace(".", "-")
    dists.setdefault(name, d.version)
stdlib = sysconfig.get_path("stdlib")
paths = [p for p in site.getsitepackages() if os.path.isdir(p)]
print(json.dumps(dict(executable=sys.executable, version=list(sys.version_info[:3]), prefix=sys.prefix,
    base_prefix=sys.base_prefix, site_packages=paths, distributions=dists,
    externally_managed=os.path.exists(os.path.join(stdlib, "EXTERNALLY-MANAGED")))))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """What a Python says of itself."""

    executable: Path
    version: tuple[int, int, int]
    prefix: Path
    is_venv: bool
    externally_managed: bool
    site_packages: tuple[Path, ...]
    distributions: dict[str, str]
    """Version by normalised name."""

    @property
    def missing(self) -> list[str]:
        """What it lacks to be a stack."""
        return [name for name in REQUIRED if name not in self.distributions]

    @property
    def stack_versions(self) -> dict[str, str]:
        return {name: self.distributions[name] for name in REQUIRED if name in self.distributions}


def probe(python: Path, timeout: float = 60) -> Interpreter:
    """Ask an interpreter. Raises ComponentError when it does not run or does not answer within `timeout` seconds."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-B", "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=child_environment(),
            check=True,
        )
        answer = json.loads(done.stdout)
    except FileNotFoundError:
        raise ComponentError("no such Python interpreter", where=str(python)) from None
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        detail = getattr(error, "stderr", None) or str(error)
        raise ComponentError(f"the Python interpreter does not work: {str(detail)[-500:]}", where=str(python)) from None
    return Interpreter(
        executable=Path(answer["executable"]),
        version=tuple(answer["version"]),
        prefix=Path(answer["prefix"]),
        is_venv=answer["prefix"] != answer["base_prefix"],
        externally_managed=answer["externally_managed"],
        site_packages=tuple(Path(p) for p in answer["site_packages"]),
        distributions=answer["distributions"],
    )


def candidate_python() -> Path:
    """The interpreter that may be the image's: what the user names, else the one below the venv that runs us.

    Raises HostError where the user names none.
    """
    named = os.environ.get(STACK_PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise HostError(
                "no such Python interpreter", where=f"{STACK_PYTHON_VARIABLE}={named}", next_step="correct or unset it"
            )
        return Path(named)
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


def check_version(python: Interpreter) -> None:
    """Raises HostError for a Python that the locks are not made for."""
    if not SUPPORTED[0] <= python.version[:2] <= SUPPORTED[1]:
        low, high = (".".join(map(str, each)) for each in SUPPORTED)
        raise HostError(
            f"Python {'.'.join(map(str, python.version))} cannot be used: {low} to {high} can",
            where=str(python.executable),
            next_step=f"name another one in {STACK_PYTHON_VARIABLE}",
        )


def find_gpus() -> list[str]:
    """Device files of NVIDIA GPUs; found without torch, which the CLI's interpreter does not have."""
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def pick_profile() -> tuple[str, str]:
    """Name of the profile that fits this machine, and why."""
    gpus = find_gpus()
    if not gpus:
        return "cpu", "no GPU"
    missing = probe(candidate_python()).missing
    if missing:
        return "cpu", f"{len(gpus)} GPU(s), but {candidate_python()} lacks {', '.join(missing)}"
    return "h200-2gpu", f"{len(gpus)} GPU(s) and the stack in {candidate_python()}"


def image_stack(gpus_needed: int) -> Interpreter:
    """The image's interpreter, for a profile that uses GPUs. Raises HostError that lists all that is missing."""
    python = candidate_python()
    found = probe(python)
    gpus = find_gpus()
    lacks = []
    if len(gpus) < gpus_needed:
        lacks.append(f"{gpus_needed} NVIDIA GPU(s) ({len(gpus)} found)")
    if found.missing:
        lacks.append(f"the packages {', '.join(found.missing)} in {python}")
    if lacks:
        raise HostError(
            "this machine lacks what the profile needs: " + "; ".join(lacks),
            where=str(python),
            next_step=f"start in the GPU image, name its Python in {STACK_PYTHON_VARIABLE}, or use --profile cpu",
        )
    return found
