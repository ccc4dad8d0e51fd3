"""The real job, stopped and broken in the middle: it ends in time, leaves nothing running, and goes on afterwards.

Run with `nox -s faults`. The tiny model keeps it short; the engine, Ray and Megatron-core are the real ones.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import STOP_S, Run

from miles_verifiers.record.manifest import Manifest

STAGES = (
    "preflight: a look from inside",
    "conversion: ",
    "starting Ray",
    "engine on port",
    "step 1: rollouts",
    "step 2: rollouts",
    "step 2: training",
    "checkpoint 2",
)


@pytest.mark.timeout(1200)
def test_interrupted_at_every_stage_it_stops_in_time_and_goes_on(folder: Path) -> None:
    for stage in STAGES:
        run = Run(folder)
        run.wait_for(stage)
        begun = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        code = run.end(timeout=STOP_S + 5)
        seconds = time.monotonic() - begun
        assert code == 130, run.text
        assert seconds < STOP_S, f"{stage}: {seconds:.1f} s"
        assert run.gone_within(1.0), [p.cmdline() for p in run.processes()]
        assert "goes on where it stopped" in run.text
    run = Run(folder)
    assert run.end(timeout=300) == 0, run.text
    manifest = Manifest.load(folder)
    assert manifest.phases["train"].finished is not None
    assert manifest.phases["train"].figures["resumed_at"] in (1, 2), (
        "the last checkpoint was made in time, or it was not"
    )
    assert len(list((folder / "dump" / "rollout").glob("*.parquet"))) == 3


@pytest.mark.timeout(400)
def test_killed_outright_nothing_outlives_it(folder: Path) -> None:
    run = Run(folder)
    run.wait_for("step 1: rollouts")
    assert len(run.processes()) > 5, "the control: there is something that could outlive it"
    run.kill()


@pytest.mark.timeout(400)
def test_an_engine_that_dies_in_the_middle_is_named_with_its_last_lines(folder: Path) -> None:
    run = Run(folder)
    run.wait_for("step 1: rollouts")
    engine = next(p for p in run.processes() if "miles_verifiers.engine.launch" in p.cmdline())
    engine.kill()
    assert run.end(timeout=60) == 3
    assert "the engine was killed by SIGKILL" in run.text
    assert "engine-0.log" in run.text
    assert run.gone_within(1.0)


@pytest.mark.timeout(400)
def test_an_engine_that_dies_at_start_is_named_with_its_last_lines(folder: Path) -> None:
    run = Run(folder, "--set", 'engine.extra_args=["--no-such-option"]')
    assert run.end(timeout=300) == 3
    assert "the engine ended with exit code 2" in run.text
    assert "--no-such-option" in run.text


@pytest.mark.timeout(400)
def test_a_port_in_use_is_the_users_to_change(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run = Run(folder, "--set", f"engine.port={port}")
        assert run.end(timeout=300) == 2
    assert f"port {port} cannot be used" in run.text
    assert "engine.port" in run.text


class SmallDisk:
    """A disk of its own in memory, seen by those who are started `within`; `fill` leaves no room, `make_room` does."""

    def __init__(self, folder: Path, size: str) -> None:
        folder.mkdir()
        self.folder, self._size = folder, size
        mount = f"mount -t tmpfs -o size={size} none '{folder}' && echo ready && exec sleep 3600"
        self._holder = subprocess.Popen(
            ["unshare", "--mount", "--map-root-user", "sh", "-c", mount], stdout=subprocess.PIPE, text=True
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n", "a mount namespace is needed for this test"
        pid = str(self._holder.pid)
        self.within = ("nsenter", "--user", "--mount", "--preserve-credentials", "--target", pid)

    def fill(self) -> None:
        self._remount(str(self._used() + 16 * 1024))

    def make_room(self) -> None:
        self._remount(self._size)

    def path(self, inside: Path) -> Path:
        """`inside` as seen from out here."""
        return Path(f"/proc/{self._holder.pid}/root{inside}")

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()

    def _used(self) -> int:
        seen = os.statvfs(self.path(self.folder))
        return (seen.f_blocks - seen.f_bfree) * seen.f_frsize

    def _remount(self, size: str) -> None:
        command = [*self.within, "mount", "-o", f"remount,size={size}", str(self.folder)]
        subprocess.run(command, check=True, capture_output=True, timeout=10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path / "disk", "12g")
    yield disk
    disk.close()


@pytest.mark.timeout(900)
def test_a_disk_that_fills_up_is_named_and_the_run_goes_on_afterwards(folder: Path, small_disk: SmallDisk) -> None:
    run_dir = small_disk.folder / "run"
    for stage in ("conversion: ", "step 2: rollouts"):
        run = Run(run_dir, within=small_disk.within)
        run.wait_for(stage)
        small_disk.fill()
        code = run.end(timeout=120)
        assert code == 2, run.text
        assert re.search("No space left on device|free (some|disk) space", run.text), run.text
        assert "Traceback" not in run.text
        assert run.gone_within(1.0)
        small_disk.make_room()
    run = Run(run_dir, within=small_disk.within)
    assert run.end(timeout=300) == 0, run.text
    assert Manifest.load(small_disk.path(run_dir)).phases["train"].figures["resumed_at"] == 1


@pytest.mark.timeout(300)
def test_a_disk_that_fills_up_while_a_venv_is_built_leaves_no_venv(folder: Path, small_disk: SmallDisk) -> None:
    run = Run(folder, within=small_disk.within, MILES_VERIFIERS_CACHE=str(small_disk.folder / "cache"))
    run.wait_for("venv stack-cpu: uv")
    small_disk.fill()
    assert run.end(timeout=120) in (2, 3), run.text
    assert "No space left on device" in run.text
    assert "Traceback" not in run.text
    assert [path.name for path in small_disk.path(small_disk.folder / "cache" / "venvs").glob("stack-cpu-*/bin")] == []
    assert run.gone_within(1.0)
