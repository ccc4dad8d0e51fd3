"""SGLang on a machine without a GPU: a platform in pure torch.

SGLang asks the entry point group `sglang.srt.platforms` for a platform at start (sglang/srt/platforms/__init__.py, 0.5.23).
Its own CPU platform needs kernels (`sgl_kernel`) whose CPU build is on no registry; without any platform rotary embeddings
look for vllm. An out-of-tree platform whose dispatch key is `native` makes every layer take its plain torch path.
"""

from __future__ import annotations

from typing import Any

PLATFORM = "miles_verifiers.engine.platform_cpu:TorchCpuPlatform"


def activate() -> str | None:
    """Class path of our platform where torch sees no GPU, None (SGLang keeps its own) everywhere else."""
    import torch  # here, because the entry point is also listed by tools that only want its name

    return None if _has_accelerator(torch) else PLATFORM


def _has_accelerator(torch: Any) -> bool:
    return bool(torch.cuda.is_available() or torch.xpu.is_available())
