"""Dynamic sampling filters: a function that says which groups are worth training on, named by its path.

    my_package.filters:keep_hard         module and function
    my_package.filters.keep_hard         the same, as Miles writes it

The function is called as in Miles: `f(args, samples, **kwargs)`, `args` with the fields of the run's [rollout] table,
`samples` the group's usable samples. It returns a bool, or an object with `keep` and `reason`. It is imported in the
environment's interpreter, so that it may lie in the environment's package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from miles_verifiers.config.settings import RolloutSection
from miles_verifiers.errors import ConfigError, RolloutError
from miles_verifiers.record.samples import Sample
from miles_verifiers.rollout.causes import EQUAL_REWARDS
from miles_verifiers.rollout.policies import Filter

NONZERO_STD = "check_reward_nonzero_std"
_WHERE = "rollout.dynamic_sampling_filter_path"


def load_filter(rollout: RolloutSection) -> Filter | None:
    """The configured filter. Raises ConfigError where its path leads to no function."""
    path = rollout.dynamic_sampling_filter_path
    if path is None:
        return None
    if path.replace(":", ".").rpartition(".")[2] == NONZERO_STD:
        # Miles' own filter of this name, by whichever path: Miles is not needed for it.
        return nonzero_spread
    return _adapted(_function(path), path, SimpleNamespace(**rollout.model_dump()))


def nonzero_spread(samples: Sequence[Sample]) -> tuple[bool, str]:
    """Keeps groups whose rewards are not all equal."""
    return len({sample.reward for sample in samples}) > 1, EQUAL_REWARDS


def _function(path: str) -> Callable[..., Any]:
    module, colon, name = path.partition(":")
    if not colon:
        module, _, name = path.rpartition(".")
    if not module or not name:
        raise ConfigError(f"{path!r} is no path of a function", where=_WHERE, next_step="write package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the user's module raises while it is imported
        raise ConfigError(
            f"the filter {path} cannot be imported: {type(error).__name__}: {error}",
            where=_WHERE,
            next_step="name a function of the environment's package, or of one that its interpreter has",
        ) from error
    if not callable(function):
        raise ConfigError(f"the filter {path} is a {type(function).__name__}, not a function", where=_WHERE)
    return function


def _adapted(function: Callable[..., Any], path: str, args: SimpleNamespace) -> Filter:
    def decide(samples: Sequence[Sample]) -> tuple[bool, str]:
        try:
            answer = function(args, list(samples))
            return bool(getattr(answer, "keep", answer)), str(getattr(answer, "reason", None) or "")
        except Exception as error:
            # Dropping the group would hide a broken filter behind "filter" in a table.
            raise RolloutError(
                f"the filter {path} raised {type(error).__name__}: {error}",
                where=f"{_WHERE}, task {samples[0].task_index} of {samples[0].environment}",
                next_step="mend it; it is given the usable samples of one group",
            ) from error

    return decide
