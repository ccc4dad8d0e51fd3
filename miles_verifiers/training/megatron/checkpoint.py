"""Megatron's torch_dist checkpoints: `ROOT/iter_0000007/` or `ROOT/release/`, and which one is the newest.

Beside Megatron's own files each has `miles_verifiers.json`: what it holds, and the caller's extra state. The layout is that
of Megatron-LM (training/checkpointing.py), so its tools and Miles read these too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from miles_verifiers.errors import HostError, ModelError, TrainerError
from miles_verifiers.system import files
from miles_verifiers.training.megatron import aside, noise, parallel

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_NOTE = "miles_verifiers.json"
_CONTENT = {"singleton_local_shards": False}


@dataclass(frozen=True, slots=True)
class Note:
    """What a checkpoint holds besides weights."""

    iteration: int = 0
    has_optimizer: bool = False
    megatron_core: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def save(
    root: Path,
    model: Any,
    *,
    iteration: int | None,
    strategy: Any,
    optimizer: Any = None,
    extra: dict[str, Any] | None = None,
) -> Path:
    """Write `root/iter_NNNNNNN` (`root/release` where iteration is None), then point the tracker at it.

    Every rank calls. A killed save leaves a hidden folder at most, and the tracker where it was. Raises HostError where
    the folder cannot be written.
    """
    if optimizer is not None and not _has_stepped(optimizer):
        optimizer = None  # without a step, as when no group had a winner, it has no state, and a fresh one is the same
    target = root / folder_name(iteration)
    note = Note(iteration or 0, optimizer is not None, version("megatron-core"), extra or {})
    parallel.on_first(lambda: aside.begin(target))
    state = _sharded_state(model, optimizer, is_loading=False)
    state.update({"iteration": note.iteration, "checkpoint_version": 3.0})
    folder = aside.aside_of(target)
    try:
        with noise.hushed():
            dist_checkpointing.save(state, str(folder), sharded_strategy=strategy, content_metadata=dict(_CONTENT))
    except (OSError, CheckpointException) as error:
        if parallel.is_first():
            aside.discard(target)
        raise HostError(
            f"the checkpoint cannot be written: {_shortly(error)}",
            where=str(root),
            next_step="free disk space there; the former checkpoint is untouched",
        ) from error

    def publish() -> None:
        aside.write_json(folder / _NOTE, asdict(note))
        aside.publish(target)
        files.write_text(root / TRACKER, RELEASE if iteration is None else str(iteration))

    parallel.on_first(publish)
    return target


def annotate(root: Path, iteration: int, extra: dict[str, Any]) -> None:
    """Replace the caller's extra state of a checkpoint that is there; its weights are not touched. Every rank calls."""
    folder = root / folder_name(iteration)
    parallel.on_first(lambda: aside.write_json(folder / _NOTE, asdict(replace(read_note(folder), extra=extra))))


def load(root: Path, model: Any, optimizer: Any = None) -> Note:
    """Fill model and, where the checkpoint has its state, optimizer from the newest checkpoint under `root`.

    Any tensor parallel size may load what any other wrote. Raises ModelError where there is no checkpoint, TrainerError
    where there is one that cannot be loaded.
    """
    folder = newest(root)
    note = read_note(folder)
    wanted = optimizer if note.has_optimizer else None
    state = _sharded_state(model, wanted, is_loading=True)
    try:
        with noise.hushed():
            loaded = dist_checkpointing.load(state, str(folder))
        _check_complete(model.load_state_dict(loaded["model"], strict=False))
        if wanted is not None:
            wanted.load_state_dict(loaded["optimizer"])
    except TrainerError as error:
        raise error.at(str(folder)) from None
    except (Exception, CheckpointException) as error:
        # Whatever a damaged file makes torch or megatron raise; there is no common class.
        raise TrainerError(
            f"the checkpoint cannot be loaded: {_shortly(error)}",
            where=str(folder),
            next_step="remove that folder and convert the model again, or go back to an older iteration",
        ) from error
    if optimizer is not None and wanted is None:
        # A mixed precision optimizer has its own copy of the weights.
        optimizer.reload_model_params()
    return note


def newest(root: Path) -> Path:
    """The folder that the tracker names. Raises ModelError where there is none."""
    tracker = root / TRACKER
    try:
        text = tracker.read_text(encoding="utf-8").strip()
        folder = root / folder_name(None if text == RELEASE else int(text))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"not a Megatron checkpoint: {TRACKER} is missing or unreadable ({error})",
            where=str(root),
            next_step="make one with `miles-verifiers convert hf-to-megatron SRC DST`",
        ) from None
    if not folder.is_dir():
        raise ModelError(f"{TRACKER} names {folder.name}, which is not there", where=str(root))
    return folder


def read_note(folder: Path) -> Note:
    """Empty for a checkpoint that other tools wrote: of those only the weights are read."""
    path = folder / _NOTE
    if not path.exists():
        return Note()
    try:
        return Note(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainerError(f"{_NOTE} is damaged: {error}", where=str(folder)) from None


def folder_name(iteration: int | None) -> str:
    return RELEASE if iteration is None else f"iter_{iteration:07d}"


def _sharded_state(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {**_CONTENT, "dp_cp_group": parallel.data_group_with_context()}
    sharded = model.sharded_state_dict(metadata=metadata)
    # Transformer Engine keeps its 8-bit scales there. We train without, and the local layer spec has none.
    weights = {name: value for name, value in sharded.items() if not name.endswith("_extra_state")}
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(weights, is_loading=is_loading)
    return state


def _has_stepped(optimizer: Any) -> bool:
    # Megatron chains several where groups of parameters need their own (optimizer.py, 0.16.1 to 0.19.2).
    return any(each.optimizer.state for each in getattr(optimizer, "chained_optimizers", [optimizer]))


def _shortly(error: BaseException) -> str:
    """torch's CheckpointException, a BaseException, carries the traceback of every rank; its last line says what it was."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1].strip()[:300]}"


def _check_complete(keys: Any) -> None:
    missing = [name for name in keys.missing_keys if not name.endswith("_extra_state")]
    if missing or keys.unexpected_keys:
        raise TrainerError(f"the checkpoint is of another model: missing {missing}, unexpected {keys.unexpected_keys}")
