"""Sampling on the CPU, with a seed and without: each token as often as it is likely, what is impossible never."""

from __future__ import annotations

import math

import pytest
import torch

from miles_verifiers.engine.sampling import draw, multinomial_with_seed, sampling_from_probs_torch, uniform

N = 100_000
PROBABILITIES = torch.tensor([0.5, 0.0, 0.25, 0.15, 0.07, 0.03, 0.0])
POSSIBLE = PROBABILITIES > 0
ONCE_IN_A_THOUSAND = 18.5
"""Of chi-square with 4 degrees of freedom."""


def drawn(how: str, probabilities: torch.Tensor = PROBABILITIES) -> torch.Tensor:
    """N columns; `filtered` is the way of top-k and top-p, whose rest does not sum to one."""
    many, one = torch.arange(N), torch.full((N,), 7)
    if how == "filtered":
        return multinomial_with_seed((probabilities * 0.3).log().expand(N, -1), many, one)[:, 0]
    torch.manual_seed(0)
    seeds = {"unseeded": (), "by seed": (many, one), "by position": (one, many)}[how]
    return sampling_from_probs_torch(probabilities.expand(N, -1), *seeds)


def chi_square(columns: torch.Tensor) -> float:
    expected = PROBABILITIES[POSSIBLE] * len(columns)
    counts = torch.bincount(columns, minlength=len(PROBABILITIES))
    return float(((counts[POSSIBLE] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("how", ["unseeded", "by seed", "by position", "filtered"])
def test_each_token_is_drawn_as_often_as_it_is_likely(how: str) -> None:
    columns = drawn(how)
    assert POSSIBLE[columns].all()
    assert chi_square(columns) < ONCE_IN_A_THOUSAND
    # The control: two hundredths moved from one token to another would show.
    moved = PROBABILITIES + torch.tensor([-0.02, 0, 0.02, 0, 0, 0, 0])
    assert chi_square(drawn(how, moved)) > 5 * ONCE_IN_A_THOUSAND


@pytest.mark.parametrize("how", ["unseeded", "by seed", "by position"])
def test_neighbours_are_independent(how: str) -> None:
    """A draw and the next agree as often as independent ones: sum of p squared."""
    columns = drawn(how)
    agree, expected = float((columns[1:] == columns[:-1]).double().mean()), float((PROBABILITIES**2).sum())
    assert abs(agree - expected) < 4 * math.sqrt(expected * (1 - expected) / N)


def test_every_token_of_a_large_vocabulary_can_be_drawn() -> None:
    """A first token of 0.999, and 50,000 that share the rest: each has less than a step of single precision at one."""
    probabilities = torch.cat([torch.tensor([0.999]), torch.full((50_000,), 0.001 / 50_000)])
    wanted = torch.arange(30_000, 30_100)
    exact = probabilities.double()
    middles = ((exact.cumsum(0) - exact / 2) / exact.sum())[wanted]
    assert draw(probabilities.expand(100, -1), middles).tolist() == wanted.tolist()
    # The control: sums of single precision cannot tell these tokens apart.
    assert len(probabilities.cumsum(0)[wanted].unique()) < 100


def test_the_ends_of_the_distribution_are_possible_tokens() -> None:
    numbers = torch.tensor([0.0, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(PROBABILITIES.expand(3, -1), numbers).tolist() == [0, 5, 5]
    assert draw(PROBABILITIES.flip(0).expand(3, -1), numbers).tolist() == [1, 6, 6]


def test_a_row_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([5, 9, 2**31 - 1]), torch.tensor([0, 17, 4095])
    probabilities = PROBABILITIES.expand(3, -1)
    whole = sampling_from_probs_torch(probabilities, seeds, positions)
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(sampling_from_probs_torch(probabilities[one], seeds[one], positions[one]), whole[one])


def test_another_seed_or_position_draws_others() -> None:
    """Control of the above."""
    seeds, positions = torch.arange(200), torch.zeros(200)
    here = uniform(seeds, positions)
    for other in (uniform(seeds + 200, positions), uniform(seeds, positions + 1)):
        assert not torch.isin(other, here).any()


def test_numbers_are_even_and_lie_within() -> None:
    numbers = uniform(torch.arange(N), torch.arange(N))
    assert 0 <= float(numbers.min()) < 1e-4
    assert 1 - 1e-4 < float(numbers.max()) < 1
    counts = torch.histc(numbers.float(), 100, 0, 1)
    assert float(((counts - N / 100) ** 2 / (N / 100)).sum()) < 148  # 99 degrees of freedom: once in a thousand
