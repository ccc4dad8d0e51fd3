"""Every limit that a program runs under, taken on by the program's own process before it becomes the program.

The resource limits always hold. The features below are asked for by name; one that the host refuses is an OSError,
never a program that runs without it. Loaded anew for every program, so it imports as little as it can.

    users      a user namespace, by which an ordinary user may have the next three
    network    a network namespace without a working interface
    processes  a process namespace: all its processes end with the program
    files      a root of its own: the interpreter and system libraries read-only, /tmp in memory, nothing else
    identity   user and group nobody instead of root
    paths      Landlock: nothing but the interpreter's files can be read, nothing outside the program's folder written
    calls      a seccomp filter: no sockets, processes, threads, signals, tracing, mounts, changes of files' attributes
"""

# Importing pathlib would take longer than all that happens here.
# ruff: noqa: PTH102, PTH103, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211
from __future__ import annotations

import os
import resource
import signal
import sys

from . import kernel as k

FEATURES = ("users", "network", "processes", "files", "identity", "paths", "calls")
NOBODY = 65534
PROGRAM = "program.py"
OPEN_FILES = 32
OWN_FOLDER = "/tmp"  # noqa: S108 - of the program's own root, where it is the one folder that can be written


def enter_namespaces(features: list[str]) -> None:
    """Leave the host's namespaces. The process namespace takes in the next child, the others this process itself."""
    flags = {
        "users": k.CLONE_NEWUSER,
        "network": k.CLONE_NEWNET,
        "processes": k.CLONE_NEWPID | k.CLONE_NEWIPC,
        "files": k.CLONE_NEWNS,
    }
    wanted = sum(flag for name, flag in flags.items() if name in features)
    if not wanted:
        return
    user, group = os.geteuid(), os.getegid()
    k.call("unshare", wanted)
    if "users" in features:
        # Inside, the user is nobody and none else exists; "deny" is what the kernel asks for before gid_map.
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)


def become(
    folder: str, features: list[str], limits: dict[str, int], readable: list[str], stdout: int, stderr: int
) -> None:
    """Turn this process into the program that lies in `folder`. Returns only by raising OSError."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    if "files" in features:
        folder = enter_own_root(folder, limits, readable)
    os.chdir(folder)
    for fd, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(fd, target)
    if "identity" in features:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    k.call("prctl", k.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after setresuid, which clears it
    k.call("prctl", k.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if "paths" in features:
        restrict_paths(folder, readable)
    limit_resources(limits)
    if "calls" in features:
        refuse_calls()
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": folder, "TMPDIR": folder}
    os.execve(interpreter(), [interpreter(), "-I", "-S", "-B", PROGRAM], environment)  # noqa: S606


def limit_resources(limits: dict[str, int]) -> None:
    for name, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, 0),  # no process, no thread; the kernel exempts root, hence the feature "calls"
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(name)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (bound, bound))


def enter_own_root(folder: str, limits: dict[str, int], readable: list[str]) -> str:
    """Change to a root that lies in memory and holds `readable` and /tmp; the program's folder there.

    It is mounted over `folder`, within this mount namespace alone: the host sees nothing of it, and nothing of it is
    left when the last process is gone.
    """
    with open(f"{folder}/{PROGRAM}", "rb") as file:
        source = file.read()
    k.call("mount", None, b"/", None, k.MS_REC | k.MS_PRIVATE, None)
    _mount_memory(folder, "size=1m,mode=0755")
    for path in readable:
        _show(path, folder + path)
    os.mkdir(folder + OWN_FOLDER)
    # Two more inodes than files: the folder itself and the program.
    _mount_memory(folder + OWN_FOLDER, f"size={4 * limits['file_bytes']},nr_inodes={limits['files'] + 2},mode=0777")
    with open(f"{folder}{OWN_FOLDER}/{PROGRAM}", "wb") as file:
        file.write(source)
    os.chdir(folder)
    k.call("syscall", k.refused_calls()[1]["pivot_root"], b".", b".")  # the old root now lies on top of the new one ...
    k.call("umount2", b".", k.MNT_DETACH)  # ... until here; pivot_root(2) describes it
    k.call("mount", None, b"/", None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID | k.MS_NODEV, None)
    return OWN_FOLDER


def _mount_memory(path: str, options: str) -> None:
    k.call("mount", b"tmpfs", path.encode(), b"tmpfs", k.MS_NOSUID | k.MS_NODEV, options.encode())


def _show(path: str, place: str) -> None:
    """Make the host's `path` readable at `place`."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.isdir(path):
        os.makedirs(place, exist_ok=True)
    else:
        os.close(os.open(place, os.O_CREAT | os.O_EXCL, 0o644))
    k.call("mount", path.encode(), place.encode(), None, k.MS_BIND | k.MS_REC, None)
    kept = os.statvfs(place).f_flag & 0b1111  # ro, nosuid, nodev, noexec: a user namespace may not drop those there are
    k.call("mount", None, place.encode(), None, k.MS_REMOUNT | k.MS_BIND | k.MS_RDONLY | k.MS_NOSUID | kept, None)


