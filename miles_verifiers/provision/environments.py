"""Where an environment's package comes from, and what of it decides the venv that holds it.

    environments/x  ./x  /abs/x  ~/x            a folder with a Python project
    git+URL@REVISION[#subdirectory=DIR]         a repository; the revision is resolved to a commit, which is the key
    NAME==VERSION                               a release of the package registry
    OWNER/NAME[@VERSION]                        a release on Prime's Environments Hub, through the prime command

`parse` reads the text alone, `resolve` looks (at the folder, or at the repository's references) and gives a Package.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from miles_verifiers.config.settings import EnvironmentSection
from miles_verifiers.errors import EnvironmentPackageError, ProcessFailed
from miles_verifiers.provision.cache import locked
from miles_verifiers.system import process, resources
from miles_verifiers.system.files import folder_hash, write_text

_LOOKUP_TIMEOUT_S = 60.0
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REGISTRY = re.compile(r"(?:pypi:)?(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.!+_-]+)")
_HUB = re.compile(r"(?:hub:)?(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)(@(?P<version>[\w.+-]+))?")
_GIT = re.compile(
    r"git\+(?P<url>(?:https|http|ssh|file|git)://\S+?)@(?P<revision>[\w./-]+)(?:#subdirectory=(?P<subdirectory>[\w./-]+))?"
)
FORMS = "a folder (./x), git+URL@REVISION[#subdirectory=DIR], NAME==VERSION, OWNER/NAME@VERSION (Prime's hub)"


@dataclass(frozen=True, slots=True)
class Source:
    """`git+https://h/r@v1#subdirectory=e` is Source("git", "https://h/r", "v1", "e")."""

    kind: str
    """folder, git, registry or hub."""
    place: str
    """Folder, URL, name of the distribution, or owner/name."""
    version: str = ""
    """Revision or version; empty for a folder, and for the newest release on the hub."""
    subdirectory: str = ""


@dataclass(frozen=True, slots=True)
class Package:
    """An environment's package, as a recipe holds it."""

    source: Source
    requirement: str
    """What uv is told to install, or prime for the hub."""
    key: tuple[str, ...]
    """All that decides what is installed."""
    editable: bool = False

    @property
    def label(self) -> str:
        return self.requirement


def parse(text: str) -> Source:
    """Raises EnvironmentPackageError, with the known forms, for anything that is none of them."""
    if text.startswith("git+"):
        return _parse_git(text)
    if match := _REGISTRY.fullmatch(text):
        return Source("registry", match["name"], match["version"])
    folder = _folder(text.removeprefix("path:"))
    looks_like_a_path = text.startswith(("path:", ".", "/", "~", "environments/"))
    if not looks_like_a_path and not folder.exists() and (match := _HUB.fullmatch(text)):
        return Source("hub", f"{match['owner']}/{match['name']}", match["version"] or "")
    # The empty text would be the project's own folder, which is a Python project too.
    return Source("folder", str(checked_folder(folder if text.strip() else folder / "?", text)))


def resolve(environment: EnvironmentSection, cache: Path, *, log: Path, offline: bool = False) -> Package:
    """The package as it is now. Only a git revision that is no commit needs the network.

    Raises EnvironmentPackageError for a source that is not there, or that `offline` cannot look up.
    """
    source = parse(environment.source)
    if environment.editable and source.kind != "folder":
        raise EnvironmentPackageError(
            f"only a folder can be editable, {environment.source} is of the kind {source.kind}",
            where="environment.editable",
            next_step="clone it and name the folder, or leave editable out",
        )
    if source.kind == "folder":
        # An editable package is read from its folder: only what its metadata say was installed.
        folder = Path(source.place)
        contents = _metadata(folder) if environment.editable else folder_hash(folder)
        return Package(source, source.place, ("folder", source.place, contents), editable=environment.editable)
    if source.kind == "git":
        commit = _commit(source, cache, log=log, offline=offline)
        end = f"#subdirectory={source.subdirectory}" if source.subdirectory else ""
        requirement = f"git+{source.place}@{commit}{end}"
        return Package(source, requirement, ("git", requirement))
    if source.kind == "registry":
        requirement = f"{source.place}=={source.version}"
        return Package(source, requirement, ("registry", requirement))
    requirement = source.place + (f"@{source.version}" if source.version else "")
    return Package(source, requirement, ("hub", requirement))


