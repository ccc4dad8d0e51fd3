"""The command line. Thin: it parses, calls, and turns errors into a message and an exit code.

Exit codes: 0 done, 1 the check failed, 2 bad input or configuration, 3 a component failed, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from miles_verifiers import __version__
from miles_verifiers.config import loading
from miles_verifiers.config.settings import RunConfig
from miles_verifiers.errors import Interrupted, MilesVerifiersError
from miles_verifiers.job import phases, plan
from miles_verifiers.provision import doctor, prune
from miles_verifiers.provision.roles import Roles
from miles_verifiers.provision.stack import pick_profile
from miles_verifiers.record.rundir import RunDir, cache_root
from miles_verifiers.system import console, files, process
from miles_verifiers.verify import verify
from miles_verifiers.wire import command as gateway

RUN_DIR_VARIABLE = "MILES_E2E_RUN_DIR"
MODEL_DIR_VARIABLE = "MILES_E2E_MODEL_DIR"
MEGATRON_VARIABLE = "MILES_E2E_MEGATRON_PATH"
ENVIRONMENT_VARIABLE = "VERIFIERS_CONFIG"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `miles-verifiers` and of `python -m miles_verifiers`; returns the exit code."""
    arguments = _parser().parse_args(argv)
    process.adopt_orphans()
    process.die_with_parent()
    try:
        with process.interruptible(), files.disk_errors_named():
            code: int = arguments.run(arguments)
    except Interrupted as error:
        console.fail(f"{error}; the same command goes on where it stopped")
        code = error.exit_code
    except MilesVerifiersError as error:
        console.fail(str(error))
        code = error.exit_code
    except BrokenPipeError:
        # The reader of our output went away (`| head`); there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    finally:
        process.end_descendants()
    return code


def _prepare(arguments: argparse.Namespace) -> int:
    return _phases(arguments, ["prepare"])


def _convert(arguments: argparse.Namespace) -> int:
    return _phases(arguments, ["prepare", "convert"])


def _train(arguments: argparse.Namespace) -> int:
    return _phases(arguments, ["prepare", "convert", "train"])


def _e2e(arguments: argparse.Namespace) -> int:
    return _phases(arguments, list(phases.PHASES))


def _phases(arguments: argparse.Namespace, names: list[str]) -> int:
    settings = _settings(arguments)
    run = _run_dir(arguments, settings)
    if arguments.dry_run:
        for command in plan.plan(settings, run, cache_root()):
            print(command.as_text())
        return 0
    with phases.opened(settings, run, cache_root(), offline=arguments.offline) as opened:
        report = None
        try:
            for name in names:
                report = getattr(opened, name)()
        finally:
            opened.summary()
        if report is not None:
            console.out.print(report.summary, markup=False)
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    run = RunDir(arguments.run_dir) if arguments.run_dir else phases.newest_run(Path("runs"))
    report = verify(run.path)
    if arguments.junit:
        arguments.junit.write_text(report.as_junit(), encoding="utf-8")
    print(report.as_json() if arguments.json else report.as_text())
    return 0 if report.ok else 1


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.expect:
        doctor.check_stack(arguments.expect)
        print(f"the stack is the one that {arguments.expect} records")
        return 0
    findings = doctor.examine()
    if arguments.json:
        print(json.dumps(findings.as_dict(), indent=2))
    else:
        console.table("", ["what", "found", "next step"], findings.rows())
    return 0 if findings.ok else 2


def _cache(arguments: argparse.Namespace) -> int:
    entries = prune.entries(cache_root(), days=0.0 if arguments.all else arguments.days)
    console.table("", ["entry", "own size", "days unused", ""], [entry.row() for entry in entries])
    going = [entry for entry in entries if not entry.kept]
    if arguments.action == "prune" and not arguments.dry_run:
        gone = [entry for entry in going if prune.remove(entry)]
        console.out.print(f"{len(gone)} removed, {sum(entry.bytes for entry in gone) / 1e9:.2f} GB", markup=False)
    else:
        size = sum(entry.bytes for entry in going) / 1e9
        console.out.print(f"{cache_root()}: {len(going)} may go, {size:.2f} GB; to remove: cache prune", markup=False)
    return 0


