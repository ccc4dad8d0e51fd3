"""The real SGLang server on the CPU platform: what it computes, new weights, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import calls, leftovers
from miles_verifiers.engine.server import EngineServer, free_port
from miles_verifiers.errors import EngineError, HostError, ModelError
from miles_verifiers.provision.models import tiny

TOLERANCE = 1e-4
"""Bound for |engine log-prob - transformers log-prob|, nats, float32."""
NEW_TOKENS = 24
PROMPTS = (
    "Say hello.",
    "What is 17 + 25?",
    "def fibonacci(n):\n    if n <  2:",
    "Grüße, 世界! 🙂",
    "a " * 200,
)
REAL_MODEL = os.environ.get("MILES_VERIFIERS_TEST_MODEL")
"""A further model folder to compare, beside the tiny one."""


@dataclass
class Served:
    folder: Path
    engine: EngineServer


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    tiny.write(folder)
    return folder


def server(folder: Path, log: Path, **changes: Any) -> EngineServer:
    config = EngineSection(max_total_tokens=4096, max_running_requests=8, start_timeout=200)
    options: dict[str, Any] = {"dtype": "float32", "context_length": 1024, "port": free_port()}
    return EngineServer(config, python=Path(sys.executable), model=folder, log=log, **(options | changes))


@pytest.fixture(
    scope="module", params=["tiny", *([pytest.param(REAL_MODEL, marks=pytest.mark.slow)] if REAL_MODEL else [])]
)
def served(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tiny_folder if request.param == "tiny" else Path(request.param)
    with server(folder, tmp_path_factory.mktemp("log") / "engine.log") as engine:
        yield Served(folder, engine)


# --- what it computes


def generate(engine: EngineServer, ids: list[int], new: int = NEW_TOKENS, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, **more}
    status, reply = calls.call(f"{engine.url}/generate", body, timeout=120)
    assert status == 200, reply
    return reply


def prompt_ids(folder: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in PROMPTS
    ]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def demand_parity(model: Any, replies: list[tuple[list[int], dict[str, Any]]]) -> None:
    """Each sampled token is the model's own greedy choice, each log-prob the model's within TOLERANCE."""
    for prompt, reply in replies:
        tokens = reply["output_ids"]
        assert len(tokens) == NEW_TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        log_probs = torch.log_softmax(logits.double(), dim=-1)
        assert log_probs.argmax(-1).tolist() == tokens
        for position, (log_prob, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"]):
            assert token == tokens[position]
            assert abs(log_prob - log_probs[position, token].item()) <= TOLERANCE


def test_greedy_tokens_and_log_probs_are_those_of_transformers(served: Served) -> None:
    replies = [(ids, generate(served.engine, ids)) for ids in prompt_ids(served.folder)]
    model = load(served.folder)
    demand_parity(model, replies)
    # The answers say something: they are neither all one token nor nearly certain.
    log_probs = [entry[0] for _, reply in replies for entry in reply["meta_info"]["output_token_logprobs"]]
    assert len({token for _, reply in replies for token in reply["output_ids"]}) > 10
    assert min(log_probs) < -0.1

    # Negative control: one weight of one matrix, moved.
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] += 0.01
    with pytest.raises(AssertionError):
        demand_parity(model, replies)


def test_in_a_batch_the_answers_are_the_same(served: Served) -> None:
    prompts = prompt_ids(served.folder)
    alone = [generate(served.engine, ids)["output_ids"] for ids in prompts]
    answers: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        answers[i] = generate(served.engine, prompts[i])["output_ids"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [answers[i] for i in range(len(prompts))] == alone


# --- new weights


def test_pushed_weights_change_version_and_tokens(served: Served, tmp_path: Path) -> None:
    prompts = prompt_ids(served.folder)
    before = [generate(served.engine, ids) for ids in prompts]
    assert {reply["meta_info"]["weight_version"] for reply in before} == {"0"}

    changed = changed_copy(served.folder, tmp_path / "new")
    try:
        served.engine.update_weights_from_disk(changed, "1", timeout=60)
        after = [generate(served.engine, ids) for ids in prompts]
    finally:
        served.engine.update_weights_from_disk(served.folder, "0", timeout=60)
    assert {reply["meta_info"]["weight_version"] for reply in after} == {"1"}
    assert [reply["output_ids"] for reply in after] != [reply["output_ids"] for reply in before]
    demand_parity(load(changed), list(zip(prompts, after, strict=True)))
    # With the first weights back, the first answers are back: it was the weights that changed them.
    assert [generate(served.engine, ids)["output_ids"] for ids in prompts] == [reply["output_ids"] for reply in before]


def changed_copy(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix in (".json", ".jinja"):
            (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for tensor in weights.values():
        tensor += tensor.std() * 0.2 * torch.randn(tensor.shape, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_weights_that_are_not_there_change_nothing(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        served.engine.update_weights_from_disk(tmp_path / "nowhere", "9", timeout=30)
    with pytest.raises(EngineError, match="did not take the weights"):
        served.engine.update_weights_from_disk(tmp_path, "9", timeout=30)
    assert served.engine.model_info()["weight_version"] == "0"
    served.engine.check()


# --- watching and ending


def test_throughput_is_what_the_engine_says(served: Served) -> None:
    ids = prompt_ids(served.folder)[0]
    started = time.monotonic()
    generate(served.engine, ids, 300)
    mean = 300 / (time.monotonic() - started)
    shown = served.engine.throughput()
    assert shown is not None
    assert mean / 4 < shown < mean * 4


def test_a_port_in_use_is_said_before_anything_starts(served: Served, tmp_path: Path) -> None:
    second = server(served.folder, tmp_path / "log", port=served.engine.port)
    with pytest.raises(HostError, match=f"port {served.engine.port} cannot be used"):
        second.start()
    assert second.pid is None
    assert not (tmp_path / "log").exists()


def test_an_engine_that_dies_at_start_shows_why(tiny_folder: Path, tmp_path: Path) -> None:
    engine = server(tiny_folder, tmp_path / "log")
    engine.argv.append("--no-such-option")
    engine.start()
    with pytest.raises(EngineError, match="ended with exit code 2") as error:
        engine.wait_ready()
    engine.stop()
    assert error.value.returncode == 2
    assert any("--no-such-option" in line for line in error.value.tail)


def test_an_engine_that_dies_in_mid_flight_is_reported_and_cleared_away(tiny_folder: Path, tmp_path: Path) -> None:
    with server(tiny_folder, tmp_path / "log") as engine:
        assert engine.pid is not None
        root = psutil.Process(engine.pid)
        tree = [root, *root.children(recursive=True)]
        shared = leftovers.shared_memory(engine.pid)
        assert shared, "SGLang's load file was expected in shared memory"
        failures: list[BaseException] = []
        worker = threading.Thread(target=_long_request, args=(engine, failures))
        worker.start()
        time.sleep(1.0)
        scheduler = next(child for child in tree if "scheduler" in " ".join(child.cmdline()))
        scheduler.kill()
        with pytest.raises(EngineError) as error:
            engine.update_weights_from_disk(tiny_folder, "1", timeout=30)
        worker.join(30)
    assert failures, "the request in flight must end, too"
    assert error.value.returncode not in (None, 0)
    assert error.value.tail
    assert not any(_alive(member) for member in tree)
    assert not any(file.exists() for file in shared)


def _long_request(engine: EngineServer, failures: list[BaseException]) -> None:
    try:
        generate(engine, [1, 2, 3], new=900)
    except (calls.NoAnswer, AssertionError) as error:
        failures.append(error)


_OWNER = """
import sys, time
from pathlib import Path
from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine.server import EngineServer
config = EngineSection(max_total_tokens=4096, max_running_requests=8, start_timeout=200)
engine = EngineServer(config, python=Path(sys.executable), model=Path(sys.argv[1]), dtype="float32", context_length=1024,
                      port=int(sys.argv[2]), log=Path(sys.argv[3]))
