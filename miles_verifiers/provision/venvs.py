"""Venvs, built from recipes: aside, under a lock, then renamed; found again by the hash of their recipe.

A venv lies *over* the stack: a `.pth` file names the stack's site-packages, so that its packages are seen behind the
venv's own. That works over a system Python and over another venv alike, which `--system-site-packages` does not (it shows
the base interpreter's packages only), and it changes nothing in what lies below.
"""

from __future__ import annotations

import compileall
import importlib.metadata
import shutil
import uuid
from pathlib import Path

from miles_verifiers.errors import HostError
from miles_verifiers.provision import shadows
from miles_verifiers.provision.cache import locked, mark_used
from miles_verifiers.provision.install import install_locks, install_package, run_uv
from miles_verifiers.provision.recipes import Recipe, own_data, own_package
from miles_verifiers.provision.stack import Interpreter, probe

_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info", ".*")
OVERLAY = "zz_stack.pth"
"""Names what a venv lies over. It sorts last, so that the venv's own .pth files come first."""


def ensure(recipe: Recipe, cache: Path, *, log: Path, offline: bool = False) -> Path:
    """The venv of `recipe`, built if it is not there yet; returns its folder.

    Two processes that want the same venv build it once. Raises HostError (disk), InstallError (uv's last lines), or
    EnvironmentPackageError where the environment's own package cannot be installed or would shadow the stack.
    """
    target = cache / "venvs" / f"{recipe.role}-{recipe.key()}"
    if not target.is_dir():
        with locked(target, what=f"venv {recipe.role}"):
            if not target.is_dir():
                _check_disk(target.parent, recipe)
                _build(recipe, target, log, offline)
    mark_used(target)
    return target


def python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _check_disk(folder: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(folder).free
    if free < recipe.disk_bytes:
        raise HostError(
            f"the venv {recipe.role} needs up to {recipe.disk_bytes / 1e9:.0f} GB, {free / 1e9:.1f} GB are free",
            where=str(folder),
            next_step="free some (miles-verifiers cache prune), or name another disk in MILES_VERIFIERS_CACHE",
        )


def _build(recipe: Recipe, target: Path, log: Path, offline: bool) -> None:
    for left in target.parent.glob(f".building-{target.name}-*"):
        shutil.rmtree(left, ignore_errors=True)  # we hold the lock: nobody else is building it
    aside = target.parent / f".building-{target.name}-{uuid.uuid4().hex[:8]}"
    try:
        _fill(recipe, aside, log, offline)
        aside.rename(target)
    except OSError as error:
        raise HostError(
            f"the venv {recipe.label} cannot be stored: {error.strerror or error}",
            where=str(target.parent),
            next_step="check free space and permissions, or name another disk in MILES_VERIFIERS_CACHE",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(recipe: Recipe, aside: Path, log: Path, offline: bool) -> None:
    arguments: list[str | Path] = ["venv", "--relocatable", "--no-project", "--python", recipe.python.executable, aside]
    run_uv(arguments, recipe, log, offline)
    site_packages = probe(python_of(aside)).site_packages[0]
    if recipe.below is not None:
        _lay_over(site_packages, recipe.below, frozen=recipe.frozen)
    if recipe.first:
        _put_first(site_packages, recipe.first)
    if recipe.locks:
        install_locks(recipe, aside, log, offline)
    if recipe.package is not None:
        install_package(recipe, aside, log, offline)
    if recipe.with_ourselves:
        _copy_ourselves(site_packages)
    if recipe.frozen:
        compileall.compile_dir(site_packages / "miles_verifiers", quiet=2, workers=1)
    shadows.refuse(recipe, site_packages, recipe.python.executable)


def _lay_over(site_packages: Path, below: Interpreter, *, frozen: bool) -> None:
    # addsitedir, not the bare path: it also runs the .pth files of the stack, which editable installs rely on.
    lines = [f"import site; site.addsitedir({str(path)!r})" for path in below.site_packages]
    if frozen:
        # Here and not in PYTHONDONTWRITEBYTECODE: whatever starts this interpreter, nothing is written below it.
        lines.insert(0, "import sys; sys.dont_write_bytecode = True")
    (site_packages / OVERLAY).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _put_first(site_packages: Path, folders: tuple[Path, ...]) -> None:
    # In the venv and not in PYTHONPATH: Ray rewrites that variable for its workers, and it would reach every role.
    lines = [
        f"import sys; {str(folder)!r} in sys.path or sys.path.insert({i}, {str(folder)!r})"
        for i, folder in enumerate(folders)
    ]
    (site_packages / "aa_first.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _copy_ourselves(site_packages: Path) -> None:
    """Copy this package and its metadata: the actors then run the very code that started them, editable or not.

    The metadata carry the entry point by which SGLang finds our platform. The project's data go where a wheel has them.
    """
    shutil.copytree(own_package(), site_packages / "miles_verifiers", ignore=_IGNORED)
    for folder in own_data():
        target = site_packages / "miles_verifiers" / "_data" / folder.name
        shutil.copytree(folder, target, ignore=_IGNORED, dirs_exist_ok=True)
    distribution = importlib.metadata.distribution("miles-verifiers")
    info = site_packages / f"miles_verifiers-{distribution.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(distribution.read_text(name) or "", encoding="utf-8")
