"""Why a rollout came to nothing, by name. Pure: the names under which failures and expired deadlines are counted.

A name stands for a kind of failure, so that a thousand different messages make a short table. Texts are those of `traces`,
`clock` and the backends, and those of Verifiers' error boundaries ("task setup timed out": verifiers/v1/errors.py, 0.2.0).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from miles_verifiers.record.samples import Sample

BAD_REWARD = "bad reward"
EQUAL_REWARDS = "equal rewards"

_PATTERNS: tuple[tuple[str, str], ...] = (
    ("group deadline", r"(scoring: )?the group's deadline"),
    ("batch deadline", r"(scoring: )?the step's deadline"),
    ("setup deadline", r"\w+: .*setup timed out"),
    ("scoring deadline", r"\w+: .*(scoring|finalize) timed out|scoring: group rewards took more than"),
    ("scoring deadline", r"scoring: TimeoutError: .*finalize\(\) exceeded"),  # verifiers/v1/env.py, 0.3.1 and 0.4.0
    ("request deadline", r"DeadlineExceeded\b"),
    (BAD_REWARD, r"scoring: (the reward|the metric|the environment gave no reward|no reward is named)"),
    ("incomplete group", r"scoring: the group is incomplete"),
    ("group scoring failed", r"scoring: "),
    ("scoring failed", r"\w+: .*\bscoring: "),
    ("setup failed", r"\w+: .*\bsetup: "),
    ("task cannot be run", r"the task cannot be run"),
    ("empty reply", r"the reply is empty"),
    ("no reply", r"no reply was sampled"),
    ("prompt too long", r"the prompt alone exceeds"),
)
_TYPE = re.compile(r"([A-Z]\w+): ")


def cause_of(sample: Sample) -> str:
    """The name of what went wrong with a sample; empty where nothing did.

    A rollout that its deadline cut short is named, too, although what it made until then may be trained on.
    """
    if sample.stop_condition == "harness_timeout":
        return "rollout deadline"
    return name_of(sample.error)


def name_of(error: str) -> str:
    """The name of an error's text: one of the list above, the error's type, or `other`."""
    if not error:
        return ""
    for name, pattern in _PATTERNS:
        if re.match(pattern, error):
            return name
    typed = _TYPE.match(error)
    return typed.group(1) if typed else "other"


def most_common(samples: Iterable[Sample]) -> str:
    """The most frequent cause among samples; empty where there is none. Ties go to the first in the alphabet."""
    counts = Counter(filter(None, map(cause_of, samples)))
    return min(counts, key=lambda name: (-counts[name], name), default="")


def table(title: str, counts: Mapping[str, int]) -> list[str]:
    """Lines of text, the most frequent cause first."""
    rows = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [title, *(f"  {count:>5}  {name}" for name, count in rows)]
