"""Megatron's process groups: made from an address or, for one process alone, from nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from miles_verifiers.errors import TrainerError


def start(backend: str, *, tensor_parallel: int, rank: int, world_size: int, init_method: str, timeout: float) -> None:
    """Join the process group and lay Megatron's groups over it. Collectives give up after `timeout` seconds.

    Raises TrainerError if the other ranks do not come or the sizes do not fit.
    """
    if world_size % tensor_parallel:
        raise TrainerError(
            f"{world_size} trainer processes cannot be split into tensor parallel groups of {tensor_parallel}"
        )
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    except (RuntimeError, ValueError) as error:
        raise TrainerError(
            f"trainer process {rank} of {world_size} cannot join the others: {error}", where=init_method
        ) from None
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)


def stop() -> None:
    """Leave the groups; a second call does nothing."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@contextmanager
def alone() -> Iterator[None]:
    """Groups of one process, for work that is not spread; no address and no port are taken."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        stop()


def tensor_rank() -> int:
    return int(parallel_state.get_tensor_model_parallel_rank())


def tensor_size() -> int:
    return int(parallel_state.get_tensor_model_parallel_world_size())


def tensor_group() -> Any:
    return parallel_state.get_tensor_model_parallel_group()


def data_rank() -> int:
    return int(parallel_state.get_data_parallel_rank())


def data_size() -> int:
    return int(parallel_state.get_data_parallel_world_size())


def data_group() -> Any:
    return parallel_state.get_data_parallel_group()


def data_group_with_context() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def is_first() -> bool:
    """Whether this process is the one that writes files."""
    return bool(dist.get_rank() == 0)


def on_first(action: Callable[[], object]) -> None:
    """Run `action` on the process that writes files while the others wait; if it raises, all raise the same."""
    failure: list[BaseException | None] = [None]
    if is_first():
        try:
            action()
        except Exception as error:
            failure[0] = error
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise failure[0]


def from_tensor_ranks(piece: Tensor) -> list[Tensor]:
    """The same parameter's pieces of all tensor parallel ranks, in order."""
    size = tensor_size()
    if size == 1:
        return [piece]
    pieces = [piece.new_empty(piece.shape) for _ in range(size)]
    dist.all_gather(pieces, piece.contiguous(), group=tensor_group())
    return pieces


def from_data_ranks(value: Any) -> list[Any]:
    """A picklable value of every data parallel rank, in order; the same list on all of them."""
    values: list[Any] = [None] * data_size()
    if len(values) == 1:
        return [value]
    dist.all_gather_object(values, value, group=data_group())
    return values
