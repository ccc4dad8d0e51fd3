"""The engine's command line, environment, HTTP calls and life cycle, with small stand-ins instead of SGLang."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import calls, launch, leftovers
from miles_verifiers.engine import server as server_module
from miles_verifiers.engine.arguments import HOST, server_argv, server_environment
from miles_verifiers.engine.server import EngineServer, free_port
from miles_verifiers.errors import EngineError, HostError, ModelError
from miles_verifiers.system.process import PARENT_VARIABLE

PYTHON, MODEL = Path("/stack/bin/python"), Path("/models/m")


def argv(config: EngineSection) -> list[str]:
    return server_argv(config, python=PYTHON, model=MODEL, dtype="float32", context_length=1024, port=30000)


def value_of(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


# --- command line and environment


def test_the_command_of_a_cpu_engine() -> None:
    arguments = argv(EngineSection(max_total_tokens=4096, extra_args=["--log-level", "debug"]))
    assert arguments[:4] == [str(PYTHON), "-P", "-m", "miles_verifiers.engine.launch"]
    expected = {
        "--model-path": str(MODEL), "--host": "127.0.0.1", "--port": "30000", "--device": "cpu", "--dtype": "float32",
        "--context-length": "1024", "--attention-backend": "torch_native", "--sampling-backend": "pytorch",
        "--grammar-backend": "none", "--max-total-tokens": "4096", "--random-seed": "0", "--weight-version": "0",
        "--cuda-graph-backend-decode": "disabled", "--cuda-graph-backend-prefill": "disabled",
    }  # fmt: skip
    assert {name: value_of(arguments, name) for name in expected} == expected
    assert {"--sleep-on-idle", "--disable-overlap-schedule", "--skip-server-warmup"} <= set(arguments)
    assert "--tensor-parallel-size" not in arguments
    assert arguments[-2:] == ["--log-level", "debug"]


def test_the_command_of_a_cuda_engine() -> None:
    arguments = argv(EngineSection(device="cuda", gpus_per_engine=2, attention_backend="fa3", mem_fraction_static=0.6))
    expected = {
        "--device": "cuda", "--tensor-parallel-size": "2", "--attention-backend": "fa3", "--mem-fraction-static": "0.6",
    }  # fmt: skip
    assert {name: value_of(arguments, name) for name in expected} == expected
    # None of the CPU's restrictions, and the size of the KV cache is SGLang's affair.
    for name in ("--sleep-on-idle", "--disable-overlap-schedule", "--sampling-backend", "--max-total-tokens"):
        assert name not in arguments


BASE = {
    "PATH": "/bin", "HF_TOKEN": "secret", "OPENAI_API_KEY": "secret", "CUDA_VISIBLE_DEVICES": "0,1,2,3",
    "SGLANG_USE_CPU_ENGINE": "1", "NCCL_DEBUG": "INFO", "TMPDIR": "/elsewhere",
}  # fmt: skip


def test_the_environment_of_a_cpu_engine(tmp_path: Path) -> None:
    env = server_environment(BASE, EngineSection(), temporary=tmp_path)
    assert "secret" not in env.values()
    assert env["TMPDIR"] == env[leftovers.TEMPORARY_VARIABLE] == str(tmp_path)
    assert (env["CUDA_VISIBLE_DEVICES"], env["SGLANG_PLATFORM"], env["HF_HUB_OFFLINE"]) == (
        "",
        "miles_verifiers_cpu",
        "1",
    )
    assert "SGLANG_USE_CPU_ENGINE" not in env
    assert (env["PATH"], env["NCCL_DEBUG"]) == ("/bin", "INFO")


def test_the_environment_of_a_cuda_engine(tmp_path: Path) -> None:
    config = EngineSection(device="cuda")
    env = server_environment(BASE, config, temporary=tmp_path, gpu_ids=(2, 3))
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "SGLANG_PLATFORM" not in env
    assert server_environment(BASE, config, temporary=tmp_path)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_the_platform_is_declared_under_the_name_that_the_environment_asks_for() -> None:
    from importlib.metadata import entry_points

    (entry,) = entry_points(group="sglang.srt.platforms", name="miles_verifiers_cpu")
    assert entry.value == "miles_verifiers.engine.platform:activate"


@pytest.mark.parametrize(
    ("arguments", "cpu"),
    [
        (["--device", "cpu"], True),
        (["--device=cpu"], True),
        (["--device", "cuda", "--dtype", "cpu"], False),
        ([], False),
    ],
)
def test_children_are_forked_on_cpu_only(arguments: list[str], cpu: bool) -> None:
    assert launch.wants_cpu(arguments) is cpu


# --- HTTP


class Engine(BaseHTTPRequestHandler):
    """Answers as SGLang does. `replies` maps a path to (status, body) or to a function of the request's body."""

    replies: dict[str, Any]
    asked: list[tuple[str, Any]]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.asked.append((self.path, body))
        reply = self.replies[self.path.split("?")[0]]
        status, answer = reply(body) if callable(reply) else reply
        raw = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def fake() -> Iterator[tuple[str, dict[str, Any], list[tuple[str, Any]]]]:
    replies: dict[str, Any] = {}
    asked: list[tuple[str, Any]] = []
    handler = type("Handler", (Engine,), {"replies": replies, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", replies, asked
    server.shutdown()
    server.server_close()


def test_calls_return_any_status_and_any_body(fake: Any) -> None:
    url, replies, asked = fake
    replies |= {"/json": (200, {"a": 1}), "/bad": (400, {"message": "no"}), "/text": (500, "oops"), "/none": (200, "")}
    assert calls.call(f"{url}/json", {"x": 2}, timeout=5) == (200, {"a": 1})
    assert calls.call(f"{url}/bad", timeout=5) == (400, {"message": "no"})
    assert calls.call(f"{url}/text", timeout=5) == (500, "oops")
    assert calls.call(f"{url}/none", timeout=5) == (200, None)
    assert asked[0] == ("/json", {"x": 2})


def test_silence_is_told_apart_from_an_answer(fake: Any) -> None:
    url, replies, _ = fake
    with pytest.raises(calls.NoAnswer):
        calls.call(f"http://127.0.0.1:{free_port()}/x", timeout=5)

    def slow(_: Any) -> tuple[int, str]:
        time.sleep(1.0)
        return 200, "late"

    replies["/slow"] = slow
    with pytest.raises(calls.NoAnswer):
        calls.call(f"{url}/slow", timeout=0.2)


def test_proxies_of_the_user_are_not_asked(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url, replies, _ = fake
    replies["/x"] = (200, "direct")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{free_port()}")
    assert calls.call(f"{url}/x", timeout=5) == (200, "direct")


# --- life cycle, with a program of ours in SGLang's place

HEALTHY = """
import http.server, json, sys
version = "0"
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_): pass
    def reply(self, status, body):
        raw = json.dumps(body).encode()
        self.send_response(status); self.send_header("Content-Length", str(len(raw))); self.end_headers(); self.wfile.write(raw)
    def do_GET(self):
        self.reply(200, {"weight_version": version})
    def do_POST(self):
        global version
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if MODE == "refuses": return self.reply(400, {"success": False, "message": "wrong shapes"})
        if MODE == "dies": print("boom: scheduler", flush=True); import os; os._exit(9)
        if MODE != "forgets": version = body["weight_version"]
        self.reply(200, {"success": True, "message": "ok"})
print("server_args=...", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., EngineServer]]:
    """engine(program, **fields of EngineSection) -> an EngineServer that runs the program; stopped at the end."""
    made: list[EngineServer] = []

    def make(program: str, **fields: Any) -> EngineServer:
        port = fields.pop("port", None) or free_port()
        server = EngineServer(
            EngineSection(**fields), python=Path(sys.executable), model=tmp_path, dtype="float32", context_length=64,
            port=port, log=tmp_path / "logs" / "engine.log",
        )  # fmt: skip
        server.argv[1:] = ["-c", program, str(port)]
        made.append(server)
        return server

    yield make
    for server in made:
        server.stop()


def healthy(mode: str = "") -> str:
    return f"MODE = {mode!r}\n{HEALTHY}"


def test_a_healthy_engine_starts_answers_and_stops(engine: Callable[..., EngineServer], tmp_path: Path) -> None:
    with engine(healthy()) as server:
        server.check()
        server.update_weights_from_disk(tmp_path, "7", timeout=5)
        assert server.model_info()["weight_version"] == "7"
        assert server.pid is not None
        temporary = Path(psutil.Process(server.pid).environ()["TMPDIR"])
        assert temporary.is_dir()
    assert not psutil.pid_exists(server.pid)
    assert not temporary.exists()
    server.stop()
    with pytest.raises(EngineError, match="was killed by SIGKILL"):
        server.check()


def test_progress_says_what_the_engine_does(
    engine: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr("miles_verifiers.system.progress.report", lambda text, *_: said.append(text))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("Load weight begin. Of an earlier server.\n")
    server = engine("print('server_args=', flush=True); import time; time.sleep(60)", start_timeout=1.5)
    server.start()
    with pytest.raises(EngineError, match="did not answer within 2 s"):
        server.wait_ready()
    assert said[-1] == f"engine on port {server.port}: starts its processes"


def test_an_engine_that_dies_at_start_shows_its_own_last_lines(
    engine: Callable[..., EngineServer], tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("line of an earlier server\n")
    server = engine("print('no such model'); raise SystemExit(3)")
    server.start()
    with pytest.raises(EngineError, match="ended with exit code 3") as error:
        server.wait_ready()
    assert (error.value.returncode, error.value.tail) == (3, ["no such model"])
    assert str(tmp_path / "logs" / "engine.log") in error.value.where


def test_a_port_in_use_is_said_before_anything_starts(engine: Callable[..., EngineServer], tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = engine(healthy(), port=listener.getsockname()[1])
        with pytest.raises(HostError, match="cannot be used: Address already in use"):
            server.start()
    assert server.pid is None
    # Negative control: the same port, free again.
    server.start()
    server.wait_ready()


@pytest.mark.parametrize(
    ("mode", "said", "code"),
    [
        ("refuses", "did not take the weights of .*: wrong shapes", None),
        ("forgets", "shows version '0', not '7'", None),
        ("dies", "ended with exit code 9", 9),
    ],
)
def test_weights_that_did_not_arrive(
    engine: Callable[..., EngineServer], tmp_path: Path, mode: str, said: str, code: int | None
) -> None:
    with engine(healthy(mode)) as server:
        with pytest.raises(EngineError, match=said) as error:
            server.update_weights_from_disk(tmp_path, "7", timeout=5)
        assert error.value.returncode == code
        if mode == "dies":
            assert error.value.tail[-1] == "boom: scheduler"


def test_a_folder_that_is_not_there_is_not_sent(engine: Callable[..., EngineServer], tmp_path: Path) -> None:
    with engine(healthy()) as server, pytest.raises(ModelError, match="does not exist"):
        server.update_weights_from_disk(tmp_path / "nowhere", "7", timeout=5)


def test_throughput_is_the_last_figure_of_the_log(engine: Callable[..., EngineServer], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "engine.log"
    log.parent.mkdir()
    log.write_text(decode_line(datetime.now(), 99.0))
    server = engine("import time; time.sleep(60)")
    server.start()
    # Of an earlier server, then two of this one, then one so old that nothing is generated any more.
    assert server.throughput() is None
    for age, rate, shown in ((0, 12.5, 12.5), (0, 53.25, 53.25), (60, 7.0, 0.0)):
        with log.open("a") as file:
            file.write(decode_line(datetime.now() - timedelta(seconds=age), rate))
        assert server.throughput() == shown


def decode_line(at: datetime, rate: float) -> str:
    return (
        f"[{at:%Y-%m-%d %H:%M:%S}] Decode batch, #running-req: 1, #token: 39, token usage: 0.01, cpu graph: False, "
        f"gen throughput (token/s): {rate:.2f}, #queue-req: 0\n[{at:%Y-%m-%d %H:%M:%S}] INFO: GET /health\n"
    )


def test_an_interrupted_start_leaves_no_process(
    engine: Callable[..., EngineServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = engine("import time; time.sleep(60)")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("miles_verifiers.system.progress.report", interrupt)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)


# --- what stays behind


def test_shared_memory_is_told_by_who_maps_it() -> None:
    mine, foreign = (Path(f"/dev/shm/sglang_loads_test{os.getpid()}_{i}.shm") for i in "ab")
    program = (
        "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); "
        "print('mapped', flush=True); time.sleep(60)"
    )
    for file in (mine, foreign):
        file.write_bytes(bytes(4096))
    try:
        with subprocess.Popen([sys.executable, "-c", program, str(mine)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            try:
                assert leftovers.shared_memory(child.pid) == {mine}
            finally:
                child.kill()
        leftovers.remove({mine}, None)
        assert not mine.exists()
        assert foreign.exists()
        assert leftovers.shared_memory(child.pid) == set()
    finally:
        leftovers.remove((mine, foreign), None)


def test_a_server_notices_that_its_owner_was_killed(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    server = (
        "import os, threading, time; from miles_verifiers.engine import launch; "
        f"threading.Thread(target=launch._end_with, args=(int(os.environ['{PARENT_VARIABLE}']),), daemon=True).start(); "
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    owner = (
        f"import os, subprocess, sys, time; os.environ.update({{'{PARENT_VARIABLE}': str(os.getpid()),"
        f" '{leftovers.TEMPORARY_VARIABLE}': {str(temporary)!r}}}); "
        f"subprocess.Popen([sys.executable, '-c', {server!r}], start_new_session=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        orphan = psutil.Process(int(process.stdout.readline()))
        time.sleep(1.2)
        assert orphan.is_running()
        process.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and orphan.is_running() and orphan.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
    assert not temporary.exists()


def test_a_free_port_is_none_that_outgoing_connections_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    range_file = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(server_module, "_EPHEMERAL", range_file)
    range_file.write_text("30000\t60999\n")
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10, "servers that start at the same time get ports of their own"
    assert all(20_000 <= port < 30_000 for port in ports)
    # The control: where such connections get any port, there is none to be kept from.
    range_file.write_text("1024\t65535\n")
    assert 1024 <= free_port() < 65_536


def test_a_free_port_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(server_module.random, "sample", lambda _range, _count: [port])
        assert free_port() != port
