"""What programs try, and what becomes of it. Each attempt is also made without confinement, where it must succeed.

Some limits depend on the host. There the test demands that what `confinement()` says is what happens, either way.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from code_golf_v1 import sandbox
from code_golf_v1.sandbox import Limits, SandboxError, confinement, features_of_host, run_confined

SHORT = Limits(wall_seconds=1.0)


def unconfined(source, timeout=20, **settings):
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], capture_output=True, text=True, timeout=timeout, **settings
    )


@pytest.fixture(autouse=True)
def scratch(tmp_path, monkeypatch):
    """A place of its own for temporary folders: whatever is left in it afterwards was forgotten."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def processes_with(marker):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if marker.encode() in command and int(entry.name) != os.getpid():
                found.append(int(entry.name))
    return found


def gone(marker, seconds=3.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not processes_with(marker):
            return True
        time.sleep(0.02)
    return False


# ------------------------------------------------------------------------------------------------------ the good case


async def test_a_good_program():
    outcome = await run_confined("print(6 * 7)")
    assert outcome.ok
    assert (outcome.ending, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 0, "42\n", "")
    assert 0 < outcome.seconds < 3


async def test_a_program_may_use_the_standard_library_its_folder_and_any_text():
    outcome = await run_confined(
        "import math, re; open('a', 'w').write('ü'); print(open('a').read(), math.pi > 3, 'λ')"
    )
    assert outcome.stdout == "ü True λ\n", outcome


async def test_seconds_are_the_programs_own():
    outcome = await run_confined("import time; time.sleep(0.3); print(1)")
    assert 0.3 <= outcome.seconds < 1.5


@pytest.mark.parametrize("source", ["", "  \n"])
async def test_nothing_is_not_run(source):
    outcome = await run_confined(source)
    assert outcome.ending == "empty"
    assert not outcome.ok


# ------------------------------------------------------------------------------------------------- ways not to succeed


@pytest.mark.parametrize(
    "trick",
    [
        "import sys; sys.exit(3)",
        "import sys; sys.exit('no')",
        "raise SystemExit(1)",
        "1 / 0",
        "import os, sys; sys.stdout.flush(); os._exit(1)",
        "import os, sys; sys.stdout.flush(); os.abort()",
        "import sys; sys.stdout.flush(); import ctypes; ctypes.string_at(0)",
        "import atexit, os; atexit.register(os._exit, 9)",
    ],
)
async def test_the_right_answer_and_a_bad_end_is_a_failure(trick):
    outcome = await run_confined(f"print(42, flush=True)\n{trick}")
    assert outcome.stdout == "42\n"
    assert not outcome.ok


@pytest.mark.parametrize("end", ["import sys; sys.exit(0)", "import sys; sys.stdout.flush(); import os; os._exit(0)"])
async def test_the_right_answer_and_a_good_end_is_a_success(end):
    outcome = await run_confined(f"print(42)\n{end}")
    assert outcome.ok
    assert outcome.stdout == "42\n"


@pytest.mark.parametrize("source", ["print(", "```bash\nls\n```", "\ufeffprint(1"])
async def test_what_is_no_program_fails(source):
    assert not (await run_confined(source)).ok


async def test_stdin_is_at_its_end():
    source = "import sys; print(repr(sys.stdin.read()))"
    assert (await run_confined(source)).stdout == "''\n"
    assert unconfined(source, input="secret").stdout == "'secret'\n"


# ---------------------------------------------------------------------------------------------------------- time, size


@pytest.mark.parametrize("wait", ["while time.time() < t + 1.5: pass", "time.sleep(1.5)"])
async def test_time_is_bounded(wait):
    source = f"import time; t = time.time()\n{wait}\nprint(42)"
    outcome = await run_confined(source, Limits(wall_seconds=0.5))
    assert outcome.ending == "time"
    assert 0.5 <= outcome.seconds < 1.4
    assert unconfined(source).stdout == "42\n"


async def test_cpu_time_is_bounded():
    source = "import time\nwhile time.process_time() < 1.3: pass\nprint(42)"
    outcome = await run_confined(source, Limits(wall_seconds=30, cpu_seconds=1))
    assert outcome.ending == "signal", outcome
    assert (await run_confined(source, Limits(wall_seconds=30, cpu_seconds=10))).stdout == "42\n"


async def test_a_program_cannot_ignore_its_end():
    source = """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(9)
"""
    started = time.monotonic()
    outcome = await run_confined(source, SHORT)
    assert (outcome.ending, outcome.stdout) == ("time", "ready\n")
    assert time.monotonic() - started < 4


async def test_memory_is_bounded():
    source = "x = bytearray(400 << 20); print(len(x) >> 20)"
    outcome = await run_confined(source)
    assert not outcome.ok
    assert "MemoryError" in outcome.stderr
    assert unconfined(source).stdout == "400\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
async def test_output_is_bounded(stream):
    source = f"import sys\nfor _ in range(200): sys.{stream}.write('x' * 1000)\nprint('end')"
    outcome = await run_confined(source)
    assert outcome.ending == "output"
    assert len(outcome.stdout) + len(outcome.stderr) < 200_000
    assert unconfined(source).stdout.endswith("end\n")


async def test_endless_output_ends_at_once():
    started = time.monotonic()
    outcome = await run_confined("while True: print('x' * 10_000)", Limits(wall_seconds=20))
    assert outcome.ending == "output"
    assert time.monotonic() - started < 5


async def test_a_file_is_bounded(tmp_path):
    source = "open('big', 'wb').write(bytes(2 << 20)); print('written')"
    assert not (await run_confined(source)).ok
    assert unconfined(source, cwd=tmp_path).stdout == "written\n"


async def test_all_files_together_are_bounded_where_said(tmp_path):
    source = "for i in range(200): open(str(i), 'wb').write(bytes(1 << 16))\nprint('written')"
    bounded = (await confinement())["files"] == "own root"
    assert (await run_confined(source)).ok is not bounded
    assert unconfined(source, cwd=tmp_path).stdout == "written\n"


async def test_open_files_are_bounded(tmp_path):
    source = "f = [open('a', 'w') for _ in range(100)]; print('opened')"
    assert not (await run_confined(source)).ok
    assert unconfined(source, cwd=tmp_path).stdout == "opened\n"


# --------------------------------------------------------------------------------------------- reading, writing, network


async def test_the_environment_is_not_inherited(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf-secret")
    source = "import os; print(sorted(os.environ), os.environ.get('HF_TOKEN'))"
    outcome = await run_confined(source)
    assert outcome.stdout == "['HOME', 'LC_ALL', 'PATH', 'TMPDIR'] None\n"
    assert "hf-secret" in unconfined(source).stdout


@pytest.fixture
def other_process():
    """The kernel shows what a process was started with: one that was started with a secret."""
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env={"HF_TOKEN": "hf-secret"}) as process:
        yield process.pid
        process.communicate(b"\n")


async def test_the_environment_of_other_processes_cannot_be_read_where_said(other_process):
    source = f"assert 'hf-secret' in open('/proc/{other_process}/environ').read(); print('read')"
    hidden = (await confinement())["files"] in ("own root", "landlock")
    assert (await run_confined(source)).ok is not hidden
    assert unconfined(source).stdout == "read\n"


async def test_the_supervisors_memory_and_answer_are_out_of_reach():
    source = "import os; open(f'/proc/{os.getppid()}/environ').read(); print('read')"
    assert not (await run_confined(source)).ok
    assert unconfined(source).stdout == "read\n"
    forged = 'import os, json; open(f"/proc/{os.getppid()}/fd/1", "w").write(json.dumps({}))'
    assert not (await run_confined(forged)).ok


async def test_files_of_the_host_cannot_be_read_where_said(tmp_path):
    tmp_path.chmod(0o755)
    secret = tmp_path / "token"
    secret.write_text("secret")
    source = f"print(open({str(secret)!r}).read())"
    hidden = (await confinement())["files"] in ("own root", "landlock")
    assert (await run_confined(source)).ok is not hidden
    assert unconfined(source).stdout == "secret\n"


async def test_nothing_outside_its_folder_can_be_written_where_said(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    source = f"open({str(outside / 'file')!r}, 'w').write('x'); print('written')"
    protected = (await confinement())["files"] in ("own root", "landlock")
    assert (await run_confined(source)).ok is not protected
    assert list(outside.iterdir()) == [] or not protected
    assert unconfined(source).stdout == "written\n"


@pytest.mark.parametrize(
    "change",
    [
        "os.truncate(file, 0)",
        "os.chmod(file, 0)",
        "os.utime(file, (0, 0))",
        "os.chown(file, -1, -1)",
        "os.unlink(file)",
    ],
)
async def test_without_a_root_of_its_own_files_cannot_be_changed_otherwise_either(tmp_path, change):
    tmp_path.chmod(0o777)
    file = tmp_path / "precious"
    file.write_text("precious")
    source = f"import os; file = {str(file)!r}; {change}; print('changed')"
    assert await run_or_refused(source, ["calls", "paths"]) in (None, "failed")
    assert file.read_text() == "precious"
    assert unconfined(source).stdout == "changed\n"


async def test_the_own_root_is_read_only():
    source = """
import os, sys
for folder in ("/", os.path.dirname(os.__file__), "/usr/lib", "/etc", "/dev"):
    try:
        open(folder + "/written-by-a-program", "w")
        print(folder)
    except OSError:
        pass
"""
    writable = (await confinement())["files"] == "as the user's" and os.access("/", os.W_OK)
    assert bool((await run_confined(source)).stdout) is writable


async def test_no_socket_reaches_a_local_listener_where_said():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2); print('connected')"
        reached = (await run_confined(source)).ok
        assert reached is ((await confinement())["network"] == "open")
        assert unconfined(source).stdout == "connected\n"


@pytest.mark.parametrize("features", [["calls"], ["network"], ["users", "network"]])
async def test_each_way_to_cut_the_network_off_suffices(features):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2)"
        assert await run_or_refused(source, features) in (None, "failed")
        assert await run_or_refused(source, []) == "succeeded"


