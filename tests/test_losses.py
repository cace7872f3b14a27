"""Each loss against values and gradients worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distill.losses import LOSSES, Loss, neg_log_overlap, tv
from specdata.probability import overlap

# p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2)
P = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
Q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
ALPHA = 0.75
KL = 0.25 * math.log(2)
JS = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
WEIGHT = math.exp(-3 * ALPHA)
BY_HAND = {
    "forward_kl": KL,
    "reverse_kl": KL,
    "js": JS,
    "tv": 1 - ALPHA,
    "neg_log_overlap": -math.log(ALPHA),
    "lk_hybrid": WEIGHT * KL + (1 - WEIGHT) * (1 - ALPHA),
}
NAMES = sorted(LOSSES)


def random_logits(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradient(loss: Loss, draft: Tensor, target: Tensor) -> Tensor:
    draft = draft.clone().requires_grad_()
    (result,) = torch.autograd.grad(loss(draft, target, torch.ones(draft.shape[:-1])), draft)
    return result


def test_every_loss_has_a_value_by_hand() -> None:
    assert set(BY_HAND) == set(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_value_by_hand(name: str) -> None:
    value = LOSSES[name](Q.log(), P.log(), torch.tensor(True))
    assert value.item() == pytest.approx(BY_HAND[name], abs=1e-12)


# lk_hybrid holds its weight constant, which finite differences do not; its identity is below.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "lk_hybrid"])
def test_gradient_agrees_with_finite_differences(name: str) -> None:
    draft = random_logits(4, 6, seed=1).requires_grad_()
    target = random_logits(4, 6, seed=2)
    mask = torch.tensor([True, False, True, True])
    assert torch.autograd.gradcheck(lambda z: LOSSES[name](z, target, mask), draft)


@pytest.mark.parametrize("seed", range(5))
def test_gradient_identities(seed: int) -> None:
    draft, target = random_logits(7, seed=seed), random_logits(7, seed=seed + 100)
    p, q = target.softmax(-1), draft.softmax(-1)
    above = (q > p).double()
    by_tv = q * (above - (q * above).sum())
    alpha = overlap(p, q)
    by_kl = q - p
    by_reverse = q * ((q / p).log() - (q * (q / p).log()).sum())
    weight = torch.exp(-3 * alpha)
    expected = {
        "forward_kl": by_kl,
        "reverse_kl": by_reverse,
        "tv": by_tv,
        "neg_log_overlap": by_tv / alpha,
        "lk_hybrid": weight * by_kl + (1 - weight) * by_tv,
    }
    for name, value in expected.items():
        torch.testing.assert_close(gradient(LOSSES[name], draft, target), value)


def test_neg_log_overlap_is_cross_entropy_for_a_one_hot_target() -> None:
    draft = random_logits(5, seed=3)
    target = torch.full((5,), -torch.inf, dtype=torch.float64)
    target[2] = 0.0
    value = neg_log_overlap(draft, target, torch.tensor(True))
    assert value.item() == pytest.approx(-draft.log_softmax(-1)[2].item())


@pytest.mark.parametrize("name", NAMES)
def test_equal_distributions_give_zero_and_other_distributions_more(name: str) -> None:
    draft, target = random_logits(20, 9, seed=4), random_logits(20, 9, seed=5)
    mask = torch.ones(20)
    shifted = target + 3.0  # the same distribution
    assert LOSSES[name](shifted, target, mask).item() == pytest.approx(0.0, abs=1e-12)
    assert LOSSES[name](draft, target, mask).item() > 0.01
    # Exactly the same logits: a total variation has a kink there, and 0 is its middle slope.
    assert gradient(LOSSES[name], target, target).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_saturated_logits_stay_finite(name: str, dtype: torch.dtype) -> None:
    low, high = -3e4, 3e4
    draft = torch.tensor(
        [[high, low, low], [low, high, 0], [0, 0, 0], [0, 0, -torch.inf]], dtype=dtype
    )
    target = torch.tensor(
        [[low, high, low], [high, low, 0], [high, -torch.inf, 0], [0, 0, 0]], dtype=dtype
    )
    draft.requires_grad_()
    value = LOSSES[name](draft, target, torch.ones(4))
    assert value.dtype == torch.float32
    assert value.isfinite()
    value.backward()  # type: ignore[no-untyped-call]
    assert draft.grad is not None
    assert draft.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_masked_positions_count_for_nothing(name: str) -> None:
    draft, target = random_logits(2, 5, 8, seed=6), random_logits(2, 5, 8, seed=7)
    mask = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 0, 0]], dtype=torch.bool)
    chosen = LOSSES[name](draft[mask], target[mask], torch.ones(5))
    torch.testing.assert_close(LOSSES[name](draft, target, mask), chosen)
    assert LOSSES[name](draft, target, torch.zeros(2, 5)).item() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_no_gradient_reaches_the_target(name: str) -> None:
    draft = random_logits(3, 4, seed=8).requires_grad_()
    target = random_logits(3, 4, seed=9).requires_grad_()
    LOSSES[name](draft, target, torch.ones(3)).backward()  # type: ignore[no-untyped-call]
    assert target.grad is None


def test_tv_is_one_minus_the_acceptance_of_a_drafted_token() -> None:
    draft, target = random_logits(30, 12, seed=10), random_logits(30, 12, seed=11)
    acceptance = overlap(target.softmax(-1), draft.softmax(-1)).mean()
    torch.testing.assert_close(tv(draft, target, torch.ones(30)), 1 - acceptance)