engine.start()
engine.wait_ready()
print("pid", engine.pid, flush=True)
time.sleep(600)
"""


def test_a_server_whose_owner_was_killed_is_gone_within_ten_seconds(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", _OWNER, str(tiny_folder), str(free_port()), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as owner:
        assert owner.stdout is not None
        pid = next(int(line.split()[1]) for line in owner.stdout if line.startswith("pid"))
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        shared = leftovers.shared_memory(pid)
        temporary = Path(root.environ()[leftovers.TEMPORARY_VARIABLE])
        assert len(tree) >= 3
        assert shared
        assert temporary.is_dir()
        # Negative control: with its owner alive the server stays.
        time.sleep(2.0)
        assert all(_alive(member) for member in tree)
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline and any(_alive(member) for member in tree):
        time.sleep(0.1)
    assert not any(_alive(member) for member in tree)
    assert not temporary.exists()
    assert not any(file.exists() for file in shared)


def _alive(member: psutil.Process) -> bool:
    try:
        return member.is_running() and member.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_tiny_model_is_one_that_transformers_reads_whole(tiny_folder: Path) -> None:
    _, report = AutoModelForCausalLM.from_pretrained(tiny_folder, output_loading_info=True)
    assert not any(report.values()), report
    generation = json.loads((tiny_folder / "generation_config.json").read_text())
    assert AutoTokenizer.from_pretrained(tiny_folder).eos_token_id == generation["eos_token_id"]
