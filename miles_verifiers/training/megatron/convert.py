"""HF folder <-> Megatron checkpoint, on the CPU of any machine.

    python -m miles_verifiers.training.megatron.convert hf-to-megatron SRC DST [--tp N]
    python -m miles_verifiers.training.megatron.convert megatron-to-hf SRC DST --hf-template DIR

The last line on stdout is a JSON object, or the error; the exit code is the error's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from miles_verifiers.errors import ParityError
from miles_verifiers.system import process
from miles_verifiers.system.files import sha256
from miles_verifiers.system.progress import report
from miles_verifiers.training.megatron import aside, checkpoint, devices, parallel
from miles_verifiers.training.megatron.hf_folder import HFFolder
from miles_verifiers.training.megatron.model import Policy, check_supported
from miles_verifiers.training.megatron.parity import max_logit_difference

MAX_LOGIT_DIFFERENCE = 1e-4
MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 900.0
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Parity:
    """A finished conversion."""

    max_logit_difference: float
    """Largest |difference| to transformers over all logits of the fixed prompt, float32."""
    seconds: float
    bytes: int
    reused: bool = False
    """The target was already there, whole and made from this source."""


def hf_to_megatron(source: Path, target: Path, *, tensor_parallel: int = 1) -> Parity:
    """Write `target/release` in Megatron's torch_dist format, proven against transformers.

    The logits compared are those of the model as read back from the written files. Weights are kept in float32. Any tensor
    parallel size can load the result; `tensor_parallel` only says how far the vocabulary is padded.

    Raises ModelError for a model that cannot be converted, ParityError where the logits differ by more than
    MAX_LOGIT_DIFFERENCE; then, or when killed, nothing is left at `target`.
    """
    start = time.monotonic()
    hf = HFFolder(source)
    check_supported(hf)
    report("conversion: hashing the source")
    made_from = {"format": _FORMAT, "source": hf.fingerprint(), "tensor_parallel": tensor_parallel}
    with aside.locked(target.parent, LOCK_TIMEOUT_S):
        finished = _finished(target, made_from)
        if finished is not None:
            return finished
        with aside.published(target) as folder:
            difference = _write_and_compare(hf, folder, tensor_parallel)
            files = _inventory(folder)
            parity = Parity(difference, time.monotonic() - start, sum(file["bytes"] for file in files.values()))
            manifest = {
                **made_from,
                "files": files,
                "parity": asdict(parity),
                "megatron_core": version("megatron-core"),
            }
            aside.write_json(folder / MANIFEST, manifest)
    return parity


def megatron_to_hf(source: Path, target: Path, *, hf_template: Path) -> None:
    """Write the newest checkpoint under `source` as an HF folder, float32, with the files of `hf_template` beside it."""
    with parallel.alone():
        policy = Policy(HFFolder(hf_template), dtype=torch.float32, device=devices.Cpu())
        report("conversion: reading the Megatron checkpoint")
        checkpoint.load(source, policy.model)
        report("conversion: writing the Hugging Face folder")
        policy.hf.write_like(target, {name: tensor.contiguous() for name, tensor in policy.hf_tensors()})


def _write_and_compare(hf: HFFolder, folder: Path, tensor_parallel: int) -> float:
    with parallel.alone():
        device = devices.Cpu()
        policy = Policy(hf, dtype=torch.float32, device=device, tensor_parallel=tensor_parallel)
        report("conversion: mapping the weights")
        policy.load_hf()
        report("conversion: writing the Megatron checkpoint")
        checkpoint.save(folder, policy.model, iteration=None, strategy=device.save_strategy())
        report("conversion: reading it back")
        with torch.no_grad():
            for parameter in policy.parameters.values():
                # What the checkpoint lacks must not pass for what it holds.
                parameter.fill_(torch.nan)
        checkpoint.load(folder, policy.model)
        report("conversion: comparing logits with transformers")
        difference = max_logit_difference(policy)
    if not difference <= MAX_LOGIT_DIFFERENCE:
        raise ParityError(
            f"the converted model's logits differ from transformers' by {difference:.3g}, more than {MAX_LOGIT_DIFFERENCE}",
            where=str(hf.path),
            next_step="nothing was kept; this model needs something that the converter does not know",
        )
    return difference


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    report("conversion: hashing the result")
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _finished(target: Path, made_from: dict[str, Any]) -> Parity | None:
    """The result that lies at `target`, if it was made from the same source and no file of it has changed since."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        if any(manifest[key] != value for key, value in made_from.items()):
            return None
        report("conversion: checking the result that is there")
        for name, file in manifest["files"].items():
            path = target / name
            if path.stat().st_size != file["bytes"] or sha256(path) != file["sha256"]:
                return None
        return Parity(**{**manifest["parity"], "reused": True})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Absent, or damaged in whatever way: convert again.
        return None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("hf-to-megatron")
    to_megatron.add_argument("--tp", type=int, default=1, help="pad the vocabulary for this many tensor parallel ranks")
    to_hf = commands.add_parser("megatron-to-hf")
    to_hf.add_argument("--hf-template", type=Path, required=True)
    for command in (to_megatron, to_hf):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    options = parser.parse_args(argv)
    return process.main_of_child(lambda: print(json.dumps(_converted(options)), flush=True))


def _converted(options: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    if options.command == "hf-to-megatron":
        return asdict(hf_to_megatron(options.source, options.target, tensor_parallel=options.tp))
    megatron_to_hf(options.source, options.target, hf_template=options.hf_template)
    return {"seconds": time.monotonic() - start, "target": str(options.target)}


if __name__ == "__main__":
    sys.exit(main())
