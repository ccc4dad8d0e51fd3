"""Seeded sampling on the CPU: the right distribution, and nothing but seed, position and log-probs in it."""

from __future__ import annotations

import math

import pytest
import torch

from miles_verifiers.engine.seeded import multinomial_with_seed, uniform

PROBABILITIES = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])


def drawn(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    logprobs = PROBABILITIES.log().expand(len(seeds), -1)
    return multinomial_with_seed(logprobs, seeds, positions)[:, 0]


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_each_token_is_drawn_as_often_as_it_is_likely(vary: str) -> None:
    n = 100_000
    many, one = torch.arange(n), torch.full((n,), 7)
    seeds, positions = (many, one) if vary == "seed" else (one, many)
    counts = torch.bincount(drawn(seeds, positions), minlength=5)
    expected = PROBABILITIES * n
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 18.5  # 4 degrees of freedom: above it once in a thousand


def test_neighbours_are_independent() -> None:
    """Draws at one position and the next agree as often as independent ones: sum of p squared."""
    n = 50_000
    seeds = torch.full((n,), 3)
    first, second = drawn(seeds, torch.arange(n)), drawn(seeds, torch.arange(1, n + 1))
    agree, expected = float((first == second).double().mean()), float((PROBABILITIES**2).sum())
    assert abs(agree - expected) < 4 * math.sqrt(expected * (1 - expected) / n)


def test_a_row_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([5, 9, 2**31 - 1]), torch.tensor([0, 17, 4095])
    whole = drawn(seeds, positions)
    alone = [int(drawn(seeds[i : i + 1], positions[i : i + 1])) for i in range(3)]
    assert whole.tolist() == alone


def test_another_seed_or_position_draws_others() -> None:
    """Control of the above."""
    n = 200
    here = drawn(torch.arange(n), torch.zeros(n))
    assert (here != drawn(torch.arange(n) + n, torch.zeros(n))).any()
    assert (here != drawn(torch.arange(n), torch.ones(n))).any()


def test_numbers_lie_within_and_what_is_impossible_is_not_drawn() -> None:
    numbers = uniform(torch.arange(64), torch.arange(64), 4096)
    assert 0 < float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    assert abs(float(numbers.mean()) - 0.5) < 0.005
    logprobs = torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(500, -1)
    assert set(multinomial_with_seed(logprobs, torch.arange(500), torch.zeros(500))[:, 0].tolist()) == {1}