def restrict_paths(folder: str, readable: list[str]) -> None:
    """Landlock, version 1 of its interface (Linux 5.13)."""
    read = k.LANDLOCK_EXECUTE | k.LANDLOCK_READ_FILE | k.LANDLOCK_READ_DIR
    ruleset = k.call("syscall", k.SYS_LANDLOCK_CREATE_RULESET, k.LANDLOCK_ALL.to_bytes(8, sys.byteorder), 8, 0)
    for path, rights in [*((path, read) for path in readable), (folder, k.LANDLOCK_ALL)]:
        fd = os.open(path, os.O_PATH)
        allowed = rights if os.path.isdir(path) else rights & ~k.LANDLOCK_READ_DIR
        rule = allowed.to_bytes(8, sys.byteorder) + fd.to_bytes(4, sys.byteorder)
        k.call("syscall", k.SYS_LANDLOCK_ADD_RULE, ruleset, k.LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        os.close(fd)
    k.call("syscall", k.SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def refuse_calls() -> None:
    """The listed system calls fail with EPERM; those in another architecture's numbering end the program."""
    architecture, refused = k.refused_calls()
    eperm = 1
    lines = [
        k.bpf(k.BPF_LOAD, 0, 0, 4),  # seccomp_data.arch
        k.bpf(k.BPF_IF_EQUAL, 1, 0, architecture),
        k.bpf(k.BPF_RETURN, 0, 0, k.SECCOMP_RET_KILL_PROCESS),
        k.bpf(k.BPF_LOAD, 0, 0, 0),  # seccomp_data.nr
        k.bpf(k.BPF_IF_AT_LEAST, 0, 1, 0x40000000),  # x86-64's second numbering, x32
        k.bpf(k.BPF_RETURN, 0, 0, k.SECCOMP_RET_KILL_PROCESS),
    ]
    for number in refused.values():
        lines.append(k.bpf(k.BPF_IF_EQUAL, 0, 1, number))
        lines.append(k.bpf(k.BPF_RETURN, 0, 0, k.SECCOMP_RET_ERRNO | eperm))
    lines.append(k.bpf(k.BPF_RETURN, 0, 0, k.SECCOMP_RET_ALLOW))
    k.set_filter(lines)


def interpreter() -> str:
    """The installation's own executable: a venv's link would not resolve in another root."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def readable_paths() -> list[str]:
    """What an interpreter needs: its installation, the loader and system libraries. Outermost folders, each once."""
    installation = (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(interpreter()))
    wanted = {os.path.realpath(path) for path in installation}
    wanted |= {"/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/etc/ld.so.cache"}
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:  # libraries in unusual places
        wanted |= {os.path.dirname(line.split(maxsplit=5)[-1].strip()) for line in file if ".so" in line}
    outermost: list[str] = []
    for path in sorted(path for path in wanted if len(path) > 1 and os.path.exists(path)):
        if not any(path.startswith(f"{outer}/") for outer in outermost):
            outermost.append(path)
    return outermost
