"""metrics.jsonl: one JSON object per training step and per evaluation, in a file that grows by whole lines. A leaf.

A line counts once its end is on disk. A process that is killed while it writes leaves a torn last line, which readers
leave out and the next writer cuts off. JSON has no NaN: a number that is not finite is refused when it is written.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from miles_verifiers.errors import DumpError, HostError
from miles_verifiers.system.files import sync, write_text

METRIC_FIELDS = (
    "step",
    "samples",
    "groups",
    "trained_groups",
    "flat_groups",
    "failed",
    "reward_mean",
    "pass_rate",
    "response_length_mean",
    "sampled_tokens",
    "forks",
    "ending",
    "dropped_groups",
    "causes",
    "retried",
    "loss",
    "grad_norm",
    "clip_fraction",
    "mismatch_mean",
    "mismatch_max",
    "mismatch_k3",
    "weight_delta",
    "optimizer_steps",
    "weight_version",
    "tokens_per_second",
    "seconds",
)
"""What the training loop records of a step: counts, means over the step's samples (`pass_rate` over all of them,
`reward_mean` over those with a reward, `response_length_mean` of their last branches), `sampled_tokens` over all sequences of
the samples and how many of these are `forks`, `ending` says whether the step was `full` or why not, `dropped_groups` counts
groups that were sampled and not trained on by cause, `causes` rollouts by what went wrong with them (those of dropped groups,
too), `retried` rollouts by why they were run again; then what the optimizer reported (None where it made no step), the
engine/trainer mismatch in nats, `weight_delta` as max |new - old| over all parameters, the `weight_version` that the engine
has after the step, and `seconds` by stage."""


EVAL_KEY = "eval"
"""A record with this key is that of an evaluation made before training step `step`: by environment, the fields of
rollout.evaluation.Evaluation; `causes` and `seconds` as of a step."""


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """What metrics.jsonl holds. `torn` is what a killed process left of a last line, without the line's end."""

    records: list[dict[str, Any]]
    """Of training steps."""
    torn: str = ""
    evaluations: list[dict[str, Any]] = field(default_factory=list)


def metrics_path(run_dir: Path) -> Path:
    return run_dir / "metrics.jsonl"


def append_metrics(run_dir: Path, record: Mapping[str, Any]) -> None:
    """Adds one record as one line; on return it is on disk. `record["step"]` is the training step, from 0.

    A torn last line is cut off first: appending to it would damage two records instead of one.
    Raises DumpError for a number that is not finite, a value that JSON does not have, or a missing step.
    """
    path = metrics_path(run_dir)
    line = _line(record, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            _cut_torn_line(file, path)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        sync(path.parent)
    except OSError as error:
        raise HostError(
            f"cannot write {path.name}: {error.strerror or error}",
            where=str(path.parent),
            next_step="free disk space there, or allow writing",
        ) from error


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The training steps' records, without a torn last line; none where the file is not there yet.

    Raises DumpError, naming the line, where a whole line is not a record: that is damage, not an interruption.
    """
    return load_metrics(run_dir).records


def load_metrics(run_dir: Path) -> MetricsFile:
    """As `read_metrics`, with what is left of a torn last line."""
    path = metrics_path(run_dir)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return MetricsFile([])
    except OSError as error:
        raise DumpError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    end = _whole_length(data)
    lines = data[:end].split(b"\n")[:-1]
    records = [_record(line, f"{path} line {number}") for number, line in enumerate(lines, start=1)]
    return MetricsFile(
        records=[record for record in records if EVAL_KEY not in record],
        torn=data[end:].decode("utf-8", "replace"),
        evaluations=[record for record in records if EVAL_KEY in record],
    )


def truncate_metrics(run_dir: Path, step: int) -> None:
    """Drops the records of `step` and later, for a run that goes on from there. The file is replaced as a whole."""
    path = metrics_path(run_dir)
    if path.exists():
        file = load_metrics(run_dir)
        # An evaluation before step k was made after step k - 1 was recorded.
        kept = [record for record in [*file.records, *file.evaluations] if record["step"] < step]
        kept.sort(key=lambda record: (record["step"], EVAL_KEY not in record))
        write_text(path, "".join(_line(record, path).decode() for record in kept))


def _cut_torn_line(file: IO[bytes], path: Path) -> None:
    with path.open("rb") as reader:
        reader.seek(max(0, file.tell() - 1))
        if reader.read() not in (b"", b"\n"):
            file.truncate(_whole_length(path.read_bytes()))


def _whole_length(data: bytes) -> int:
    """Bytes up to and with the last line end: what was written whole."""
    return data.rfind(b"\n") + 1


def _line(record: Mapping[str, Any], path: Path) -> bytes:
    if not _is_step(record.get("step")):
        raise DumpError(f"a metrics record needs a step >= 0, not {record.get('step')!r}", where=str(path))
    for key, value in _leaves(record):
        if isinstance(value, float) and not math.isfinite(value):
            raise DumpError(f"the metrics of step {record['step']} have {key} = {value}", where=str(path))
    try:
        return json.dumps(dict(record), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DumpError(f"the metrics of step {record['step']} are not JSON: {error}", where=str(path)) from error


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DumpError(f"not a metrics record: {error}", where=where, next_step="remove that line") from error
    if not isinstance(record, dict) or not _is_step(record.get("step")):
        raise DumpError("not a metrics record: an object with a step >= 0 is expected", where=where)
    return record


def _refuse_constant(name: str) -> float:
    # Python's reader accepts NaN and Infinity, which JSON does not have and other readers stumble over.
    raise ValueError(f"{name} is not JSON")


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for position, inner in enumerate(value):
            yield from _leaves(inner, f"{name}[{position}]")
    else:
        yield name, value
