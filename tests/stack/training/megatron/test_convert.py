"""Conversion in both directions: proven, resumable, whole or absent."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_verifiers.errors import HostError, ModelError, ParityError, TrainerError
from miles_verifiers.system import process
from miles_verifiers.training.megatron import aside, convert
from miles_verifiers.training.megatron.convert import hf_to_megatron, megatron_to_hf


def everything(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def model(tiny, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(tiny("qwen3-tied"), tmp_path / "model")


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen2-untied"])
def test_there_and_back(tiny, tmp_path, kind):
    target = tmp_path / "models" / "tiny_torch_dist"
    parity = hf_to_megatron(tiny(kind), target)
    assert 0 <= parity.max_logit_difference < 1e-5
    assert not parity.reused
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (target / "release" / "metadata.json").is_file()
    manifest = json.loads((target / "manifest.json").read_text())
    assert parity.bytes == sum(file["bytes"] for file in manifest["files"].values())
    assert all((target / name).stat().st_size == file["bytes"] for name, file in manifest["files"].items())

    megatron_to_hf(target, tmp_path / "back", hf_template=tiny(kind))
    original, back = load_file(tiny(kind) / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert set(back) == set(original)
    assert all(torch.equal(back[name], original[name]) for name in original)
    assert {"config.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "back").iterdir()}


def test_a_finished_conversion_is_reused_only_while_everything_matches(model, tmp_path):
    target = tmp_path / "out"
    first = hf_to_megatron(model, target)
    again = hf_to_megatron(model, target)
    assert (again.reused, again.max_logit_difference) == (True, first.max_logit_difference)

    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += 1.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert not hf_to_megatron(model, target).reused, "the source has other weights now"

    part = next((target / "release").glob("*.distcp"))
    damaged = bytearray(part.read_bytes())
    damaged[-1000] ^= 1
    part.write_bytes(damaged)
    assert not hf_to_megatron(model, target).reused, "one bit of the result has changed"

    assert hf_to_megatron(model, target).reused
    assert not hf_to_megatron(model, target, tensor_parallel=2).reused
    assert everything(tmp_path) == everything(tmp_path), "nothing is left beside"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_a_model_that_is_computed_otherwise_is_not_kept(model, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "max_logit_difference", lambda policy: 2e-4)
    with pytest.raises(ParityError, match=r"differ from transformers' by 0\.0002"):
        hf_to_megatron(model, tmp_path / "out")
    monkeypatch.setattr(convert, "max_logit_difference", lambda policy: float("nan"))
    with pytest.raises(ParityError):
        hf_to_megatron(model, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


def test_a_weight_missing_from_the_written_files_fails_parity(model, tmp_path, monkeypatch):
    # The comparison is of what was read back: without it the weights in memory would hide the loss.
    monkeypatch.setattr(convert.checkpoint, "load", lambda root, model: None)
    with pytest.raises(ParityError, match="nan"):
        hf_to_megatron(model, tmp_path / "out")


def test_killed_at_any_moment_it_leaves_nothing_that_looks_finished(model, tmp_path):
    code = (
        "import sys, pathlib, time\n"
        "from miles_verifiers.training.megatron import convert\n"
        "def stop(policy):\n"
        "    print('written', flush=True)\n"
        "    time.sleep(60)\n"
        "convert.max_logit_difference = stop\n"
        "convert.hf_to_megatron(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))\n"
    )
    target = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", code, str(model), str(target)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "written\n"
        assert aside.aside_of(target).is_dir(), "killed before anything was written: this test shows nothing"
        with pytest.raises(HostError, match="another process"), aside.locked(tmp_path, timeout=0.1):
            pass
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(timeout=20)
        child.stdout.close()
    assert not target.exists()
    start = time.monotonic()
    assert not hf_to_megatron(model, target).reused
    assert time.monotonic() - start < 30, "the dead process still holds its lock"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_command_line(model, tmp_path, capsys):
    arguments = ["hf-to-megatron", str(model), str(tmp_path / "out"), "--tp", "2"]
    assert convert.main(arguments) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert done["max_logit_difference"] < 1e-5
    assert done["bytes"] > 0
    assert not done["reused"]
    assert (
        convert.main(["megatron-to-hf", str(tmp_path / "out"), str(tmp_path / "back"), "--hf-template", str(model)])
        == 0
    )
    assert convert.main(["hf-to-megatron", str(tmp_path / "nowhere"), str(tmp_path / "x")]) == ModelError.exit_code == 2
    assert "config.json" in capsys.readouterr().out
    assert not (tmp_path / "x").exists()


def test_its_error_reaches_whoever_started_it(tmp_path):
    command = [sys.executable, "-P", "-m", "miles_verifiers.training.megatron.convert", "hf-to-megatron"]
    with pytest.raises(ModelError, match=r"config\.json"):
        process.run([*command, tmp_path / "nowhere", tmp_path / "x"], what="conversion", timeout=60)


def test_checkpoints_that_cannot_be_read(model, tmp_path):
    target = tmp_path / "out"
    with pytest.raises(ModelError, match="not a Megatron checkpoint"):
        megatron_to_hf(tmp_path, tmp_path / "back", hf_template=model)
    hf_to_megatron(model, target)
    part = next((target / "release").glob("*.distcp"))
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with pytest.raises(TrainerError, match="cannot be loaded"):
        megatron_to_hf(target, tmp_path / "back", hf_template=model)
    assert not (tmp_path / "back").exists()
