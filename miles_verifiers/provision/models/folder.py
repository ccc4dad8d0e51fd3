"""What a usable model folder is, checked without loading it: Hugging Face's layout, safetensors, a chat template.

Sources: config.json and tokenizer files as transformers 5 writes them; safetensors header and index as in the format's
description (8 bytes little-endian header length, JSON header with `data_offsets`, data).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_verifiers.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3")
"""`model_type`s that engine, conversion and trainer agree on."""

INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What other rooms ask about a checked model folder."""

    path: Path
    model_type: str
    vocab_size: int
    """Rows of the embedding; ids at or above it kill the engine."""
    max_position_embeddings: int
    """Tokens of the longest context."""


def check_model_folder(path: Path) -> ModelFacts:
    """The facts of a usable model folder.

    Raises ModelError that names the first thing missing: the folder, config.json, a supported model_type, tokenizer, chat
    template, weights, a shard, the end of a truncated file.
    """
    if not path.is_dir():
        raise ModelError(f"the model folder {path} does not exist", next_step="give the folder that holds config.json")
    config = _read_json(path / "config.json", "every Hugging Face model folder has one; is this its parent folder?")
    facts = _facts(path, config)
    _check_tokenizer(path)
    for file in weight_files(path):
        _check_safetensors(file)
    return facts


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that the folder's weights consist of. Raises ModelError where one is missing."""
    index = path / INDEX
    if index.is_file():
        mapping = _read_json(index, "download the model again").get("weight_map")
        if not isinstance(mapping, dict) or not mapping:
            raise ModelError("the index of the weights names no weights", where=str(index))
        names = sorted({str(name) for name in mapping.values()})
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (path / name).is_file()]
    if not missing:
        return [path / name for name in names]
    if index.is_file():
        raise ModelError(
            f"{len(missing)} of {len(names)} weight files are missing: {', '.join(missing[:5])}",
            where=str(path),
            next_step="download the model again",
        )
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.gguf") for file in path.glob(pattern))
    raise ModelError(
        "the model folder has no weights: neither model.safetensors nor its index"
        + (f" (only {', '.join(others[:3])}, which is not read)" if others else ""),
        where=str(path),
        next_step="save the model with safetensors (save_pretrained does)",
    )


def _facts(path: Path, config: dict[str, Any]) -> ModelFacts:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED:
        raise ModelError(
            f"model_type {model_type!r} is not supported",
            where=str(path / "config.json"),
            next_step=f"take a model of one of these types: {', '.join(SUPPORTED)}",
        )
    numbers = {}
    for name in ("vocab_size", "max_position_embeddings"):
        value = config.get(name)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"config.json has no usable {name}: {value!r}", where=str(path / "config.json"))
        numbers[name] = value
    return ModelFacts(path, model_type, **numbers)


def _check_tokenizer(path: Path) -> None:
    settings = _read_json(path / "tokenizer_config.json", "save the tokenizer into the folder (save_pretrained does)")
    vocabularies = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if not any((path / name).is_file() for name in vocabularies):
        raise ModelError(
            f"the model folder has no tokenizer: none of {', '.join(vocabularies)}",
            where=str(path),
            next_step="save the tokenizer into the folder (save_pretrained does)",
        )
    if not (path / "chat_template.jinja").is_file() and not settings.get("chat_template"):
        raise ModelError(
            "the model has no chat template, so messages cannot become tokens",
            where=str(path),
            next_step="take an instruction-tuned model, or add chat_template.jinja",
        )


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if head.startswith(b"version "):
            raise ModelError(
                f"{file.name} is a Git LFS pointer, not the weights", where=str(file), next_step="git lfs pull"
            )
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else _LONGEST_HEADER
        if length >= min(size, _LONGEST_HEADER):
            raise ModelError(f"{file.name} is not a safetensors file", where=str(file), next_step="download it again")
        try:
            header = json.loads(stream.read(length))
            end = 8 + length + max(_ends(header), default=0)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(
                f"the header of {file.name} is damaged", where=str(file), next_step="download it again"
            ) from None
    if size != end:
        raise ModelError(
            f"{file.name} has {size} bytes, its header says {end}", where=str(file), next_step="download it again"
        )


def _ends(header: dict[str, Any]) -> Iterator[int]:
    return (int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__")


def _read_json(file: Path, next_step: str) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"the model folder has no {file.name}", where=str(file.parent), next_step=next_step) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read: {error}", where=str(file), next_step=next_step) from None
    if not isinstance(data, dict):
        raise ModelError(f"{file.name} holds no JSON object", where=str(file), next_step=next_step)
    return data