# ------------------------------------------------------------------------------------------------------------ processes


async def test_a_fork_bomb_goes_off_nowhere():
    marker = "fork-bomb-3b1f"
    bomb = f"import os  # {marker}\nwhile True:\n  try: os.fork()\n  except OSError: pass"
    outcome = await run_confined(bomb, SHORT)
    assert outcome.ending in ("time", "signal")
    # How many there ever were shows in how fast a machine of two cores still is.
    assert (await run_confined("print(1)")).seconds < 1


async def test_processes_and_threads_are_refused_where_said():
    fork = "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)\nprint('forked')"
    thread = "import threading; t = threading.Thread(target=print, args=('ran',)); t.start(); t.join()"
    refused = "calls" in features_of_host() or os.geteuid() != 0
    assert (await run_confined(fork)).ok is not refused
    assert (await run_confined(thread)).ok is not refused
    assert unconfined(fork).stdout == "forked\n"
    assert unconfined(thread).stdout == "ran\n"


def daemon(marker):
    """A program that leaves a grandchild in a session of its own, which ignores every signal that can be ignored."""
    rest = f"import signal, time; [signal.signal(s, signal.SIG_IGN) for s in (1, 2, 15)]; time.sleep(20)  # {marker}"
    return f"""
import os, sys, time
def leave():
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", {rest!r}])
try:
    leave()
except OSError as error:
    print("no process:", error)
time.sleep(0.4)
print("done")
"""


