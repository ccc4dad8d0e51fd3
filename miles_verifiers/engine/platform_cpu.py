"""The class behind `platform.activate`; apart from it because its bases import SGLang."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups import choices
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

# Asked for before the server's arguments are resolved; SGLang leaves this list to platforms (arg_groups/choices.py, 0.5.23).
if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
    choices.add_deterministic_attention_backend_choices(["torch_native"])


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Device operations of SGLang's CPU mixin, layers in plain torch.

    `_enum = OOT`, not CPU: `is_cpu()` would send layers to sgl_kernel (sglang/srt/layers/utils/multi_platform.py, 0.5.23).
    """

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()  # no graphs, no Triton: all False

    def get_dispatch_key_name(self) -> str:
        """Names the method `forward_native` of every layer."""
        return "native"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_graph_runner_cls(self) -> None:
        return None

    def init_backend(self) -> None:
        """Called once by SGLang, when it has imported its model runner."""
        from sglang.srt import batch_invariant_ops

        from miles_verifiers.engine import attention, invariant, sampling

        attention.take_over_torch_native()
        sampling.take_over()
        # Called where the server was started with --enable-deterministic-inference.
        batch_invariant_ops.enable_batch_invariant_mode = invariant.enable
