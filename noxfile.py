"""Sessions of the project. `nox -l` lists them; without `-s` the fast tests run."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.sessions = ["fast"]
nox.options.error_on_external_run = True
nox.options.reuse_existing_virtualenvs = True
nox.options.default_venv_backend = "uv"

SOURCES = ("miles_verifiers", "tests", "bench", "environments", "noxfile.py", "hatch_build.py")
# Ray and engines need a moment to stop; Nox would kill after 0.3 s.
INTERRUPT_S, TERMINATE_S = 12.0, 5.0
COMPILE = (
    "uv",
    "pip",
    "compile",
    "--quiet",
    "--universal",
    "--generate-hashes",
    "--no-emit-index-url",
    "--no-emit-find-links",
)

# Versions of Verifiers that have a lock, each a dependency group of pyproject.toml, with the environment of ours for it.
VERIFIERS = {"0.2.0": "code_golf_v1", "0.2.1": "code_golf_v1", "0.3.1": "code_golf", "0.4.0": "code_golf"}

# One lock per venv: its file, what it locks, what it leaves to the stack.
LOCKS = (
    ("package.txt", ("pyproject.toml",), None),
    ("stack-cpu.txt", ("--group", "stack-cpu"), "stack-cpu.excludes"),
    *(
        (f"env-verifiers-{version}.txt", ("--group", f"env-verifiers-{version.replace('.', '-')}"), "env.excludes")
        for version in VERIFIERS
    ),
    ("publics.txt", ("--group", "publics"), "publics.excludes"),
    ("setup.txt", ("--group", "setup"), None),
    ("test.txt", ("--group", "test"), None),
    ("dev.txt", ("--group", "dev"), None),
)


def _isolated(session: nox.Session) -> None:
    """No import path of the caller's may reach the session's interpreter."""
    session.env["PYTHONPATH"] = None
    session.env["UV_PYTHON"] = None
    session.env["UV_PROJECT_ENVIRONMENT"] = None  # Nox sets it; the product would say that it leaves it out


def _install(session: nox.Session, *locks: str) -> None:
    """The locked packages, then the project itself on top, editable."""
    _isolated(session)
    python = _python(session)
    # One session's venv at a time asks for all its locks, so that a version that two of them name is chosen once.
    arguments = [part for lock in locks for part in ("-r", f"locks/{lock}")]
    session.run_install("uv", "pip", "install", "-q", "--python", python, "--require-hashes", *arguments, external=True)
    session.run_install("uv", "pip", "install", "-q", "--python", python, "--no-deps", "-e", ".", external=True)


def _python(session: nox.Session) -> str:
    return str(Path(session.bin) / "python")


def _job(session: nox.Session, command: str) -> None:
    """A command of the product, from a venv that holds nothing but it."""
    _install(session, "package.txt")
    session.run(
        "miles-verifiers", command, *session.posargs, interrupt_timeout=INTERRUPT_S, terminate_timeout=TERMINATE_S
    )


def _role_python(session: nox.Session, role: str, settings: tuple[str, ...] = ()) -> str:
    """The interpreter of a role, which the product itself builds."""
    _install(session, "package.txt")
    options = [part for setting in settings for part in ("--set", setting)]
    python = session.run("miles-verifiers", "venv", role, "--profile", "cpu", *options, silent=True, stderr=None)
    assert isinstance(python, str)
    return python.strip()


def _role_tests(session: nox.Session, role: str, *folders: str, settings: tuple[str, ...] = ()) -> None:
    """Tests in the interpreter of a role."""
    session.run(
        _role_python(session, role, settings),
        "-P",
        "-m",
        "pytest",
        *folders,
        *session.posargs,
        external=True,
        interrupt_timeout=INTERRUPT_S,
        terminate_timeout=TERMINATE_S,
    )


def _verifiers(version: str) -> tuple[str, ...]:
    """Settings for a version of Verifiers and the environment of ours for it."""
    environment = VERIFIERS[version]
    return (
        f"environment.verifiers='{version}'",
        f"environment.source=environments/{environment}",
        f"environment.taskset={{ id = '{environment.replace('_', '-')}' }}",
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, formatting, and that imports go one way."""
    _install(session, "package.txt", "dev.txt")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("lint-imports", "--no-cache")


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, on the package and this file."""
    _install(session, "package.txt", "dev.txt")
    session.run("mypy")


@nox.session
def fast(session: nox.Session) -> None:
    """Unit and contract tests without torch, under a minute."""
    _install(session, "package.txt", "dev.txt")
    # Half of the time is waiting for child processes and deadlines: three workers are faster on two cores, four are not.
    workers = min(8, max(3, os.cpu_count() or 1))
    session.run("pytest", "tests/fast", "-n", str(workers), *session.posargs)


@nox.session
def stack(session: nox.Session) -> None:
    """Tests that need torch, SGLang and Megatron-core, in an interpreter over the stack."""
    _role_tests(session, "test", "tests/stack")


@nox.session
def contract(session: nox.Session) -> None:
    """The wire, the rollouts and our environment with real renderers and Verifiers, in the environment's interpreter."""
    _role_tests(session, "contract", "tests/contract", "environments/code_golf_v1/tests")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """A benchmark against its peer or limit: `-- wire` names it, `-- wire --help` its options. On a quiet machine."""
    if session.posargs[:1] == ["rollout"]:  # over both of Verifiers' APIs, in an environment's interpreter
        for version in ("0.2.0", "0.4.0"):
            python = _role_python(session, "env", _verifiers(version))
            session.run(python, "-m", "bench", *session.posargs, external=True)
        return
    _install(session, "package.txt")
    session.run("python", "-m", "bench", *session.posargs)


