"""Warnings of upstream libraries about each other, which no user can act on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hushed() -> Iterator[None]:
    """Around a call into megatron-core: warnings are not shown, exceptions pass.

    megatron-core calls its own deprecated arguments and torch's deprecated checkpoint functions. Seen with 0.16.1 and 0.19.2
    on torch 2.14, a dozen different ones, other ones in each: at building a layer (transformer/mlp.py, core/utils.py) and
    at writing and reading a checkpoint (dist_checkpointing/strategies/torch.py).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
