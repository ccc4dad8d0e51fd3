"""Writing torch_dist checkpoints without CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)


class CpuTorchDistSave(TorchDistSaveShardedStrategy):
    """The stock format on disk, written by torch's plain writer.

    The stock writer is asynchronous and calls CUDA streams (megatron-core 0.16.1 to 0.19.2,
    dist_checkpointing/strategies/filesystem_async.py and state_dict_saver.py). The stock reader reads what this writes.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path, *args: Any, **kwargs: Any) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
