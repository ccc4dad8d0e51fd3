"""The parts of Linux's interface that Python has no function for: numbers, tables and `call`.

Loaded anew for every program, so it imports as little as it can.
"""

from __future__ import annotations

import ctypes
import os

# include/uapi/linux: sched.h, mount.h, prctl.h, seccomp.h, landlock.h
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SECCOMP_MODE_FILTER = 2
SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_ERRNO, SECCOMP_RET_ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
BPF_LOAD, BPF_IF_EQUAL, BPF_IF_AT_LEAST, BPF_RETURN = 0x20, 0x15, 0x35, 0x06
SYS_LANDLOCK_CREATE_RULESET, SYS_LANDLOCK_ADD_RULE, SYS_LANDLOCK_RESTRICT_SELF = 444, 445, 446  # the same everywhere
LANDLOCK_RULE_PATH_BENEATH = 1
LANDLOCK_EXECUTE, LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1, 2, 4, 8
LANDLOCK_ALL = (1 << 13) - 1  # the rights of version 1

# Per machine: seccomp's name of the architecture, and the numbers of the calls that a program is refused: network; new
# processes and threads; signals; looking into others; mounts, namespaces, keys; other processes' limits and priority; and what
# Landlock leaves open on files that it protects. pivot_root is also called by us, before the filter is in force.
# fmt: off
CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (0xC000003E, {
        "socket": 41, "socketpair": 53, "io_uring_setup": 425,
        "clone": 56, "clone3": 435, "fork": 57, "vfork": 58,
        "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438, "perf_event_open": 298,
        "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "move_mount": 429, "fsopen": 430, "pivot_root": 155,
        "chroot": 161, "add_key": 248, "keyctl": 250, "bpf": 321, "userfaultfd": 323, "reboot": 169,
        "prlimit64": 302, "setpriority": 141, "ioprio_set": 251, "sched_setaffinity": 203, "sched_setscheduler": 144,
        "truncate": 76, "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94,
        "fchownat": 260, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "setxattr": 188, "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198,
    }),
    "aarch64": (0xC00000B7, {
        "socket": 198, "socketpair": 199, "io_uring_setup": 425,
        "clone": 220, "clone3": 435,
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438, "perf_event_open": 241,
        "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "move_mount": 429, "fsopen": 430, "pivot_root": 41,
        "chroot": 51, "add_key": 217, "keyctl": 219, "bpf": 280, "userfaultfd": 282, "reboot": 142,
        "prlimit64": 261, "setpriority": 140, "ioprio_set": 30, "sched_setaffinity": 122, "sched_setscheduler": 119,
        "truncate": 45, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54, "utimensat": 88,
        "setxattr": 5, "lsetxattr": 6, "removexattr": 14, "lremovexattr": 15,
    }),
}
# fmt: on

_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | None) -> int:
    """One C function, by name; OSError where it returns -1."""
    sized = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(_libc, name)(*sized)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def refused_calls() -> tuple[int, dict[str, int]]:
    """This machine's row of `CALLS`; OSError where there is none."""
    machine = os.uname().machine
    if machine not in CALLS:
        raise OSError(0, f"no table of system calls for {machine}")
    return CALLS[machine]


def bpf(code: int, if_true: int, if_false: int, value: int) -> bytes:
    """One instruction, a `struct sock_filter`: the jumps count the instructions that are skipped."""
    return bytes((code, 0, if_true, if_false)) + value.to_bytes(4, "little")


def set_filter(instructions: list[bytes]) -> None:
    """Put a seccomp filter over this process and all that it becomes. Needs PR_SET_NO_NEW_PRIVS."""

    class SockFprog(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    code = ctypes.create_string_buffer(b"".join(instructions))
    program = SockFprog(len(instructions), ctypes.addressof(code))
    call("prctl", PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0)
