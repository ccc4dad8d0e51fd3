"""Warnings of upstream libraries about their own insides, which no user can act on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_KNOWN = (
    # megatron-core 0.16.1, transformer/transformer_config.py: said of the default value.
    "full scope is deprecated",
)


@contextmanager
def hushed() -> Iterator[None]:
    """Around a call into megatron-core, torch.distributed.checkpoint below it included: deprecations are not shown.

    They are upstream's calls of upstream's functions. Other warnings are shown, but for those listed above.
    """
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        for message in _KNOWN:
            warnings.filterwarnings("ignore", message=message)
        yield