def _venv(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    log = cache_root() / "venvs" / f"{arguments.role}.log"
    with console.phase(f"venv {arguments.role}", log, to=console.err):
        roles = Roles.of(settings, cache_root(), log=log, offline=arguments.offline)
        make: dict[str, Callable[[], Path]] = {
            "stack": roles.stack,
            "test": roles.test,
            "env": lambda: roles.env(settings.environment),
            "contract": lambda: roles.contract(settings.environment),
        }
        python = make[arguments.role]()
    print(python)
    return 0


def _settings(arguments: argparse.Namespace) -> RunConfig:
    profile = arguments.profile
    if profile is None:
        profile, why = pick_profile()
        console.err.print(f"profile {profile}: {why}", markup=False)
    overrides = list(arguments.set or [])
    if arguments.steps is not None:
        overrides.append(f"training.num_steps={arguments.steps}")
    model_dir = os.environ.get(MODEL_DIR_VARIABLE)
    if model_dir:
        overrides.append(f"model.source={json.dumps(f'path:{Path(model_dir).resolve()}')}")
    megatron = os.environ.get(MEGATRON_VARIABLE)
    if megatron:
        overrides.append(f"training.megatron_path={json.dumps(str(Path(megatron).resolve()))}")
    _report_variables()
    settings = loading.load(profile, arguments.config, overrides)
    environment = os.environ.get(ENVIRONMENT_VARIABLE)
    return loading.with_environment(settings, Path(environment)) if environment else settings


def _report_variables() -> None:
    """Say which variables of the user's have no effect, so that nobody looks for it."""
    for name, value in process.redirections().items():
        console.err.print(
            f"{name}={value} is left out of every child: each role has an interpreter of its own", markup=False
        )


def _run_dir(arguments: argparse.Namespace, settings: RunConfig) -> RunDir:
    named = arguments.run_dir or os.environ.get(RUN_DIR_VARIABLE)
    if named:
        return RunDir(Path(named).resolve())
    return phases.choose_run_dir(settings, Path("runs").resolve())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="miles-verifiers", description="Train on Verifiers environments, anywhere.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    for name, run, text in (
        ("prepare", _prepare, "make venvs, environment and model, and look at them from inside workers"),
        ("convert", _convert, "Hugging Face checkpoint to Megatron torch_dist"),
        ("train", _train, "rollouts, GRPO steps, dump"),
        ("e2e", _e2e, "prepare, convert, train, verify"),
    ):
        added = command(name, run, text)
        _add_settings(added)
        added.add_argument(
            "--run-dir", type=Path, help="default: the unfinished run of these settings, or a new one in ./runs"
        )
        added.add_argument("--dry-run", action="store_true", help="print every command and do nothing")
    check = command("verify", _verify, "put every rule to a run")
    check.add_argument("run_dir", type=Path, nargs="?", help="default: the newest run in ./runs")
    check.add_argument("--json", action="store_true")
    check.add_argument("--junit", type=Path, metavar="FILE")
    look = command("doctor", _doctor, "what this machine has, what is missing, and the next step")
    look.add_argument("--json", action="store_true", help="also the stack's fingerprint and all its versions")
    look.add_argument(
        "--expect", type=Path, metavar="FILE", help="fail where the stack is not the one that FILE (of --json) records"
    )
    cache = command("cache", _cache, "what the cache holds; `prune` removes what was not used lately")
    cache.add_argument("action", choices=("list", "prune"), nargs="?", default="list")
    cache.add_argument(
        "--days", type=float, default=30.0, help="prune: keep what was used within so many (default: 30)"
    )
    cache.add_argument("--all", action="store_true", help="prune: the same as --days 0")
    cache.add_argument("--dry-run", action="store_true", help="prune: say what would go, and remove nothing")
    venv = command("venv", _venv, "make the venv of a role and print its Python")
    venv.add_argument("role", choices=("stack", "env", "test", "contract"))
    _add_settings(venv)
    gateway.add_arguments(command("gateway", gateway.run, "renderers' HTTP API in front of SGLang"))
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--profile", help=f"one of: {', '.join(loading.profile_names())}; default: what fits this machine"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML laid over the profile")
    parser.add_argument("--set", action="append", metavar="SECTION.FIELD=VALUE", help="laid over both")
    parser.add_argument("--steps", type=int, help="short for --set training.num_steps=N")
    parser.add_argument("--offline", action="store_true", help="use caches only")


if __name__ == "__main__":
    sys.exit(main())
