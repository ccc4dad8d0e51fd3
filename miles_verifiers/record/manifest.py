"""manifest.json: what a run is made of and how far it came. A leaf.

    {"format": 1, "created": "2025-01-31T12:00:00Z", "profile": "cpu", "config_hash": "9f...", "stack": {"torch": "2.14.1"},
     "phases": {"convert": {"fingerprint": "3c...", "started": "...", "finished": "...", "seconds": 8.1, "made": "models/x"}},
     "weights": {"before": "a1...", "after": "b2..."}}

A phase counts as done only under the fingerprint that it was done with, so a changed input runs it again. Every change is on
disk when the method that made it returns; times are UTC in ISO 8601.
"""

from __future__ import annotations

import hashlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, PrivateAttr, ValidationError

from miles_verifiers.errors import ConfigError
from miles_verifiers.system.files import write_text

FORMAT = 1
WEIGHTS_BEFORE = "before"
"""Key of `Manifest.weights`: hash of the weights that training started from."""
WEIGHTS_AFTER = "after"
"""Key of `Manifest.weights`: hash of the weights that training ended with."""


def manifest_path(run_dir: Path) -> Path:
    return run_dir / "manifest.json"


def fingerprint(*parts: Any) -> str:
    """SHA-256 (hex) over plain values, paths and pydantic models, independent of the order of keys."""

    def plain(value: Any) -> Any:
        if isinstance(value, BaseModel):
            return value.model_dump(mode="json")
        if isinstance(value, Path):
            return str(value)
        raise TypeError(f"a {type(value).__name__} has no fingerprint")

    text = json.dumps(parts, sort_keys=True, allow_nan=False, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode()).hexdigest()


class PhaseRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    """Hash of everything that the phase depends on."""
    started: str
    finished: str | None = None
    """None while the phase runs, and for ever where it was interrupted."""
    seconds: float | None = None
    made: str = ""
    """What the phase left, in a few words or as a path."""
    figures: dict[str, JsonValue] = Field(default_factory=dict)
    """What the phase measured: sizes, parity, rates."""


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    created: str
    profile: str
    config_hash: str
    stack: dict[str, str] = Field(default_factory=dict)
    """Versions (or other marks) of what the run stands on, by name."""
    phases: dict[str, PhaseRecord] = Field(default_factory=dict)
    weights: dict[str, str] = Field(default_factory=dict)
    """Hashes of the model's weights, by when: WEIGHTS_BEFORE and WEIGHTS_AFTER."""

    _run_dir: Path = PrivateAttr()
    _begun: dict[str, float] = PrivateAttr(default_factory=dict)

    @classmethod
    def create(cls, run_dir: Path, *, profile: str, config_hash: str, stack: dict[str, str] | None = None) -> Self:
        """Starts the manifest of a run and writes it; an older one is replaced."""
        manifest = cls(created=_now(), profile=profile, config_hash=config_hash, stack=stack or {})
        manifest._run_dir = run_dir
        manifest.save()
        return manifest

    @classmethod
    def load(cls, run_dir: Path) -> Self:
        """Raises ConfigError where the file is missing, damaged, or of a newer format."""
        path = manifest_path(run_dir)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                "not a run directory: it has no manifest.json", where=str(run_dir), next_step="name a run's directory"
            ) from None
        except (OSError, ValueError) as error:
            raise _unusable(f"the manifest cannot be read: {error}", path) from error
        _check_format(document, path)
        try:
            manifest = cls.model_validate(document)
        except ValidationError as error:
            fields = sorted({".".join(map(str, problem["loc"])) for problem in error.errors()})
            raise _unusable(f"the manifest is damaged at: {', '.join(fields)}", path) from None
        manifest._run_dir = run_dir
        return manifest

    def save(self) -> None:
        """Writes the manifest, whole or not at all."""
        write_text(manifest_path(self._run_dir), self.model_dump_json(indent=2) + "\n")

    def begin(self, phase: str, fingerprint: str) -> None:
        """Records that `phase` starts now; what an earlier attempt left in the record is forgotten."""
        self._begun[phase] = time.monotonic()
        self.phases[phase] = PhaseRecord(fingerprint=fingerprint, started=_now())
        self.save()

    def finish(self, phase: str, *, made: str = "", figures: dict[str, Any] | None = None) -> PhaseRecord:
        """Records that `phase`, begun by this object, is done, and returns its record."""
        assert phase in self._begun, f"phase {phase!r} was not begun"
        record = PhaseRecord(
            fingerprint=self.phases[phase].fingerprint,
            started=self.phases[phase].started,
            finished=_now(),
            seconds=round(time.monotonic() - self._begun.pop(phase), 3),
            made=made,
            figures=figures or {},
        )
        self.phases[phase] = record
        self.save()
        return record

    def is_done(self, phase: str, fingerprint: str) -> bool:
        """Whether `phase` was finished, under this very fingerprint."""
        record = self.phases.get(phase)
        return record is not None and record.finished is not None and record.fingerprint == fingerprint

    def record_weights(self, when: str, digest: str) -> None:
        """Records a hash of the model's weights; `when` is WEIGHTS_BEFORE or WEIGHTS_AFTER."""
        self.weights[when] = digest
        self.save()


def _check_format(document: Any, path: Path) -> None:
    found = document.get("format") if isinstance(document, dict) else None
    if not isinstance(found, int):
        raise _unusable("the file is not a manifest of a run", path)
    if found != FORMAT:
        raise ConfigError(
            f"the manifest has format {found}, this program reads {FORMAT}",
            where=str(path),
            next_step="use the version of miles-verifiers that made this run, or another --run-dir",
        )


def _unusable(what: str, path: Path) -> ConfigError:
    return ConfigError(
        what, where=str(path), next_step="remove the file to start this run anew, or take another --run-dir"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
