"""The command line and the environment of the SGLang server: pure functions of the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_verifiers.config.settings import EngineSection
from miles_verifiers.engine import leftovers
from miles_verifiers.system import environ

HOST = "127.0.0.1"

_CPU_ARGUMENTS = (
    "--sampling-backend", "pytorch",
    "--grammar-backend", "none",
    "--disable-overlap-schedule",
    "--schedule-policy", "lpm",  # one sample of a group fills the prefix cache, the others of the group read it
    "--cuda-graph-backend-decode", "disabled",
    "--cuda-graph-backend-prefill", "disabled",
    "--sleep-on-idle",  # an idle scheduler spins on a core otherwise; a training step beside it took 53 s instead of 5
    "--decode-log-interval", "10",  # how often the throughput figure is renewed, in decoding steps
)  # fmt: skip

_CPU_ONLY = {
    "SGLANG_PLATFORM": "miles_verifiers_cpu",  # named, SGLang stops with a message where the entry point is missing
    "CUDA_VISIBLE_DEVICES": "",
    # Threads that spin at a barrier wait for one that has no core. With a busy neighbour on two cores decoding fell from 60
    # to 9 tokens a second; with threads that sleep there it stayed at 50.
    "OMP_WAIT_POLICY": "passive",
}


def server_argv(
    config: EngineSection,
    *,
    python: Path,
    model: Path,
    dtype: str,
    context_length: int,
    port: int,
    weight_version: str = "0",
    random_seed: int = 0,
) -> list[str]:
    """The command that starts the server. `context_length` counts prompt and reply tokens of one request together."""
    command = [str(python), "-P", "-m", "miles_verifiers.engine.launch"]
    arguments = {
        "model-path": model,
        "host": HOST,
        "port": port,
        "device": config.device,
        "dtype": dtype,
        "context-length": context_length,
        "attention-backend": config.attention_backend,
        "mem-fraction-static": config.mem_fraction_static,
        "max-running-requests": config.max_running_requests,
        "random-seed": random_seed,
        "weight-version": weight_version,
    }
    if config.max_total_tokens is not None:
        arguments["max-total-tokens"] = config.max_total_tokens
    if config.device == "cuda":
        arguments["tensor-parallel-size"] = config.gpus_per_engine
    pairs = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
    if config.enable_deterministic_inference:
        pairs.append("--enable-deterministic-inference")
    # /health generates a token before it says yes, so a warm-up of its own adds nothing.
    device = list(_CPU_ARGUMENTS) if config.device == "cpu" else []
    return [*command, *pairs, "--skip-server-warmup", *device, *config.extra_args]


def server_environment(
    base: Mapping[str, str], config: EngineSection, *, temporary: Path, gpu_ids: Sequence[int] = ()
) -> dict[str, str]:
    """`base` without secrets, which a model server needs none of, and with what SGLang must see.

    `gpu_ids` are those of CUDA_VISIBLE_DEVICES; empty leaves the variable as it is.
    """
    env = environ.without_secrets(base)
    env |= {
        "HF_HUB_OFFLINE": "1",
        "NO_PROXY": f"{HOST},localhost",  # SGLang calls itself over HTTP
        "no_proxy": f"{HOST},localhost",
        "TMPDIR": str(temporary),
        leftovers.TEMPORARY_VARIABLE: str(temporary),
    }
    if config.device == "cpu":
        # Set, it would send layers to sgl_kernel although our platform is active.
        env.pop("SGLANG_USE_CPU_ENGINE", None)
        env |= _CPU_ONLY | {"SGLANG_CACHE_DIR": str(temporary / "cache")}
    elif gpu_ids:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in gpu_ids)
    return env