@nox.session
@nox.parametrize("verifiers", list(VERIFIERS))
def compat(session: nox.Session, verifiers: str) -> None:
    """The contract tests on every supported Verifiers, each in its own locked interpreter, with a fake engine.

    On the oldest and the newest also the whole job with the real one.
    """
    tests = f"environments/{VERIFIERS[verifiers]}/tests"
    _role_tests(session, "contract", "tests/contract", tests, settings=_verifiers(verifiers))
    oldest, *_, newest = VERIFIERS
    if verifiers in (oldest, newest):
        _install(session, "package.txt", "test.txt")
        session.run(
            "pytest",
            "tests/e2e/test_versions.py",
            "-k",
            verifiers,
            interrupt_timeout=INTERRUPT_S,
            terminate_timeout=TERMINATE_S,
        )


@nox.session
def faults(session: nox.Session) -> None:
    """The real job on a tiny model, interrupted and broken at every stage. Takes minutes."""
    _install(session, "package.txt", "test.txt")
    session.run(
        "pytest",
        "tests/e2e",
        "--ignore=tests/e2e/test_frozen_image.py",
        "--ignore=tests/e2e/test_versions.py",
        *session.posargs,
        interrupt_timeout=INTERRUPT_S,
        terminate_timeout=TERMINATE_S,
    )


@nox.session
def frozen(session: nox.Session) -> None:
    """The real job on a tiny model over a read-only, externally managed Python that holds the stack. Takes minutes."""
    _install(session, "package.txt", "test.txt")
    session.run(
        "pytest",
        "tests/e2e/test_frozen_image.py",
        *session.posargs,
        interrupt_timeout=INTERRUPT_S,
        terminate_timeout=TERMINATE_S,
    )


@nox.session
def prepare(session: nox.Session) -> None:
    """Venvs, environment, model, preflight."""
    _job(session, "prepare")


@nox.session
def convert(session: nox.Session) -> None:
    """Hugging Face checkpoint -> Megatron torch_dist."""
    _job(session, "convert")


@nox.session
def e2e_verifiers(session: nox.Session) -> None:
    """The whole job: prepare, convert, rollouts and GRPO steps, verify."""
    _job(session, "e2e")


@nox.session
def verify(session: nox.Session) -> None:
    """Every rule over the newest run, or the one named."""
    _job(session, "verify")


@nox.session
def doctor(session: nox.Session) -> None:
    """What this machine has, and what is missing."""
    _job(session, "doctor")


@nox.session
def lock(session: nox.Session) -> None:
    """Rebuild locks/; `-- --check` only compares, `-- --upgrade` takes newer releases."""
    _isolated(session)
    check = "--check" in session.posargs
    options = [argument for argument in session.posargs if argument != "--check"]
    stale = []
    for name, what, excludes in LOCKS:
        target = Path("locks") / name
        before = target.read_text(encoding="utf-8") if target.exists() else ""
        extra = ("--excludes", f"locks/{excludes}") if excludes else ()
        command = (
            *COMPILE,
            *what,
            *extra,
            "--python-version",
            "3.11",
            "--custom-compile-command",
            "nox -s lock",
            *options,
        )
        session.run(*command, "-o", str(target), external=True, silent=True)
        if check and target.read_text(encoding="utf-8") != before:
            target.write_text(before, encoding="utf-8")
            stale.append(name)
    if stale:
        session.error(f"pyproject.toml and these locks disagree: {', '.join(stale)}; run: nox -s lock")
