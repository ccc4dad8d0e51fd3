"""A run's configuration, put together and validated once.

It is a profile (profiles/*.toml), over it an optional file (`--config`), over that the command line
(`--set section.field=value`). The result is written to the run directory as config.toml; every process of the run reads
that file and nothing else. The fields are in settings.py.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import ConfigError
from miles_verifiers.system import resources


def profile_names() -> list[str]:
    return sorted(path.stem for path in (resources.root() / "profiles").glob("*.toml"))


def load(profile: str, file: Path | None = None, overrides: list[str] | None = None) -> RunConfig:
    """The profile, then `file`, then `overrides` ("section.field=value", the value in TOML's notation)."""
    path = resources.root() / "profiles" / f"{profile}.toml"
    if not path.is_file():
        raise ConfigError(
            f"unknown profile {profile!r}",
            where=str(path.parent),
            next_step=f"take one of: {', '.join(profile_names())}",
        )
    table = {**_profile(path), "profile": profile}
    if file is not None:
        table = _merged(table, _read(file))
    for text in overrides or []:
        table = _merged(table, _override(text))
    return validate(table, where=f"profile {profile}" + (f" with {file}" if file else ""))


def with_environment(config: RunConfig, file: Path) -> RunConfig:
    """`config` on the environment that a Verifiers EnvConfig file describes: its `taskset`, `harness.id` and `max_turns`."""
    table = _read(file)
    unknown = sorted(set(table) - {"taskset", "harness", "max_turns"})
    if unknown:
        raise ConfigError(
            f"keys that have no place here: {', '.join(unknown)}",
            where=str(file),
            next_step="keep taskset, harness and max_turns; deadlines are set in [rollout]",
        )
    changes: dict[str, Any] = {key: table[key] for key in ("taskset", "max_turns") if key in table}
    if "harness" in table:
        changes["harness"] = table["harness"]["id"] if isinstance(table["harness"], dict) else table["harness"]
    return validate(_merged(config.model_dump(), {"environment": changes}), where=str(file))


def read(path: Path) -> RunConfig:
    """The configuration that a run directory holds."""
    return validate(_read(path), where=str(path))


def validate(table: dict[str, Any], where: str) -> RunConfig:
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        lines = [f"{'.'.join(str(part) for part in e['loc']) or 'run'}: {e['msg']}" for e in error.errors()]
        raise ConfigError(
            "the configuration is not valid: " + "; ".join(lines),
            where=where,
            next_step="fields and defaults are described in miles_verifiers/config/settings.py",
        ) from None


def _profile(path: Path) -> dict[str, Any]:
    """A profile's table, laid over the one that it `extends`."""
    table = _read(path)
    below = table.pop("extends", None)
    return table if below is None else _merged(_profile(path.with_name(f"{below}.toml")), table)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such configuration file", where=str(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file cannot be read: {error}", where=str(path)) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}", where=str(path)) from None


def _override(text: str) -> dict[str, Any]:
    """`a.b=1` as nested tables. A bare word is taken as a string, so that no shell quoting is needed."""
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise ConfigError(
            f"--set {text!r} is not of the form section.field=value",
            next_step="for example --set training.num_steps=5",
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table: Any = parsed
    for part in reversed(key.strip().split(".")):
        table = {part: table}
    assert isinstance(table, dict)
    return table


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
