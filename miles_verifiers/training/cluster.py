"""Ray: a local cluster for one run, actors in their role's interpreter, waits with deadlines and watched neighbours."""

from __future__ import annotations

import os
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from miles_verifiers.errors import ComponentError, MilesVerifiersError
from miles_verifiers.system import environ, files, process, progress

OBJECT_STORE_BYTES = 256 * 2**20
"""What crosses between actors is rows of token ids and floats, a few MB a step."""
POLL_S = 0.5


@contextmanager
def local_cluster(num_gpus: int, folder: Path | None = None) -> Iterator[None]:
    """Start Ray on this machine, on loopback, without dashboard; stop it when the block ends.

    Its sockets and logs go into `folder`, by default the process's temporary folder, which whoever started the process
    removes. That must have a short path: the address of a unix socket may have 107 characters.
    """
    temporary = folder or Path(tempfile.gettempdir())
    with _in_an_empty_folder(temporary):
        ray.init(
            address="local",
            num_cpus=os.cpu_count(),
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level="warning",
            log_to_driver=True,
            _temp_dir=str(temporary / "ray"),
            _node_ip_address="127.0.0.1",
        )
    process.arm()
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _in_an_empty_folder(parent: Path) -> Iterator[None]:
    """Ray puts the driver's working folder on every worker's import path (ray/_private/worker.py, 2.60); in the run directory
    that would make packages of its folders."""
    before, empty = Path.cwd(), parent / "cwd"
    empty.mkdir(exist_ok=True)
    os.chdir(empty)
    try:
        yield
    finally:
        os.chdir(before)


def start_actor(
    cls: type,
    *arguments: Any,
    python: Path,
    env: Mapping[str, str] | None = None,
    num_gpus: float = 0,
    pass_variables: Sequence[str] | None = None,
) -> ray.actor.ActorHandle:
    """An actor of `cls` in the interpreter `python`; returns at once.

    `pass_variables` puts it, for foreign code, under the allow-list of `environ` with these names added; None lets it have
    the driver's variables.

    A wrong interpreter gives no error in Ray, only a worker that is started again and again: see to it that `python` was
    probed, and wait for the actor with a deadline.
    """
    # An actor's output reaches the log with a prefix, so that marked progress lines would be noise there.
    env_vars = {"PYTHONPATH": "", progress.CHILD_VARIABLE: "", **(env or {})}
    command = [str(python)] if pass_variables is None else environ.launcher(str(python), pass_variables)
    # Ray joins it with the worker's arguments into a line for bash (ray/_private/runtime_env/context.py, 2.60).
    runtime_env = {"py_executable": shlex.join(command), "env_vars": env_vars}
    # num_cpus=0: on two cores the actors take turns by design; Ray must not make one wait for the other.
    options = {"num_cpus": 0, "num_gpus": num_gpus, "max_restarts": 0, "runtime_env": runtime_env}
    return ray.remote(cls).options(**options).remote(*arguments)


def wait(
    refs: Sequence[Any],
    *,
    what: str,
    timeout: float,
    error: type[ComponentError] = ComponentError,
    on_tick: Callable[[float], None] = lambda _seconds: None,
) -> list[Any]:
    """The results of `refs`. `on_tick(seconds so far)` is called about twice a second and may raise to stop waiting.

    Errors of ours that an actor raised come out as themselves, anything else, and the deadline, as `error`.
    """
    begun = time.monotonic()
    pending = list(refs)
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
        for ref in done:
            _get(ref, what, error)  # a failed actor is reported at once, not when the last of its siblings is done
        seconds = time.monotonic() - begun
        on_tick(seconds)
        if pending and seconds > timeout:
            raise error(
                f"{what} took longer than {timeout:.0f} s",
                next_step="raise its timeout in the configuration, or look into run.log",
            )
    return [_get(ref, what, error) for ref in refs]


def _get(ref: Any, what: str, error: type[ComponentError]) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as failed:
        cause = failed.cause
        if isinstance(cause, MilesVerifiersError):
            raise cause from None
        if (of_the_disk := files.disk_error(cause)) is not None:
            raise of_the_disk from failed
        last = str(failed).strip().splitlines()[-1]
        raise error(f"{what} failed: {last}", next_step="the traceback is in run.log") from failed
    except ray.exceptions.RayActorError as died:
        raise error(
            f"{what}: the worker process died: {' '.join(str(died).split())[:400]}",
            next_step="its last output is in run.log; out of memory shows in dmesg",
        ) from None


def ask(ref: Any, timeout: float) -> Any | None:
    """The result of a cheap question, None where it is not answered in time."""
    try:
        return ray.get(ref, timeout=timeout)
    except ray.exceptions.RayError:
        return None
