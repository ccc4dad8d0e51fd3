"""Run as two processes by test_megatron_trainer.py: every case that takes two ranks, one after another.

    two_ranks.py RANK FOLDER

FOLDER/cases.json lists the cases; results land in FOLDER/<case>.json and FOLDER/<case>-step<N>/.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from miles_verifiers.config.settings import TrainingSection
from miles_verifiers.errors import MilesVerifiersError
from miles_verifiers.training.megatron import optimizer, parallel
from miles_verifiers.training.megatron.trainer import MegatronTrainer


class WithoutNormSums(optimizer.CpuUpdater):
    """What is wrong in an obvious port of the optimizer to the CPU: the gradients of q and k norms stay one rank's own."""

    def _sum_over_ranks(self) -> None:
        for parameter in self._model.parameters():
            torch.distributed.all_reduce(parameter.grad, group=parallel.data_group())


def run(case: dict[str, Any], rank: int, folder: Path) -> None:
    correct = optimizer.CpuUpdater
    if case.get("without_norm_sums"):
        optimizer.CpuUpdater = WithoutNormSums  # type: ignore[misc]
    trainer = MegatronTrainer(
        model=Path(case["model"]),
        checkpoint=Path(case["checkpoint"]),
        # Not validated: a run on the CPU has one process, and what is split here is meant for GPUs.
        config=TrainingSection.model_construct(**case["settings"]),
        dtype="float32",
        rank=rank,
        world_size=2,
        init_method=f"file://{folder / case['name']}.init",
    )
    optimizer.CpuUpdater = correct  # type: ignore[misc]
    try:
        results = []
        for step in range(1, case["steps"] + 1):
            results.append(asdict(trainer.train(case["rows"], step)))
            trainer.export_hf(folder / f"{case['name']}-step{step}")
        if case.get("save"):
            trainer.save(Path(case["save"]), case["steps"], {"step": case["steps"]})
        result = {"results": results, "loaded": [trainer.loaded_iteration, trainer.loaded_extra]}
    except MilesVerifiersError as error:
        result = {"error": str(error)}
    finally:
        trainer.close()
    (folder / f"{case['name']}-rank{rank}.json").write_text(json.dumps(result))


def main() -> None:
    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    for case in json.loads((folder / "cases.json").read_text()):
        run(case, rank, folder)


if __name__ == "__main__":
    main()
