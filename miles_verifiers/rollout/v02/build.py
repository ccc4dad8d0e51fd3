"""Our configuration -> a Verifiers 0.2.x environment."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.loaders import default_harness_id

from miles_verifiers.config.settings import EnvironmentSection, RolloutSection
from miles_verifiers.errors import EnvironmentPackageError
from miles_verifiers.rollout import inline_harness
from miles_verifiers.rollout.backend import Sampling
from miles_verifiers.rollout.build import check_api, keep_workdirs_in_tempdir, not_built, take_tasks
from miles_verifiers.rollout.look import taskset_id

_INLINE_ID = inline_harness.PLUGIN_ID


def build_environment(environment: EnvironmentSection, rollout: RolloutSection) -> Any:
    """The `vf.Environment` that the configuration describes. Raises EnvironmentPackageError."""
    name = taskset_id(environment.taskset)
    taskset = dict(environment.taskset)
    keep_workdirs_in_tempdir()
    inline_harness.register()
    try:
        check_api(name)
        harness = _harness_id(environment.harness, name)
        return vf.Environment(
            vf.EnvConfig.model_validate(
                {
                    "taskset": taskset,
                    "harness": {"id": harness},
                    "max_turns": environment.max_turns,
                    "timeout": {
                        "setup": rollout.setup_timeout,
                        "rollout": rollout.rollout_timeout,
                        "finalize": rollout.scoring_timeout,
                        "scoring": rollout.scoring_timeout,
                    },
                }
            )
        )
    except EnvironmentPackageError:
        raise
    except Exception as error:
        hint = (
            "set environment.harness = 'null'"
            if "MCP" in str(error)
            else "is the package installed in this interpreter?"
        )
        raise not_built(name, error, hint) from error


def load_tasks(env: Any, environment: EnvironmentSection) -> list[Any]:
    """The environment's tasks, as `take_tasks` takes them.

    A taskset without an end says so by INFINITE. 0.2.0 does not know the name and asks for a list, but packages that are
    made for later versions as well bring it along.
    """

    def tasks() -> Any:
        yield from env.taskset.load()  # within take_tasks, which names what it raises

    endless = getattr(env.taskset, "INFINITE", False)
    return take_tasks(str(env.config.env_id), tasks(), environment.endless_tasks if endless else None)


def _harness_id(configured: str, taskset_id: str) -> str:
    """`inline` gives way to a harness that the environment's package brings along."""
    if configured != "inline":
        return configured
    bundled = str(default_harness_id(taskset_id))
    return _INLINE_ID if bundled in ("default", "bash") else bundled  # Verifiers' own, in 0.2.0 and in 0.2.1


def sampling(how: Sampling, seed: int | None = None) -> Any:
    """The `vf.SamplingConfig` of a rollout. It passes keys that it does not know on to the client."""
    seeded = {} if seed is None else {"sampling_seed": seed}
    return vf.SamplingConfig.model_validate(
        {
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k,
            "max_tokens": how.max_tokens,
            **seeded,
        }
    )
