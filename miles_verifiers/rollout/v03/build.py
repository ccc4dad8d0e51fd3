"""Our configuration -> a Verifiers environment of the Env API (0.3.1, 0.4.0).

An environment has seats, each an AgentConfig of its config: `agent` in the plain case, `solver` and `judge`, `assistant`
and `user` in others. What the configuration says of harness, turns and deadlines goes to every seat, except where the
environment's author or `environment.env` pins it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import default_harness_id, harness_config_type

from miles_verifiers.config.settings import EnvironmentSection, RolloutSection
from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.rollout import inline_harness
from miles_verifiers.rollout.backend import Sampling
from miles_verifiers.rollout.build import check_api, keep_workdirs_in_tempdir, not_built, take_tasks
from miles_verifiers.rollout.look import taskset_id
from miles_verifiers.rollout.renderers import RendererChoice

_ATTEMPTS = ("attempts", "n")
"""Fields in which an environment's config may say how often one episode attempts its task."""
_INLINE_ID = inline_harness.PLUGIN_ID


def build_environment(environment: EnvironmentSection, rollout: RolloutSection) -> Any:
    """The `vf.Env` that the configuration describes. Raises EnvironmentPackageError."""
    name = taskset_id(environment.taskset)
    taskset = dict(environment.taskset)
    keep_workdirs_in_tempdir()
    _reach_loopback_directly()
    inline_harness.register()
    try:
        check_api(name)
        config = vf.resolve_env_config({**environment.env, "taskset": taskset})
        seats = {seat: _seated(spec, name, environment, rollout) for seat, spec in seats_of(config).items()}
        timeout = config.timeout
        if timeout.finalize is None:
            timeout = timeout.model_copy(update={"finalize": rollout.scoring_timeout})
        # Of one episode's agents as many run at once as the rollouts' own bound allows.
        config = config.model_copy(update={**seats, "timeout": timeout, "max_concurrent_agents": None})
        return vf.load_environment(config)
    except EnvironmentPackageError:
        raise
    except Exception as error:
        hint = "is the package installed in this interpreter, and made for this version of Verifiers?"
        raise not_built(name, error, hint) from error


def seats_of(config: Any) -> dict[str, Any]:
    """AgentConfigs of an environment's config by name."""
    return {name: value for name, value in config if isinstance(value, vf.AgentConfig)}


def attempts_field(env: Any, configured: str | None) -> str | None:
    """Field of the environment's config that says how many attempts one episode makes; None where an episode is one.

    Only an environment of a single seat is taken for one whose episode is a whole group. Raises EnvironmentPackageError for
    a configured field that does not exist.
    """
    fields = type(env.config).model_fields
    if configured:
        if configured not in fields:
            raise EnvironmentPackageError(
                f"the environment's config has no field {configured!r}",
                where="environment.attempts_field",
                next_step=f"it has: {', '.join(sorted(fields))}",
            )
        return configured
    if len(seats_of(env.config)) != 1:
        return None
    return next((name for name in _ATTEMPTS if name in fields and fields[name].annotation is int), None)


def load_tasks(env: Any, environment: EnvironmentSection) -> list[Any]:
    """The environment's tasks, as `take_tasks` takes them."""
    return take_tasks(str(env.config.env_id), env.taskset, environment.endless_tasks if env.taskset.INFINITE else None)


def check_tools(env: Any, tasks: list[Any], renderer: RendererChoice) -> None:
    """Raises EnvironmentPackageError where the environment has tools that the harness or the renderer cannot serve."""
    task = tasks[0]
    if not (task.toolsets(task.config) or env.taskset.toolsets(env.taskset.config)):
        return
    where = f"environment {env.config.env_id}"
    harnesses = {seat: env._agent_harness(spec).id for seat, spec in seats_of(env.config).items()}
    if set(harnesses.values()) == {_INLINE_ID}:
        raise EnvironmentPackageError(
            "the environment has tools, and the inline harness runs none",
            where=where,
            next_step="set environment.harness = 'null'",
        )
    if not renderer.tools:
        raise EnvironmentPackageError(
            f"the environment has tools, and the renderer {renderer.name} can render none",
            where=where,
            next_step="set environment.renderer to the model's own renderer",
        )


def client_config(base_url: str, model: Path, renderer: RendererChoice) -> Any:
    """The `vf.TrainClientConfig` that reaches the engine through the gateway at `base_url`."""
    return vf.TrainClientConfig.model_validate(
        {
            "base_url": base_url,
            "api_key_var": "MILES_VERIFIERS_NO_KEY",
            "renderer": {"name": renderer.name, **renderer.settings},
            "renderer_model_name": str(model),
        }
    )


def sampling(how: Sampling) -> Any:
    """The `vf.SamplingConfig` of a rollout."""
    return vf.SamplingConfig.model_validate(
        {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k, "max_tokens": how.max_tokens}
    )


def _seated(spec: Any, taskset_id: str, environment: EnvironmentSection, rollout: RolloutSection) -> Any:
    """A seat's AgentConfig with what nobody pinned filled in. Programs run on this machine: Verifiers' own default is a cloud."""
    pinned = spec.model_fields_set
    harness = _harness_id(environment.harness, taskset_id, spec.harness)
    deadlines = {
        "setup": rollout.setup_timeout,
        "rollout": rollout.rollout_timeout,
        "finalize": rollout.scoring_timeout,
        "scoring": rollout.scoring_timeout,
    }
    update: dict[str, Any] = {
        "timeout": spec.timeout.model_copy(
            update={stage: seconds for stage, seconds in deadlines.items() if getattr(spec.timeout, stage) is None}
        )
    }
    if harness is not None:
        update["harness"] = harness_config_type(harness).model_validate({"id": harness})
    if "runtime" not in pinned:
        update["runtime"] = SubprocessConfig()
    if spec.max_turns is None:
        update["max_turns"] = environment.max_turns
    return spec.model_copy(update=update)


def _harness_id(configured: str, taskset_id: str, pinned: Any) -> str | None:
    """The harness to put on a seat; None leaves it as it is.

    `inline` gives way to a harness that is pinned or that the environment's package brings along, except for `null`, whose
    work it does.
    """
    if configured != "inline":
        return configured if pinned is None else None
    if pinned is not None:
        return _INLINE_ID if pinned.id == "null" else None
    bundled = str(default_harness_id(taskset_id))
    return _INLINE_ID if bundled == "bash" else bundled


def _reach_loopback_directly() -> None:
    """httpx, under Verifiers' client, asks a proxy of the environment even for loopback unless NO_PROXY names it."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        os.environ[name] = ",".join(dict.fromkeys([*hosts, "127.0.0.1", "localhost"]))
