"""Models from the Hugging Face hub, by huggingface_hub: resumable, only what is needed, errors said in our words."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from miles_verifiers.errors import ModelError
from miles_verifiers.system import progress

PATTERNS = ("model*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
"""Configuration, tokenizer, chat template and weights as safetensors; no .bin, .gguf, .onnx, no code. Of the repository's
root alone: its folders hold other formats of the same weights."""

_INFO_TIMEOUT_S = 30.0
_MB = 1_000_000


def download(repository: str, revision: str | None, folder: Path, *, offline: bool) -> dict[str, Any]:
    """Fill `folder` with the repository's files; what an interrupted download left there is continued.

    Returns the commit that `revision` (default: the repository's main branch) names now. Raises ModelError: no such
    repository or revision, access not granted, offline, no connection.
    """
    where = f"hf:{repository}" + (f"@{revision}" if revision else "")
    if offline:
        raise ModelError(
            "the model is not in the cache, and nothing may be downloaded", where=where, next_step="run once online"
        )
    # Half a second of imports that other sources do not need.
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    with _errors_explained(repository, revision, where):
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_INFO_TIMEOUT_S)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or [] if is_needed(file.rfilename)}
        if not sizes:
            raise ModelError(
                "the repository holds no model files", where=where, next_step="look at its page on the hub"
            )
        with _reported(folder, f"downloading {repository} (MB)", sum(sizes.values())):
            snapshot_download(repository, revision=info.sha, local_dir=folder, allow_patterns=sorted(sizes))
    # The client's own notes on finished and unfinished files.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return {"commit": info.sha}


def is_needed(name: str) -> bool:
    """Whether a file of a repository, by its path there, belongs to the model folder."""
    return "/" not in name and any(fnmatch(name, pattern) for pattern in PATTERNS)


@contextlib.contextmanager
def _reported(folder: Path, text: str, total: int) -> Iterator[None]:
    """Report the folder's growth while the block runs. Sizes on disk, because the client's bars change by version."""
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.5):
            progress.report(text, min(_size(folder), total) // _MB, total // _MB)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        # Unfinished files are renamed while we look.
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextlib.contextmanager
def _errors_explained(repository: str, revision: str | None, where: str) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors as hub

    # (error of the client, what it means, what to do); the first that fits. A gated repository also counts as not found.
    causes: tuple[tuple[tuple[type[Exception], ...], str, str], ...] = (
        ((hub.GatedRepoError,), "access is not granted to you", "ask for access on its page, then set HF_TOKEN"),
        (
            (hub.RevisionNotFoundError,),
            f"it has no revision {revision!r}",
            "give a branch, a tag or a commit that exists",
        ),
        (
            (hub.RepositoryNotFoundError,),
            "there is no such repository, or it is private",
            "check the spelling (ORG/NAME); for a private one set HF_TOKEN",
        ),
        ((hub.HFValidationError,), "that is no name of a repository", "use hf:ORG/NAME"),
        ((hub.OfflineModeIsEnabled,), "HF_HUB_OFFLINE is set", "unset it for one run"),
        (
            (httpx.HTTPError, hub.LocalEntryNotFoundError),
            "the hub cannot be reached",
            "check the network and run again: the download continues where it stopped",
        ),
    )
    try:
        yield
    except (httpx.HTTPError, hub.HFValidationError, hub.OfflineModeIsEnabled, hub.LocalEntryNotFoundError) as error:
        meaning, next_step = next((what, then) for types, what, then in causes if isinstance(error, types))
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"cannot get {repository}: {meaning} ({detail})", where=where, next_step=next_step) from error