@pytest.mark.parametrize("features", [None, [], ["processes"], ["users", "processes"]])
async def test_no_process_outlives_its_program(features):
    marker = f"daemon-{'-'.join(features) if features else features}"
    await run_or_refused(daemon(marker), features)
    assert gone(marker)


async def run_or_refused(source, features):
    """None where the host refuses a feature."""
    try:
        return "succeeded" if (await run_confined(source, features=features)).ok else "failed"
    except SandboxError:
        return None


def test_without_confinement_a_process_outlives_its_program():
    marker = "daemon-unconfined"
    # Its pipes would keep the caller waiting, so there are none.
    subprocess.run([sys.executable, "-I", "-S", "-c", daemon(marker)], stdout=subprocess.DEVNULL, timeout=20)
    survivors = [
        pid for pid in processes_with(marker) if b"time.sleep(20)" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    for pid in survivors:
        os.kill(pid, 9)
    assert len(survivors) == 1


async def test_cancelling_ends_the_program_and_removes_its_folder(scratch):
    before = set(children())
    running = asyncio.create_task(run_confined("import time; time.sleep(20)", Limits(wall_seconds=30)))
    await until(lambda: list(scratch.iterdir()) and set(children()) - before)
    await asyncio.sleep(0.3)
    mine = set(children()) - before
    grandchildren = {pid for child in mine for pid in children(child)}
    assert grandchildren
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not alive(mine | grandchildren)


def test_a_program_ends_with_its_caller(tmp_path, scratch):
    script = f"""
import asyncio, sys, tempfile
sys.path.insert(0, {str(Path(sandbox.__file__).parent.parent)!r})
tempfile.tempdir = {str(tmp_path)!r}
from code_golf_v1.sandbox import Limits, run_confined
asyncio.run(run_confined("import time; time.sleep(20)", Limits(wall_seconds=30)))
"""
    with subprocess.Popen([sys.executable, "-c", script]) as caller:
        wait_until(lambda: [pid for child in children(caller.pid) for pid in children(child)])
        time.sleep(0.3)
        below = [pid for child in children(caller.pid) for pid in (child, *children(child))]
        assert len(below) == 2
        caller.kill()
    wait_until(lambda: not alive(below))


def alive(pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def children(pid=None):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if int(parent) == (pid or os.getpid()):
                found.append(int(entry.name))
    return found


async def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------------- what is refused


async def test_a_feature_that_cannot_be_had_is_an_error_not_a_program_without_it():
    # In a user namespace whose groups are locked, the user cannot be changed: refused with or without user namespaces.
    with pytest.raises(SandboxError, match="identity"):
        await run_confined("print(1)", features=["users", "identity"])


async def test_an_unknown_feature_is_an_error():
    with pytest.raises(SandboxError, match="magic"):
        await run_confined("print(1)", features=["magic"])


async def test_many_at_once():
    outcomes = await asyncio.gather(*(run_confined(f"print({i})") for i in range(24)))
    assert [outcome.stdout for outcome in outcomes] == [f"{i}\n" for i in range(24)]


async def test_what_holds_is_said():
    said = await confinement()
    assert set(said) == {"network", "files", "processes", "identity", "calls", "resources"}
    assert json.dumps(said)
