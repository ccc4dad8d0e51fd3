"""A Hugging Face model folder: its configuration, its safetensors, and the files that travel with them."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import transformers
from torch import Tensor

from miles_verifiers.errors import ModelError
from miles_verifiers.system.files import sha256
from miles_verifiers.training.megatron import aside

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


class HFFolder:
    """Reads weights one tensor at a time, so that a model is never in memory twice.

    Raises ModelError where the folder is not a model: no config.json, no safetensors, a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ModelError(
                "not a Hugging Face model folder: it has no config.json",
                where=str(path),
                next_step="name the folder that `prepare` made, or one that transformers can load",
            )

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        try:
            value = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise ModelError(f"config.json is not valid: {error}", where=str(self.path)) from None
        if not isinstance(value, dict):
            raise ModelError("config.json does not hold an object", where=str(self.path))
        return value

    @cached_property
    def config(self) -> Any:
        """transformers' configuration object, which knows the defaults that config.json leaves out."""
        try:
            return transformers.AutoConfig.from_pretrained(str(self.path), local_files_only=True)
        except Exception as error:
            # Besides ValueError and OSError, huggingface_hub has validation errors of its own.
            raise ModelError(f"transformers cannot read config.json: {error}", where=str(self.path)) from None

    @cached_property
    def _file_of(self) -> dict[str, Path]:
        """The safetensors file of each tensor name."""
        index = self.path / _INDEX
        if index.is_file():
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self.path / file for name, file in weight_map.items()}
        single = self.path / _SINGLE
        if not single.is_file():
            raise ModelError(
                f"the model folder has neither {_SINGLE} nor {_INDEX}",
                where=str(self.path),
                next_step="convert the weights to safetensors first",
            )
        try:
            with safetensors.safe_open(str(single), framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
        except safetensors.SafetensorError as error:
            raise ModelError(f"the weights file is damaged: {error}", where=str(single)) from None

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def tensor(self, name: str) -> Tensor:
        path = self._file_of[name]
        try:
            with safetensors.safe_open(str(path), framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ModelError(f"cannot read the tensor {name}: {error}", where=str(path)) from None
        return tensor

    def fingerprint(self) -> str:
        """A hash of what decides the model's numbers: config.json and the content of every weights file."""
        files = {self.path / "config.json", *self._file_of.values()}
        digest = hashlib.sha256()
        for path in sorted(files):
            digest.update(f"{path.name} {sha256(path)}\n".encode())
        return digest.hexdigest()

    def write_like(self, target: Path, tensors: dict[str, Tensor]) -> None:
        """A model folder with other weights: config, tokenizer, template and generation settings are copied.

        `target` appears whole or not at all.
        """
        with aside.published(target) as folder:
            for path in sorted(self.path.iterdir()):
                if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES):
                    shutil.copyfile(path, folder / path.name)
            safetensors.torch.save_file(tensors, str(folder / _SINGLE), metadata={"format": "pt"})
