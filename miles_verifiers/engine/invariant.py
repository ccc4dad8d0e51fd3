"""Arithmetic that gives a request the same bits whatever is computed beside it, on the CPU.

This is SGLang's batch-invariant mode (`enable_batch_invariant_mode` in sglang/srt/batch_invariant_ops, 0.5.23), which needs a
GPU there. A matrix product's last bits depend on how many rows it has: libraries choose another kernel for one row than for
thirty, and another for the rows that a tile leaves over. So every product is made of blocks of few sizes, which were seen to
give the same bits on this machine; and attention (attention_blocks.py) of queries and keys that a token's own position
decides alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 32
"""Rows of the block that decides what the bits are."""
_OTHERS = (8, 16, 64, 128)
"""Rows of blocks that are used for a product, too, where they give the same bits."""

_library: torch.library.Library | None = None
"""Overrides last as long as this object."""
_sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
"""By shape, layout and type of the right-hand matrix."""


def enable(enable_bmm: bool = True) -> None:
    """Let every product of two matrices in this process be made of blocks. Harmless when repeated.

    `enable_bmm` is there because SGLang may pass it; products of stacks of matrices, which attention makes, are left alone.
    """
    global _library
    if _library is None:
        _library = torch.library.Library("aten", "IMPL")
        _library.impl("mm", mm, "CPU")
        _library.impl("addmm", addmm, "CPU")


def mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left [T, K] times right [K, N]."""
    count, columns = left.shape[0], right.shape[1]
    result = left.new_empty(count, columns)
    for start, size in _blocks(count, sizes(right)):
        end = min(start + size, count)
        rows = left[start:end]
        if end - start == size:
            torch.mm(rows, right, out=result[start:end])  # with `out` it is not overridden
        else:
            filled = left.new_zeros(size, left.shape[1])
            filled[: end - start] = rows
            result[start:end] = torch.mm(filled, right, out=left.new_empty(size, columns))[: end - start]
    return result


def addmm(
    bias: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    """beta bias + alpha left [T, K] times right [K, N]; bias [N], [1, N] or [T, N]."""
    return torch.add(bias if beta == 1 else bias * beta, mm(left, right), alpha=alpha)


def sizes(right: torch.Tensor) -> tuple[int, ...]:
    """Rows of the blocks that may be multiplied with `right`, rising: tried out at first, then remembered."""
    key = (right.shape, right.stride(), right.dtype, torch.get_num_threads())
    if key not in _sizes:
        _sizes[key] = tuple(sorted((BLOCK, *(size for size in _OTHERS if _agrees(size, right)))))
    return _sizes[key]


def _agrees(size: int, right: torch.Tensor) -> bool:
    """Whether blocks of `size` rows give the bits of those of BLOCK, in every place of the block."""
    count = max(size, BLOCK)
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(count, right.shape[0], generator=random).to(right.dtype)
    one, other = (
        torch.cat([torch.mm(part, right, out=right.new_empty(s, right.shape[1])) for part in rows.split(s)])
        for s in (size, BLOCK)
    )
    return torch.equal(one, other)


def _blocks(count: int, available: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """First row and size of each: the smallest that holds all that is left, else the largest.

    Few large blocks, because the library goes through the whole right-hand matrix for each.
    """
    start = 0
    while start < count:
        size = next((each for each in available if each >= count - start), available[-1])
        yield start, size
        start += size
