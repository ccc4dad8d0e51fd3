"""The policy loss and the mismatch against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from miles_verifiers.errors import TrainerError
from miles_verifiers.training.loss import LossSums, Mismatch, mismatch, policy_loss

CLIP = {"eps_clip": 0.2, "eps_clip_high": 0.28}


def loss_of(ratios, advantages, mask=None, total=None, **clip):
    new = torch.tensor(ratios).log().requires_grad_()
    mask = torch.ones(len(ratios)) if mask is None else torch.tensor(mask)
    old = torch.zeros(len(ratios))
    loss, sums = policy_loss(
        new, old, torch.tensor(advantages), mask, **(CLIP | clip), total_tokens=total or float(mask.sum())
    )
    loss.backward()
    return loss.item(), new.grad.tolist(), sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 2.0, -2.4, -2.4),  # within the upper bound 1.28
        (1.5, 2.0, -2.56, 0.0),  # above it: clipped to 1.28 * 2, no gradient
        (1.5, -2.0, 3.0, 3.0),  # the pessimistic side is never clipped
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),  # below 0.8
    ],
)
def test_clipping_by_hand(ratio, advantage, loss, gradient):
    value, grad, sums = loss_of([ratio], [advantage])
    assert value == pytest.approx(loss)
    assert grad == pytest.approx([gradient])
    assert sums.clip_fraction == (1.0 if gradient == 0.0 else 0.0)


def test_the_upper_bound_is_its_own():
    assert loss_of([1.25], [1.0])[0] == pytest.approx(-1.25)
    assert loss_of([1.25], [1.0], eps_clip_high=0.2)[0] == pytest.approx(-1.2)


def test_masked_tokens_do_not_count_whatever_they_hold():
    value, grad, sums = loss_of([1.0, math.inf, 1.0], [1.0, math.nan, 3.0], mask=[1.0, 0.0, 1.0])
    assert value == pytest.approx(-2.0)
    assert grad == pytest.approx([-0.5, 0.0, -1.5])
    assert sums.tokens == 2.0


def test_sums_by_hand():
    _, _, sums = loss_of([1.5, 1.0], [1.0, 1.0])
    assert sums.ratio_mean == pytest.approx(1.25)
    assert sums.clip_fraction == 0.5
    assert sums.kl_mean == pytest.approx((0.5 - math.log(1.5)) / 2, rel=1e-6)


def test_parts_add_up_to_the_whole():
    ratios, advantages = [0.7, 1.1, 1.4, 0.9, 1.0], [1.0, -1.0, 2.0, 0.5, -0.3]
    whole, gradient, sums = loss_of(ratios, advantages)
    first = loss_of(ratios[:2], advantages[:2], total=5.0)
    rest = loss_of(ratios[2:], advantages[2:], total=5.0)
    assert first[0] + rest[0] == pytest.approx(whole)
    assert first[1] + rest[1] == pytest.approx(gradient)
    added = first[2] + rest[2]
    assert (added.clip_fraction, added.kl_mean) == pytest.approx((sums.clip_fraction, sums.kl_mean))
    # Each part divided by its own tokens would not add up.
    assert loss_of(ratios[:2], advantages[:2])[0] + loss_of(ratios[2:], advantages[2:])[0] != pytest.approx(whole)


def test_shapes_are_checked():
    with pytest.raises(TrainerError, match=r"advantages \[2\]"):
        policy_loss(torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.ones(3), **CLIP, total_tokens=3)
    with pytest.raises(TrainerError, match="flat"):
        policy_loss(*[torch.zeros(1, 3)] * 4, **CLIP, total_tokens=3)
    with pytest.raises(TrainerError, match="flat and of one length"):
        mismatch(torch.zeros(3), torch.zeros(1), torch.ones(3))
    with pytest.raises(TrainerError, match="0 trained tokens"):
        policy_loss(*[torch.zeros(3)] * 4, **CLIP, total_tokens=0)


def test_mismatch_by_hand():
    seen = mismatch(torch.tensor([-1.0, -2.0, -9.0]), torch.tensor([-1.1, -1.5, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert seen.tokens == 2
    assert seen.mean == pytest.approx(0.3, rel=1e-6)
    assert seen.max == pytest.approx(0.5, rel=1e-6)
    k3 = ((math.exp(0.1) - 1 - 0.1) + (math.exp(-0.5) - 1 + 0.5)) / 2
    assert seen.k3 == pytest.approx(k3, rel=1e-5)


def test_mismatch_adds_up_and_k3_is_never_negative():
    torch.manual_seed(0)
    train = -torch.rand(1000) * 5
    rollout = train + torch.randn(1000) * 1e-5
    mask = torch.ones(1000)
    whole = mismatch(train, rollout, mask)
    added = mismatch(train[:10], rollout[:10], mask[:10]) + mismatch(train[10:], rollout[10:], mask[10:])
    assert (added.mean, added.max, added.k3) == pytest.approx((whole.mean, whole.max, whole.k3))
    assert 0 < whole.k3 < 1e-9
    # In float32, what a formula without care computes is noise of either sign a thousand times as large.
    d = train - rollout
    assert (d.exp() - 1 - d).abs().mean() > 10 * whole.k3


def test_nothing_seen_is_not_zero():
    assert math.isnan(Mismatch().mean)
    assert math.isnan(Mismatch().max)
    assert math.isnan(LossSums().clip_fraction)
    assert math.isnan((Mismatch(1, math.nan, math.nan, 0) + Mismatch(1, 1, 1, 0)).max)
    assert mismatch(torch.zeros(2), torch.zeros(2), torch.zeros(2)) == Mismatch()
