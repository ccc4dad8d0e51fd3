"""Sampling on the CPU: one number for each row, and the token that the row's distribution function has there.

SGLang draws a number for every token of the vocabulary, with a seed (multinomial_with_seed in sglang/srt/layers/sampler.py,
0.5.23, which also needs a GPU) and without (torch.multinomial).
"""

from __future__ import annotations

import torch

_MASK53 = 2**53 - 1
# The constants of splitmix64 (Steele, Lea and Flood, OOPSLA 2014), as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def draw(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """One column for each row of `weights` [B, V], which need not sum to one, by `numbers` [B] of [0, 1): [B].

    A column of weight 0 is never drawn. Sums are of double precision: in single precision rare tokens of a large vocabulary
    would share one step of the distribution function.
    """
    reached = torch.cumsum(weights, dim=1, dtype=torch.float64)  # [B, V]
    whole = reached[:, -1]
    below = torch.nextafter(whole, torch.zeros_like(whole))  # rounding must not lead behind the last token
    at = torch.minimum(numbers * whole, below)
    return torch.searchsorted(reached, at[:, None], right=True)[:, 0]


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), float64: a hash of seed [B] and position [B]."""
    bits = _mixed(_mixed(seeds.to(torch.int64)) + positions.to(torch.int64) * _GOLDEN)
    return (_shifted(bits, 11) & _MASK53).to(torch.float64) / 2**53


def sampling_from_probs_torch(
    probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """SGLang's function of that name: one column for each row of `probs` [B, V], [B] int32."""
    if sampling_seed is None:
        numbers = torch.rand(len(probs), dtype=torch.float64)
    else:
        assert positions is not None
        numbers = uniform(sampling_seed, positions)
    return draw(probs, numbers).to(torch.int32)


def multinomial_with_seed(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """SGLang's function of that name, which it calls after filters: one column for each row of `logprobs` [B, V], [B, 1]."""
    return draw(logprobs.to(torch.float64).exp(), uniform(seed, positions))[:, None]


def take_over() -> None:
    """Put the above in the place of SGLang's, in this process."""
    from sglang.srt.layers import sampler

    sampler.sampling_from_probs_torch = sampling_from_probs_torch
    sampler.multinomial_with_seed = multinomial_with_seed


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right as of unsigned numbers; torch has no arithmetic on uint64."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64; products wrap around."""
    values = (values ^ _shifted(values, 30)) * _MIX_1
    values = (values ^ _shifted(values, 27)) * _MIX_2
    return values ^ _shifted(values, 31)
