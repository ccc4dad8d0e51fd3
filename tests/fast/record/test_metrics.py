"""metrics.jsonl grows by whole lines, survives being cut anywhere, and is strict JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from factories import metrics_record

from miles_verifiers.errors import DumpError, HostError
from miles_verifiers.record import dump
from miles_verifiers.record.metrics import METRIC_FIELDS, load_metrics

RECORDS = [{"step": step, "loss": -0.5 * step, "seconds": {"train": 1.5}} for step in range(3)]


def written(run_dir: Path) -> Path:
    for record in RECORDS:
        dump.append_metrics(run_dir, record)
    return run_dir / "metrics.jsonl"


def test_records_come_back_in_order_one_per_line(tmp_path: Path) -> None:
    path = written(tmp_path / "run")
    assert dump.read_metrics(tmp_path / "run") == RECORDS
    assert [json.loads(line) for line in path.read_text().splitlines()] == RECORDS
    assert dump.read_metrics(tmp_path / "nowhere") == []


def test_cut_at_any_byte_it_reads_and_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = path.read_bytes()
    starts = [0, *(k + 1 for k, byte in enumerate(data) if byte == ord("\n"))]
    for length in range(len(data) + 1):
        whole = sum(start <= length for start in starts) - 1
        path.write_bytes(data[:length])
        file = load_metrics(tmp_path)
        assert file.records == RECORDS[:whole]
        assert file.torn == data[starts[whole] : length].decode()
        dump.append_metrics(tmp_path, {"step": 9})
        assert dump.read_metrics(tmp_path) == [*RECORDS[:whole], {"step": 9}]


def test_damage_in_the_middle_is_not_an_interruption(tmp_path: Path) -> None:
    path = written(tmp_path)
    first, second, third = path.read_text().splitlines(keepends=True)
    for broken in ('{"step": 1, "lo\n', "[]\n", '{"loss": 1}\n', '{"step": -1}\n', '{"step": 1, "loss": NaN}\n', "\n"):
        path.write_text(first + broken + third)
        with pytest.raises(DumpError) as caught:
            dump.read_metrics(tmp_path)
        assert caught.value.where == f"{path} line 2"
    path.write_text(first + second + third)
    assert dump.read_metrics(tmp_path) == RECORDS


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"step": 0, "loss": math.nan}, "step 0 have loss = nan"),
        ({"step": 0, "seconds": {"train": math.inf}}, r"seconds\.train = inf"),
        ({"step": 0, "rates": [0.5, -math.inf]}, r"rates\[1\] = -inf"),
        ({"step": 0, "path": Path("a")}, "not JSON"),
        ({"loss": 1.0}, "step >= 0"),
        ({"step": True}, "step >= 0"),
        ({"step": -1}, "step >= 0"),
        ({"step": "1"}, "step >= 0"),
    ],
)
def test_what_json_cannot_say_is_refused_and_nothing_is_written(
    record: dict[str, object], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    with pytest.raises(DumpError, match=message):
        dump.append_metrics(tmp_path, record)
    assert path.read_bytes() == before


def test_truncation_drops_a_step_and_all_later_ones(tmp_path: Path) -> None:
    path = written(tmp_path)
    with path.open("a") as file:
        file.write('{"step": 3, "to')
    dump.truncate_metrics(tmp_path, 2)
    assert dump.read_metrics(tmp_path) == RECORDS[:2]
    assert path.read_text().endswith("}\n")
    dump.truncate_metrics(tmp_path, 0)
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


def test_truncation_of_nothing_makes_nothing(tmp_path: Path) -> None:
    dump.truncate_metrics(tmp_path, 0)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_of_the_host(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(HostError, match=r"cannot write metrics\.jsonl"):
        dump.append_metrics(tmp_path, RECORDS[0])
    with pytest.raises(DumpError, match="cannot be read"):
        dump.read_metrics(tmp_path)


def test_the_record_of_the_factory_is_a_full_one() -> None:
    assert tuple(metrics_record(0, pass_rate=0.0, reward_mean=0.0)) == METRIC_FIELDS


def test_evaluations_are_kept_apart_and_cut_with_their_steps(tmp_path: Path) -> None:
    """The one before step 1 was made after step 0, and is made again by a run that starts at step 1."""
    evaluations = [{"step": step, "eval": {"golf": {"mean": 0.5}}} for step in (0, 1, 2)]
    for record in [evaluations[0], RECORDS[0], evaluations[1], RECORDS[1], evaluations[2]]:
        dump.append_metrics(tmp_path, record)
    file = load_metrics(tmp_path)
    assert (file.records, file.evaluations) == (RECORDS[:2], evaluations)
    assert dump.read_metrics(tmp_path) == RECORDS[:2]
    dump.truncate_metrics(tmp_path, 1)
    file = load_metrics(tmp_path)
    assert (file.records, file.evaluations) == (RECORDS[:1], evaluations[:1])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [evaluations[0], RECORDS[0]]
