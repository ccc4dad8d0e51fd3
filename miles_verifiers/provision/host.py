"""`doctor`'s looks at the machine: disk, memory, limits, ports, caches, GPU driver."""

from __future__ import annotations

import os
import re
import resource
import shutil
import socket
from pathlib import Path

import psutil

from miles_verifiers.provision.findings import Finding
from miles_verifiers.provision.stack import find_gpus
from miles_verifiers.record.rundir import cache_root
from miles_verifiers.system import process

_DISK_GB = 14
_MEMORY_GB = 12
_OPEN_FILES = 4096
"""Ray holds several for each worker, SGLang one for each connection."""
_DRIVER = Path("/proc/driver/nvidia/version")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def gpu() -> Finding:
    gpus = find_gpus()
    if not gpus:
        return Finding("GPU", "none: the job runs on the CPU")
    try:
        text = _DRIVER.read_text(encoding="utf-8")
    except OSError:
        return Finding("GPU", ", ".join(gpus), f"there is no {_DRIVER}: start the container with its GPUs (--gpus all)")
    version = re.search(r"\b\d+\.\d+(\.\d+)?\b", text)
    return Finding("GPU", f"{', '.join(gpus)}; driver {version[0] if version else text.splitlines()[0]}")


def disk() -> Finding:
    free = {f"{name} {path}": _free(path) for name, path in (("cache", cache_root()), ("runs", Path.cwd()))}
    short = [name for name, gigabytes in free.items() if gigabytes < _DISK_GB]
    found = ", ".join(f"{name}: {gigabytes:.0f} GB free" for name, gigabytes in free.items())
    next_step = f"free {_DISK_GB} GB (miles-verifiers cache prune), or set MILES_VERIFIERS_CACHE / --run-dir"
    return Finding("disk", found, next_step if short else "")


def memory() -> Finding:
    available, limit = psutil.virtual_memory().available / 1e9, _cgroup_limit()
    found = f"{available:.0f} of {psutil.virtual_memory().total / 1e9:.0f} GB available, {os.cpu_count()} cores"
    if limit is not None:
        found += f", limited to {limit:.0f} GB by the container"
        available = min(available, limit)
    return Finding("memory", found, f"the job needs {_MEMORY_GB} GB" if available < _MEMORY_GB else "")


def shared_memory() -> Finding:
    free = shutil.disk_usage("/dev/shm").free / 1e9  # noqa: S108 - looked at, not written to
    problem = "Ray wants 1 GB: start the container with --shm-size=1g" if free < 1 else ""
    return Finding("shared memory", f"{free:.1f} GB free in /dev/shm", problem)


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = f"raise it: ulimit -n {_OPEN_FILES}" if 0 <= soft < _OPEN_FILES else ""
    return Finding("open files", f"{soft} for a process, can be raised to {hard}", problem)


def ports() -> Finding:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="utf-8").split())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # engines, Ray and the trainers' process group listen on loopback
        probe.listen()
    problem = (
        "engines and Ray take dozens of free ports: widen net.ipv4.ip_local_port_range" if high - low < 1000 else ""
    )
    return Finding("ports", f"loopback can be listened on; {low} to {high} are given out", problem)


def caches() -> Finding:
    hub = os.environ.get("HF_HUB_CACHE") or str(Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    uv = os.environ.get("UV_CACHE_DIR") or str(Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "uv")
    found, problem = [], ""
    for name, text in (("ours", str(cache_root())), ("uv", uv), ("Hugging Face", hub)):
        path = Path(text).expanduser()
        there = next(each for each in (path, *path.parents) if each.exists())
        found.append(f"{name} {path}" + ("" if path.exists() else " (not there yet)"))
        if not os.access(there, os.W_OK):
            problem = (
                f"{there} cannot be written: name another folder in MILES_VERIFIERS_CACHE, UV_CACHE_DIR or HF_HOME"
            )
    if _device(Path(uv)) != _device(cache_root()):
        # Not a fault: uv copies where it cannot link, which takes a minute and 6 GB more.
        found.append("uv's lies on another disk than ours: venvs are copies, not hard links")
    return Finding("caches", ", ".join(found), problem)


def variables() -> Finding:
    ours = sorted(name for name in os.environ if name.startswith(("MILES_", "VERIFIERS_CONFIG")))
    dropped = process.redirections()
    found = f"set for us: {', '.join(ours) or 'none'}"
    if dropped:
        found += "; left out of every child: " + ", ".join(f"{name}={value}" for name, value in sorted(dropped.items()))
    return Finding("variables", found)


def _free(path: Path) -> float:
    there = next(each for each in (path, *path.parents) if each.exists())
    return shutil.disk_usage(there).free / 1e9


def _cgroup_limit() -> float | None:
    try:
        return int(_CGROUP_LIMIT.read_text(encoding="utf-8")) / 1e9
    except (OSError, ValueError):
        return None  # no cgroup of version 2, or "max"


def _device(path: Path) -> int:
    path = path.expanduser()
    return next(each for each in (path, *path.parents) if each.exists()).stat().st_dev
