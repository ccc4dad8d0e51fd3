"""Sampling from a seed of each request's own, on the CPU: SGLang's `--enable-deterministic-inference` without a GPU.

Of what that option does (SGLang 0.5.23), two parts need a GPU: the random numbers, a Triton kernel that
`multinomial_with_seed` calls (sglang/srt/layers/sampler.py), and arithmetic whose last bit does not depend on what else is
in the batch (`enable_batch_invariant_mode`, sglang/srt/batch_invariant_ops). Here the first is done in torch and the second
left out: a request gets the same tokens whatever runs beside it, unless two tokens are all but equally good, and log-probs
that agree but for the last bits.
"""

from __future__ import annotations

import torch

from miles_verifiers.engine import invariant

_MASK32 = 0xFFFFFFFF
# The constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def uniform(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Numbers in (0, 1), [B, size] float64: a hash of seed [B], position [B] and column, so that none depends on the others."""
    start = _mixed(_mixed(seeds.to(torch.int64)) + positions.to(torch.int64) * _GOLDEN)  # [B]
    columns = torch.arange(1, size + 1, dtype=torch.int64) * _GOLDEN
    bits = _mixed(start[:, None] + columns[None, :])
    return ((_shifted(bits, 32) & _MASK32).to(torch.float64) + 0.5) / 2**32


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One column for each row of `logprobs` [B, V], with the probabilities that they name: [B, 1].

    The largest of log-prob plus Gumbel noise (Gumbel, 1954), as in the function of SGLang that it stands for.
    """
    noise = uniform(seed, positions, logprobs.shape[1]).log_().neg_().log_().neg_()
    return torch.argmax(noise.add_(logprobs.to(torch.float64)), dim=1, keepdim=True)


def take_over() -> None:
    """Put the above in the place of SGLang's, in this process."""
    from sglang.srt import batch_invariant_ops
    from sglang.srt.layers import sampler

    sampler.multinomial_with_seed = multinomial_with_seed
    batch_invariant_ops.enable_batch_invariant_mode = invariant.enable


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as of unsigned numbers; torch has no arithmetic on uint64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64; products wrap around."""
    values = (values ^ _shifted(values, 30)) * _MIX_1
    values = (values ^ _shifted(values, 27)) * _MIX_2
    return values ^ _shifted(values, 31)
