"""Ray actors: in the interpreter that was asked for, waited for with deadlines, their failures told apart."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from miles_verifiers.config import loading
from miles_verifiers.errors import ComponentError, EngineError, ModelError, RolloutError
from miles_verifiers.system import environ
from miles_verifiers.training import cluster
from miles_verifiers.training.preflight import StackWorker

TINY = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_hidden_layers": 2, "vocab_size": 512, "max_position_embeddings": 128, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip


# Workers do not see this folder (the driver's is kept off their path), so the class below travels with its code.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", autouse=True)
def ray_here() -> Iterator[None]:
    # A short folder: the address of a unix socket may have 107 characters, and pytest's own folders are long.
    with tempfile.TemporaryDirectory(prefix="mv-", ignore_cleanup_errors=True) as folder:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        with cluster.local_cluster(num_gpus=0, folder=Path(folder)):
            yield


class Worker:
    def fail(self, kind: str) -> None:
        if kind == "ours":
            raise ModelError("no tokenizer", where="models/x", next_step="add it")
        if kind == "foreign":
            raise ValueError("not ours")
        os._exit(7)

    def sleep(self) -> None:
        time.sleep(60)

    def answer(self) -> int:
        return 42


@pytest.fixture
def worker() -> object:
    return cluster.start_actor(Worker, python=Path(sys.executable))


def test_a_worker_runs_in_the_interpreter_that_was_asked_for() -> None:
    actor = cluster.start_actor(StackWorker, python=Path(sys.executable))
    (seen,) = cluster.wait([actor.look.remote()], what="look", timeout=60)
    assert Path(seen["executable"]).parent == Path(sys.executable).parent
    assert set(seen["packages"]) == {"torch", "sglang", "megatron-core", "ray", "transformers", "openai"}


def test_the_trainers_worker_builds_a_model_of_one_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    actor = cluster.start_actor(StackWorker, python=Path(sys.executable))
    settings = loading.load("cpu").training
    (layer,) = cluster.wait([actor.one_layer.remote(str(tmp_path), settings, "float32")], what="layer", timeout=60)
    assert layer["logits"] == [4, 256]
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "gpt2"}))
    with pytest.raises(ModelError, match="'gpt2' is not supported"):
        cluster.wait([actor.one_layer.remote(str(tmp_path), settings, "float32")], what="layer", timeout=60)


def test_foreign_code_sees_an_allow_list_of_variables_and_ours_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    # Set where Ray's own processes inherit it: through the runtime environment, as a driver's variables are.
    secrets = {
        "HF_TOKEN": "x",
        "WANDB_API_KEY": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "JUDGE_API_KEY": "x",
        "COMPANY": "x",
    }

    class Look:
        def variables(self) -> tuple[list[str], str]:
            return list(os.environ), Path("/proc/self/environ").read_text()

    foreign = cluster.start_actor(Look, python=Path(sys.executable), env=secrets, pass_variables=["JUDGE_API_KEY"])
    ours = cluster.start_actor(Look, python=Path(sys.executable), env=secrets)
    (names, image), (all_names, _) = cluster.wait(
        [foreign.variables.remote(), ours.variables.remote()], what="look", timeout=60
    )
    assert set(names) & set(secrets) == {"JUDGE_API_KEY"}
    assert "HF_TOKEN" not in image
    assert set(secrets) <= set(all_names), "the control: without the allow-list they are there"
    assert {"PATH", "HOME"} <= set(names)


DRIVER = """
import json, sys, tempfile
import ray
from pathlib import Path
from miles_verifiers.provision import expectations
from miles_verifiers.training import cluster
from miles_verifiers.training.preflight import StackWorker

python = Path(sys.executable)
with tempfile.TemporaryDirectory(prefix="mv-", ignore_cleanup_errors=True) as folder:
    with cluster.local_cluster(num_gpus=0, folder=Path(folder)):
        actor = cluster.start_actor(StackWorker, python=python)
        plain = ray.remote(lambda: sys.path).remote()
        seen, path = cluster.wait([actor.look.remote(), plain], what="look", timeout=90)
below = tuple(Path(p) for p in sys.path if p.endswith("site-packages") and not p.startswith(sys.prefix))
rows = expectations.compare(expectations.Expected("stack", python, {}, frozenset(), below), seen)
print(json.dumps([[row.what for row in rows if not row.ok], path]))
"""


@pytest.mark.parametrize("way", ["PYTHONPATH", "uv run"])
def test_what_redirects_a_driver_does_not_reach_its_workers(way: str, tmp_path: Path) -> None:
    # A project of the user's own, with a package that would be imported instead of the stack's.
    (tmp_path / "transformers.py").write_text("raise SystemExit('the wrong transformers')")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0"\nrequires-python = ">=3.11"\n')
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-P", "-c", DRIVER]
    if way == "PYTHONPATH":
        env["PYTHONPATH"] = str(tmp_path)
        # -I keeps it from the driver itself; Ray would hand it on to the workers all the same.
        command[1] = "-I"
    else:
        env |= environ.RAY
        uv = shutil.which("uv")
        assert uv is not None
        command = [uv, "run", "--offline", "--no-project", "--python", sys.executable, *command]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    off, path_of_a_plain_task = json.loads(done.stdout.strip().splitlines()[-1])
    assert off == []
    if way == "PYTHONPATH":
        assert str(tmp_path) in path_of_a_plain_task, "the control: it reaches what is not started by us"


def test_an_error_of_ours_comes_out_as_itself(worker: object) -> None:
    with pytest.raises(ModelError) as caught:
        cluster.wait([worker.fail.remote("ours")], what="work", timeout=60)
    assert (caught.value.where, caught.value.next_step) == ("models/x", "add it")


def test_a_foreign_error_is_named(worker: object) -> None:
    with pytest.raises(RolloutError, match="work failed: ValueError: not ours"):
        cluster.wait([worker.fail.remote("foreign")], what="work", timeout=60, error=RolloutError)


def test_a_dead_worker_is_noticed(worker: object) -> None:
    with pytest.raises(RolloutError, match="work: the worker process died"):
        cluster.wait([worker.fail.remote("exit")], what="work", timeout=60, error=RolloutError)


def test_a_wait_has_a_deadline(worker: object) -> None:
    with pytest.raises(ComponentError, match="work took longer than 1 s"):
        cluster.wait([worker.sleep.remote()], what="work", timeout=1)


def test_a_tick_may_stop_a_wait(worker: object) -> None:
    def engine_died(_seconds: float) -> None:
        raise EngineError("the engine died", returncode=-9)

    with pytest.raises(EngineError):
        cluster.wait([worker.sleep.remote()], what="work", timeout=60, on_tick=engine_died)


def test_a_cheap_question_is_not_waited_for(worker: object) -> None:
    assert cluster.ask(worker.answer.remote(), timeout=60) == 42
    assert cluster.ask(worker.sleep.remote(), timeout=0.2) is None
