"""The commands of a job, as `--dry-run` prints them; those of preflight, convert and train are the ones that the job runs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import uv

from miles_verifiers.config.settings import RunConfig
from miles_verifiers.provision import environments
from miles_verifiers.provision.roles import base_recipe, environment_lock, gpus_needed, locks
from miles_verifiers.provision.stack import candidate_python, probe
from miles_verifiers.record.rundir import RunDir, env_role
from miles_verifiers.system import environ

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""For processes that work on local folders only: a look-up in a hub would wait for minutes where there is none."""


@dataclass(frozen=True, slots=True)
class Command:
    phase: str
    what: str
    argv: tuple[str, ...]
    makes: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    """Set over the inherited environment, from which PYTHONPATH and credentials were taken out."""
    timeout: float = 3600.0

    def as_text(self) -> str:
        lines = [
            f"{self.phase}: {self.what}",
            f"  interpreter  {self.argv[0]}",
            f"  command      {' '.join(self.argv)}",
        ]
        lines += [f"  environment  {name}={value}" for name, value in sorted(self.environment.items())]
        lines += [f"  makes        {path}" for path in self.makes]
        return "\n".join(lines)


def plan(config: RunConfig, run: RunDir, cache: Path) -> list[Command]:
    """All commands of the job, in order; nothing is run or looked up beyond the local files that they name."""
    return [
        *_venv_commands(config, cache),
        preflight_command(run),
        convert_command(config, run),
        train_command(config, run),
        Command(
            "verify",
            "every rule over the dump",
            ("miles-verifiers", "verify", str(run.path)),
            (str(run.path / "manifest.json"),),
        ),
    ]


def preflight_command(run: RunDir) -> Command:
    return Command(
        "prepare",
        "preflight: a look from inside a Ray worker of each role",
        (str(run.python("stack")), "-P", "-m", "miles_verifiers.training.preflight", str(run.path)),
        (),
        {**OFFLINE, **environ.RAY},
        timeout=300,
    )


def convert_command(config: RunConfig, run: RunDir) -> Command:
    source, target = run.model(config.model.source), run.torch_dist(config.model.source)
    return Command(
        "convert",
        "Hugging Face -> Megatron torch_dist",
        (
            str(run.python("stack")),
            "-P",
            "-m",
            "miles_verifiers.training.megatron.convert",
            "hf-to-megatron",
            str(source),
            str(target),
            "--tp",
            str(config.training.tensor_model_parallel_size),
        ),
        (str(target / "release"), str(target / "latest_checkpointed_iteration.txt")),
        OFFLINE,
        timeout=1800,
    )


def train_command(config: RunConfig, run: RunDir) -> Command:
    step = config.rollout.batch_timeout + config.training.step_timeout + config.training.sync_timeout
    start = config.engine.start_timeout + config.training.load_timeout
    evaluations = 2 + config.training.num_steps // config.rollout.eval_interval if config.rollout.eval_interval else 0
    return Command(
        "train",
        f"{config.training.num_steps} step(s) of rollouts and GRPO",
        (str(run.python("stack")), "-P", "-m", "miles_verifiers.training.loop", str(run.path)),
        (str(run.path / "dump" / "rollout"), str(run.path / "metrics.jsonl"), str(run.checkpoints)),
        {**OFFLINE, **environ.RAY},
        timeout=start + config.training.num_steps * step + evaluations * config.rollout.eval_timeout,
    )


def _venv_commands(config: RunConfig, cache: Path) -> list[Command]:
    uv_bin, below = uv.find_uv_bin(), "the stack's packages through a .pth file"
    install = (uv_bin, "pip", "install", "--no-deps", "--require-hashes", "--compile-bytecode", "-r")
    commands = []
    if gpus_needed(config) or not probe(candidate_python()).missing:
        commands.append(
            Command("prepare", "check the image", (str(candidate_python()), "-I", "-c", "(versions, GPUs)"), ())
        )
    else:
        recipe = base_recipe()
        venv = cache / "venvs" / f"{recipe.role}-{recipe.key()}"
        commands.append(
            Command("prepare", "base venv: the stack for CPU", (*install, str(locks() / "stack-cpu.txt")), (str(venv),))
        )
    commands.append(
        Command(
            "prepare",
            f"role stack: miles_verifiers over {below}",
            (*install, str(locks() / "package.txt")),
            (f"{cache}{os.sep}venvs{os.sep}stack-<hash>",),
        )
    )
    for number, environment in enumerate(config.all_environments):
        lock, source = environment_lock(environment.verifiers), environments.parse(environment.source)
        by_prime = ("prime", "env", "install") if source.kind == "hub" else (uv_bin, "pip", "install")
        commands.append(
            Command(
                "prepare",
                f"role {env_role(number)}: Verifiers {environment.verifiers} and {Path(source.place).name} over {below}",
                (*install, str(lock), "&&", *by_prime, environment.source),
                (f"{cache}{os.sep}venvs{os.sep}env-<hash>",),
            )
        )
    commands.append(
        Command("prepare", "the model", ("(in this process)", config.model.source), (str(cache / "models"),))
    )
    return commands
