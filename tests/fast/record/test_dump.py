"""Samples go to Parquet and come back exactly; what cannot be stored is refused by name; files are whole or not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import fork, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_verifiers.errors import DumpError, HostError
from miles_verifiers.record import dump
from miles_verifiers.record.samples import STATUSES, Fork, Sample, WeightSpan

finite = st.floats(allow_nan=False, allow_infinity=False)
named = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), finite, max_size=3)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
spans = st.lists(st.builds(WeightSpan, text, st.integers(0, 2**31 - 1)), max_size=3)
forks = st.builds(
    Fork,
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    response_length=st.integers(0, 2**31 - 1),
    loss_mask=st.lists(st.integers(0, 1), max_size=6),
    rollout_log_probs=st.lists(finite, max_size=6),
    train_log_probs=st.lists(finite, max_size=6),
    weight_versions=spans,
    shared_length=st.integers(0, 2**31 - 1),
)
samples = st.builds(
    Sample,
    group_index=st.integers(0, 2**62),
    index=st.integers(0, 2**62),
    task_index=st.integers(0, 2**62),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    response_length=st.integers(0, 2**31 - 1),
    loss_mask=st.lists(st.integers(0, 1), max_size=6),
    rollout_log_probs=st.lists(finite, max_size=6),
    train_log_probs=st.lists(finite, max_size=6),
    reward=st.none() | finite,
    rewards=named,
    metrics=named,
    advantage=st.none() | finite,
    status=st.sampled_from(STATUSES),
    stop_condition=text,
    error=text,
    turns=st.integers(0, 100),
    generated_tokens=st.integers(0, 2**62),
    weight_versions=spans,
    forks=st.lists(forks, max_size=2),
    renderer=text,
    environment=text,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    prompt=text,
    response=text,
    timings=named,
)


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(samples, max_size=4))
def test_samples_come_back_exactly(rows: list[Sample], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = dump.write_rollout(tmp_path_factory.mktemp("run"), 0, rows)
    assert dump.read_rollout(path) == rows


def test_the_schema_names_every_field_of_a_sample() -> None:
    assert [field.name for field in fields(Sample)] == dump.SCHEMA.names
    assert [field.name for field in fields(Fork)] == [
        field.name for field in dump.SCHEMA.field("forks").type.value_type
    ]


def test_files_lie_where_the_design_says_and_are_listed_by_step(tmp_path: Path) -> None:
    for step in (10, 9, 0):
        assert dump.write_rollout(tmp_path, step, [sample()]) == tmp_path / f"dump/rollout/{step:06d}.parquet"
    assert dump.write_eval(tmp_path, 3, [sample()]) == tmp_path / "dump/eval/000003.parquet"
    for stray in (".000001.parquet.tmp", "1.parquet", "notes.txt"):
        (tmp_path / "dump/rollout" / stray).touch()
    assert list(dump.rollout_files(tmp_path)) == [0, 9, 10]
    assert list(dump.rollout_files(tmp_path, "eval")) == [3]
    assert dump.rollout_files(tmp_path / "nowhere") == {}


def test_any_reader_sees_plain_columns_and_our_version(tmp_path: Path) -> None:
    file = pq.ParquetFile(dump.write_rollout(tmp_path, 0, [sample()]))
    metadata = file.schema_arrow.metadata
    assert metadata[b"miles_verifiers.schema_version"] == b"2"
    assert metadata[b"miles_verifiers.kind"] == b"rollout"
    assert b"pandas" not in metadata
    column = file.schema_arrow.field("rollout_log_probs")
    assert column.type.value_type == pa.float64()
    assert not column.nullable
    assert file.schema_arrow.field("reward").nullable
    assert file.schema_arrow.field("rewards").type == pa.map_(pa.string(), pa.field("value", pa.float64(), False))
    assert {file.metadata.row_group(0).column(k).compression for k in range(file.metadata.num_columns)} == {"ZSTD"}


def test_a_folder_that_looks_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    path = dump.write_rollout(tmp_path / "lr=1", 0, [sample()])
    assert dump.read_rollout(path) == [sample()]


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    cut = sample()
    cut.response = "print('\ud83d"
    (back,) = dump.read_rollout(dump.write_rollout(tmp_path, 0, [cut]))
    assert back.response == "print('\\ud83d"


def _with(**values: object) -> Sample:
    changed = sample(index=5)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (_with(reward=math.nan), "sample 5 has reward = nan"),
        (_with(advantage=math.inf), "sample 5 has advantage = inf"),
        (_with(rewards={"correct": math.nan}), r"sample 5 has rewards\['correct'\] = nan"),
        (_with(metrics={"latency": -math.inf}), r"sample 5 has metrics\['latency'\] = -inf"),
        (_with(timings={"total": None}), r"sample 5 has timings\['total'\] = None"),
        (_with(rollout_log_probs=[-0.5, math.nan]), r"sample 5 has rollout_log_probs\[1\] = nan"),
        (_with(rollout_log_probs=[-0.5, None]), r"sample 5 has rollout_log_probs\[1\] = None"),
        (
            _with(forks=[Fork(rollout_log_probs=[0.0, math.nan])]),
            r"sample 5 has forks\[0\].rollout_log_probs\[1\] = nan",
        ),
        (
            _with(forks=[fork(), Fork(train_log_probs=[math.inf])]),
            r"sample 5 has forks\[1\].train_log_probs\[0\] = inf",
        ),
        (_with(train_log_probs=[-math.inf]), r"sample 5 has train_log_probs\[0\] = -inf"),
        (_with(tokens=[2**31]), "cannot hold"),
        (_with(tokens=["a"]), "cannot hold"),
        (_with(tokens=[1, None]), "lacks a value"),
        (_with(status=None), "lacks a value"),
        (_with(environment="\ud800"), "cannot hold"),
    ],
    ids=str,
)
def test_what_cannot_be_stored_is_refused_and_the_old_file_stays(bad: Sample, message: str, tmp_path: Path) -> None:
    path = dump.write_rollout(tmp_path, 0, [sample()])
    with pytest.raises(DumpError, match=message):
        dump.write_rollout(tmp_path, 0, [sample(), bad])
    assert dump.read_rollout(path) == [sample()]
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_dies_half_way_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump.write_rollout(tmp_path, 0, [sample()])

    def half(table: pa.Table, where: Path, **_: object) -> None:
        where.write_bytes(b"PAR1")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(KeyboardInterrupt):
        dump.write_rollout(tmp_path, 0, [sample(), sample(1)])
    assert dump.read_rollout(path) == [sample()]
    assert list(path.parent.iterdir()) == [path]


def test_no_space_is_an_error_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(HostError, match=r"cannot write 000000\.parquet: No space left on device"):
        dump.write_rollout(tmp_path, 0, [sample()])


def _rewrite(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    pq.write_table(change(pq.read_table(path)), path)


def _version(table: pa.Table, version: int) -> pa.Table:
    return table.replace_schema_metadata({**table.schema.metadata, b"miles_verifiers.schema_version": b"%d" % version})


def _before_forks(table: pa.Table) -> pa.Table:
    """A file of the schema's first version."""
    return _version(table.drop_columns(["forks", "generated_tokens"]), 1)


def test_files_that_are_not_ours_are_refused_by_name(tmp_path: Path) -> None:
    def refusal(change: Callable[[Path], object]) -> str:
        path = dump.write_rollout(tmp_path, 0, [sample()])
        change(path)
        with pytest.raises(DumpError) as caught:
            dump.read_rollout(path)
        assert caught.value.where == str(path)
        return caught.value.what

    assert refusal(lambda p: p.unlink()) == "no such rollout file"
    assert "not a readable Parquet file" in refusal(lambda p: p.write_bytes(b"hello"))
    assert "not a readable Parquet file" in refusal(lambda p: p.write_bytes(p.read_bytes()[:-9]))
    assert "not a rollout file" in refusal(lambda p: _rewrite(p, lambda t: t.replace_schema_metadata(None)))
    assert "schema version 3, this program reads 2" in refusal(lambda p: _rewrite(p, lambda t: _version(t, 3)))
    assert "schema version 1, this program reads 2" in refusal(lambda p: _rewrite(p, _before_forks))
    assert "seed: int64" in refusal(lambda p: _rewrite(p, lambda t: t.drop_columns("seed")))
