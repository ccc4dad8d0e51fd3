"""The dump of a run: what was rolled out and what training saw of it, in files that any tool reads.

    RUN_DIR/dump/rollout/000000.parquet   the samples of training step 0, one row each
    RUN_DIR/dump/eval/000000.parquet      the samples of an evaluation made before training step 0
    RUN_DIR/metrics.jsonl                 one JSON object per training step

A row is a rollout. Where its history forked, the further token sequences are in the row's `forks`, a list of structs with the
token columns of the row itself (`samples.Fork`).

The Parquet files have one explicit schema, `SCHEMA`: the fields of `samples.Sample`. Its version stands in the file's
metadata. Numbers that are not finite are refused here, by name, so that no reader has to know about them: Parquet would
carry a NaN silently. The functions for metrics.jsonl are those of `metrics`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from miles_verifiers.errors import DumpError
from miles_verifiers.record.metrics import append_metrics, read_metrics, truncate_metrics
from miles_verifiers.record.samples import Sample, as_row, from_row
from miles_verifiers.system.files import written_aside

__all__ = [
    "SCHEMA",
    "SCHEMA_VERSION",
    "append_metrics",
    "read_metrics",
    "read_rollout",
    "rollout_files",
    "to_table",
    "truncate_metrics",
    "write_eval",
    "write_rollout",
]

SCHEMA_VERSION = 2
"""2: with the columns `forks` and `generated_tokens`."""
Kind = Literal["rollout", "eval"]

_VERSION_KEY = b"miles_verifiers.schema_version"
_KIND_KEY = b"miles_verifiers.kind"


def _column(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", kind, nullable=False))


_NAMED_NUMBERS = pa.map_(pa.string(), pa.field("value", pa.float64(), nullable=False))
_SPAN = pa.struct([_column("version", pa.string()), _column("count", pa.int32())])
# Engine and trainer compute in float32, but a float64 column gives back exactly what was put in; the zero bits of widened
# numbers compress away.
_LOG_PROBS = _list_of(pa.float64())
_FORK = pa.struct(
    [
        _column("tokens", _list_of(pa.int32())),
        _column("response_length", pa.int32()),
        _column("loss_mask", _list_of(pa.int8())),
        _column("rollout_log_probs", _LOG_PROBS),
        _column("train_log_probs", _LOG_PROBS),
        _column("weight_versions", _list_of(_SPAN)),
        _column("shared_length", pa.int32()),
    ]
)

SCHEMA: pa.Schema = pa.schema(
    [
        _column("group_index", pa.int64()),
        _column("index", pa.int64()),
        _column("task_index", pa.int64()),
        _column("tokens", _list_of(pa.int32())),
        _column("response_length", pa.int32()),
        _column("loss_mask", _list_of(pa.int8())),
        _column("rollout_log_probs", _LOG_PROBS),
        _column("train_log_probs", _LOG_PROBS),
        pa.field("reward", pa.float64()),
        _column("rewards", _NAMED_NUMBERS),
        _column("metrics", _NAMED_NUMBERS),
        pa.field("advantage", pa.float64()),
        _column("status", pa.string()),
        _column("stop_condition", pa.string()),
        _column("error", pa.string()),
        _column("turns", pa.int32()),
        _column("generated_tokens", pa.int64()),
        _column("weight_versions", _list_of(_SPAN)),
        _column("forks", _list_of(_FORK)),
        _column("renderer", pa.string()),
        _column("environment", pa.string()),
        pa.field("seed", pa.int64()),
        _column("prompt", pa.string()),
        _column("response", pa.string()),
        _column("timings", _NAMED_NUMBERS),
    ]
)
_MAPS = ("rewards", "metrics", "timings")
_TEXTS = ("stop_condition", "error", "prompt", "response")


def write_rollout(run_dir: Path, step: int, samples: Sequence[Sample]) -> Path:
    """Writes the samples of a training step to dump/rollout, whole or not at all; an older file of the step is replaced.

    Raises DumpError, naming sample and field, for a number that is not finite or does not fit its column.
    """
    return _write(run_dir, "rollout", step, samples)


def write_eval(run_dir: Path, step: int, samples: Sequence[Sample]) -> Path:
    """As `write_rollout`, for an evaluation made before training step `step`, to dump/eval."""
    return _write(run_dir, "eval", step, samples)


def rollout_files(run_dir: Path, kind: Kind = "rollout") -> dict[int, Path]:
    """The files of a run by step, in order of the steps. Anything else that lies in the folder is left out."""
    folder = run_dir / "dump" / kind
    found = {
        int(path.stem): path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if re.fullmatch(r"[0-9]{6,}\.parquet", path.name)
    }
    return dict(sorted(found.items()))


def read_rollout(path: Path) -> list[Sample]:
    """The samples of one file, of either kind, exactly as they were written.

    Raises DumpError for a file that is not there, is damaged, is not of this project, or has a newer schema.
    """
    try:
        # Not pyarrow's read_table: it takes a folder named "lr=1" on the way for a partition and adds a column.
        with pq.ParquetFile(path) as file:
            _check_schema(file.schema_arrow, path)
            rows = file.read().to_pylist()
    except FileNotFoundError:
        raise DumpError("no such rollout file", where=str(path)) from None
    except (OSError, pa.ArrowException) as error:
        raise DumpError(
            f"not a readable Parquet file: {error}", where=str(path), next_step="run that training step again"
        ) from error
    return [from_row({**row, **{name: dict(row[name]) for name in _MAPS}}) for row in rows]


def to_table(samples: Sequence[Sample], kind: Kind = "rollout") -> pa.Table:
    """The samples as an Arrow table of `SCHEMA`. Raises DumpError for a value that its column cannot hold."""
    schema = SCHEMA.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION).encode(), _KIND_KEY: kind.encode()})
    rows = [_storable(sample) for sample in samples]
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise DumpError(f"a sample has a value that its column cannot hold: {error}") from error


def _write(run_dir: Path, kind: Kind, step: int, samples: Sequence[Sample]) -> Path:
    path = run_dir / "dump" / kind / f"{step:06d}.parquet"
    for sample in samples:
        _check_finite(sample, path)
    table = to_table(samples, kind)
    with written_aside(path) as aside:
        try:
            pq.write_table(table, aside, compression="zstd")
        except pa.ArrowInvalid as error:  # a null in a column, or within a list, that has none
            raise DumpError(f"a sample lacks a value: {error}", where=str(path)) from error
    return path


def _storable(sample: Sample) -> dict[str, Any]:
    row = as_row(sample)
    for name in _MAPS:
        row[name] = list(row[name].items())
    for name in _TEXTS:
        # A cut-off reply may end within a character, which decoders show as half a surrogate pair: not valid UTF-8.
        row[name] = row[name].encode("utf-8", "backslashreplace").decode("utf-8")
    return row


def _check_finite(sample: Sample, path: Path) -> None:
    for name, value in _numbers(sample):
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DumpError(
                f"sample {sample.index} has {name} = {value}",
                where=str(path),
                next_step="whatever made this number has to refuse it or mark the sample as failed",
            )


def _numbers(sample: Sample) -> Iterator[tuple[str, Any]]:
    for name in ("reward", "advantage"):
        value = getattr(sample, name)
        if value is not None:
            yield name, value
    for name in _MAPS:
        for key, value in getattr(sample, name).items():
            yield f"{name}[{key!r}]", value
    for number, sequence in enumerate(sample.sequences):
        of = f"forks[{number - 1}]." if number else ""
        for name in ("rollout_log_probs", "train_log_probs"):
            for position, value in enumerate(getattr(sequence, name)):
                yield f"{of}{name}[{position}]", value


def _check_schema(schema: pa.Schema, path: Path) -> None:
    version = (schema.metadata or {}).get(_VERSION_KEY, b"").decode("ascii", "replace")
    if not version.isdigit():
        raise DumpError("a Parquet file, but not a rollout file of this project", where=str(path))
    if int(version) != SCHEMA_VERSION:
        raise DumpError(
            f"the file has schema version {version}, this program reads {SCHEMA_VERSION}",
            where=str(path),
            next_step="read it with the version of miles-verifiers that wrote it",
        )
    if not schema.remove_metadata().equals(SCHEMA):
        other = sorted({str(field) for field in schema} ^ {str(field) for field in SCHEMA})
        raise DumpError(f"the columns are not those of schema {version}: {'; '.join(other)}", where=str(path))
