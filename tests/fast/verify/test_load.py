"""Runs that cannot be read in part, and rules that fail themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import good_run

from miles_verifiers.errors import ConfigError
from miles_verifiers.verify import RULES, check, verify
from miles_verifiers.verify.rule import Problem, rule
from miles_verifiers.verify.run import Run

ROLLOUT_1 = Path("dump/rollout/000001.parquet")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def foreign_parquet(path: Path) -> None:
    pq.write_table(pa.table({"reward": [1.0]}), path)


DAMAGES: dict[str, tuple[Path, Callable[[Path], object], set[str]]] = {
    "rollout cut short": (ROLLOUT_1, cut_in_half, {"readable", "rollout_files"}),
    "rollout empty": (ROLLOUT_1, lambda path: path.write_bytes(b""), {"readable", "rollout_files"}),
    "rollout of something else": (ROLLOUT_1, foreign_parquet, {"readable", "rollout_files"}),
    "rollout missing": (ROLLOUT_1, Path.unlink, {"rollout_files"}),
    "metrics missing": (Path("metrics.jsonl"), Path.unlink, {"metrics_records", "weights_changed"}),
    "metrics damaged": (
        Path("metrics.jsonl"),
        lambda path: path.write_text("{]\n" + path.read_text()),
        {"readable", "metrics_records", "weights_changed"},
    ),
    "manifest missing": (Path("manifest.json"), Path.unlink, {"readable", "weight_hashes"}),
    "manifest damaged": (Path("manifest.json"), cut_in_half, {"readable", "weight_hashes"}),
    "model config missing": (Path("models/small/config.json"), Path.unlink, {"readable", "vocabulary"}),
    "model config damaged": (Path("models/small/config.json"), cut_in_half, {"readable", "vocabulary"}),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_a_finding_and_the_other_rules_still_run(name: str, tmp_path: Path) -> None:
    file, damage, rules = DAMAGES[name]
    run_dir = good_run().write(tmp_path / "run")
    assert verify(run_dir).ok
    damage(run_dir / file)
    report = verify(run_dir)
    assert set(report.failed) == rules, report.as_text()
    assert [result.name for result in report.rules] == [rule.name for rule in RULES]
    if "readable" in rules:
        assert file.as_posix() in {finding.where for finding in report.findings}


def test_a_missing_file_in_the_middle_is_not_hidden_by_its_number(tmp_path: Path) -> None:
    run_dir = good_run().write(tmp_path / "run")
    (run_dir / ROLLOUT_1).rename(run_dir / "dump/rollout/000002.parquet")
    report = verify(run_dir)
    assert {finding.where for finding in report.findings if finding.rule == "rollout_files"} == {
        "dump/rollout/000001.parquet",
        "dump/rollout/000002.parquet",
    }


def test_a_torn_last_line_of_the_metrics_is_a_warning(tmp_path: Path) -> None:
    run_dir = good_run().write(tmp_path / "run")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "sam')
    report = verify(run_dir)
    assert report.ok
    (finding,) = report.findings
    assert (finding.rule, finding.severity) == ("readable", "warning")
    assert "torn" in finding.message
    assert finding.message in report.as_text()


def test_no_run_at_all_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        verify(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no such configuration file"):
        verify(tmp_path)


def test_the_vocabulary_size_can_be_given_or_lie_in_the_text_config(tmp_path: Path) -> None:
    draft = good_run()
    draft.model = {"text_config": {"vocab_size": 32}}
    assert verify(draft.write(tmp_path / "nested")).ok
    draft.model = {"model_type": "llama"}
    run_dir = draft.write(tmp_path / "without")
    assert verify(run_dir).failed == ["readable", "vocabulary"]
    assert verify(run_dir, vocab_size=32).ok
    assert verify(run_dir, vocab_size=23).failed == ["vocabulary"]


def test_the_given_configuration_wins_over_the_run_s_own(tmp_path: Path) -> None:
    draft = good_run()
    run_dir = draft.write(tmp_path / "run")
    draft.configure(verify={"min_passed": 100})
    assert verify(run_dir).ok
    assert verify(run_dir, draft.config).failed == ["some_passed"]


def test_a_rule_that_raises_is_a_finding_and_stops_no_other(tmp_path: Path) -> None:
    @rule()
    def broken(run: Run) -> list[Problem]:
        """Never holds."""
        raise ZeroDivisionError("division by zero")

    report = check(Run.load(good_run().write(tmp_path / "run")), (broken, *RULES))
    assert report.failed == ["broken"]
    assert report.findings[0].message == "the rule itself failed: ZeroDivisionError: division by zero"
    assert len(report.rules) == len(RULES) + 1


def test_a_rule_keeps_what_it_found_before_it_raised(tmp_path: Path) -> None:
    def findings(run: Run):
        """Finds something, then breaks."""
        yield Problem("here", "found")
        raise KeyError("gone")

    result = rule()(findings).apply(Run.load(good_run().write(tmp_path / "run")))
    assert [finding.message for finding in result.findings] == ["found", "the rule itself failed: KeyError: 'gone'"]


def test_figures_inform(tmp_path: Path) -> None:
    figures = verify(good_run().write(tmp_path / "run")).figures
    assert figures["steps"] == 2
    assert figures["samples"] == 16
    assert figures["passed"] == 5
    assert figures["statuses"] == {"completed": 16}
    assert figures["sampled_tokens"] == 32
    assert figures["pass_rate_by_step"] == [0.25, 0.375]
    assert figures["mismatch_mean_by_step"] == pytest.approx([1e-5, 1e-5])
    low, high = figures["pass_rate_interval"]
    assert 0 < low < 5 / 16 < high < 1
    json.dumps(figures, allow_nan=False)


def test_a_run_without_samples_has_figures_too(tmp_path: Path) -> None:
    draft = good_run()
    draft.steps = [[], []]
    report = verify(draft.write(tmp_path / "run"))
    assert report.figures["pass_rate_by_step"] == [None, None]
    assert {"sample_counts", "some_completed", "some_passed", "mismatch_gate"} <= set(report.failed)
