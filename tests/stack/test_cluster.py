"""Ray actors: in the interpreter that was asked for, waited for with deadlines, their failures told apart."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_verifiers.errors import ComponentError, EngineError, ModelError, RolloutError
from miles_verifiers.training import cluster
from miles_verifiers.training.preflight import StackWorker, check_interpreter


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
    check_interpreter("stack", seen["executable"], Path(sys.executable))
    with pytest.raises(ComponentError, match="another interpreter"):
        check_interpreter("stack", seen["executable"], Path("/usr/bin/python3"))
    assert set(seen["versions"]) == {"torch", "sglang", "megatron-core", "ray", "transformers"}


def test_the_callers_import_path_does_not_reach_a_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sneaky.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    class Look:
        def path(self) -> list[str]:
            return sys.path

    actor = cluster.start_actor(Look, python=Path(sys.executable))
    (path,) = cluster.wait([actor.path.remote()], what="look", timeout=60)
    assert str(tmp_path) not in path


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
