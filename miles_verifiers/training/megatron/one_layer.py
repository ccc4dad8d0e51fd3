"""The smallest model of a run's kind: one layer, a small vocabulary. Proves that this interpreter can build and run one."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import TrainerError
from miles_verifiers.training.megatron import devices, parallel
from miles_verifiers.training.megatron.hf_folder import HFFolder
from miles_verifiers.training.megatron.model import Policy
from miles_verifiers.training.megatron.trainer import DTYPES

_VOCABULARY = 256


def run(model: Path, settings: TrainingSection, dtype: str) -> dict[str, Any]:
    """Build one layer as `model`'s config.json describes it, with random weights, and put four tokens through it.

    Returns the device and the number of parameters. Raises InputError for what cannot be set up, TrainerError where the
    logits are not finite.
    """
    described = json.loads((model / "config.json").read_text(encoding="utf-8"))
    described |= {"num_hidden_layers": 1, "vocab_size": _VOCABULARY}
    described.pop("layer_types", None)  # one entry per layer; transformers 5 makes it again
    with tempfile.TemporaryDirectory(prefix="mv-layer-") as folder, parallel.alone():
        (Path(folder) / "config.json").write_text(json.dumps(described), encoding="utf-8")
        device = devices.pick(settings, dtype=dtype, rank=0)
        policy = Policy(HFFolder(Path(folder)), dtype=DTYPES[dtype], device=device)
        with torch.no_grad():
            for parameter in policy.parameters.values():
                parameter.normal_(std=0.02)
            logits = policy.logits([[1, 2, 3, 4]])
        if not bool(torch.isfinite(logits).all()):
            raise TrainerError("a model of one layer gives logits that are not finite", where=str(device.torch_device))
        return {
            "device": str(device.torch_device),
            "parameters": sum(parameter.numel() for parameter in policy.parameters.values()),
            "logits": list(logits.shape),
        }