def checked_folder(folder: Path, text: str) -> Path:
    """The folder, which must hold a Python project."""
    if not (folder / "pyproject.toml").is_file():
        root = resources.root()
        have = sorted(str(p.parent.relative_to(root)) for p in root.glob("environments/*/pyproject.toml"))
        raise EnvironmentPackageError(
            f"no environment package {text!r}: there is no pyproject.toml",
            where=str(folder),
            next_step=f"name {FORMS} in environment.source; the project has: {', '.join(have)}",
        )
    return folder.resolve()


def project_name(folder: Path) -> str:
    """`project.name` of a folder's pyproject.toml."""
    try:
        return str(tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"])
    except (OSError, KeyError, TypeError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EnvironmentPackageError(
            f"the environment's pyproject.toml has no readable project.name ({error})", where=str(folder)
        ) from None


def _parse_git(text: str) -> Source:
    match = _GIT.fullmatch(text)
    if match is None:
        raise EnvironmentPackageError(
            f"{text!r} is no git source",
            where="environment.source",
            next_step="write git+URL@REVISION[#subdirectory=DIR]; a revision is needed: a tag, a branch or a whole commit",
        )
    return Source("git", match["url"], match["revision"], match["subdirectory"] or "")


def _folder(text: str) -> Path:
    """A relative folder is looked up in the project, then in the working directory."""
    folder = Path(text).expanduser()
    if folder.is_absolute():
        return folder
    inside = resources.root() / folder
    return inside if inside.exists() or not folder.exists() else folder.resolve()


def _metadata(folder: Path) -> str:
    return (folder / "pyproject.toml").read_text(encoding="utf-8", errors="replace")


def _commit(source: Source, cache: Path, *, log: Path, offline: bool) -> str:
    """The commit that a revision names now; offline the one that it named when it was looked up last."""
    if _COMMIT.fullmatch(source.version):
        return source.version
    remembered = cache / "git.json"
    name = f"{source.place}@{source.version}"
    if offline:
        commit = _read(remembered).get(name)
        if commit is None:
            raise EnvironmentPackageError(
                f"offline, and the revision {source.version} was never looked up",
                where=source.place,
                next_step="run prepare once without --offline, or name the whole commit in environment.source",
            )
        return commit
    commit = _look_up(source, log)
    with locked(remembered, what="git revisions"):
        write_text(remembered, json.dumps({**_read(remembered), name: commit}, indent=1))
    return commit


def _look_up(source: Source, log: Path) -> str:
    # A password prompt would wait for ever; the references of a repository are a few lines.
    env = process.child_environment({"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes"})
    argv = ["git", "ls-remote", "--", source.place, source.version, f"{source.version}^{{}}"]
    try:
        lines = process.run(argv, what="git ls-remote", timeout=_LOOKUP_TIMEOUT_S, log=log, env=env)
    except (ProcessFailed, OSError) as error:
        last = error.tail[-1] if isinstance(error, ProcessFailed) and error.tail else str(error)
        raise EnvironmentPackageError(
            f"the environment's repository cannot be reached: {last}",
            where=source.place,
            next_step=f"check the address and your access; details: {log}",
        ) from None
    found = {ref: commit for commit, _, ref in (line.partition("\t") for line in lines)}
    revision = source.version
    # An annotated tag's own object is no commit; `^{}` is what it points to.
    for ref in (f"refs/tags/{revision}^{{}}", f"refs/tags/{revision}", f"refs/heads/{revision}", revision):
        if _COMMIT.fullmatch(found.get(ref, "")):
            return found[ref]
    raise EnvironmentPackageError(
        f"the repository has no tag or branch {revision!r}",
        where=source.place,
        next_step="name a tag, a branch, or all 40 characters of a commit",
    )


def _read(file: Path) -> dict[str, str]:
    try:
        return {str(k): str(v) for k, v in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError):
        return {}
