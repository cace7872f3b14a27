"""Each loss against values and gradients worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from distill.losses import LOSSES, tv, tvd_plus_plus
from specdata.probability import overlap
from tests.support.losses import gradient, random_logits

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
    "tvd++": 1 - ALPHA,
    "neg_log_overlap": -math.log(ALPHA),
    "lk_hybrid": WEIGHT * KL + (1 - WEIGHT) * (1 - ALPHA),
}
NAMES = sorted(LOSSES)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_their_closed_forms(seed: int) -> None:
    draft, target = random_logits(7, seed=seed), random_logits(7, seed=seed + 100)
    p, q = target.softmax(-1), draft.softmax(-1)
    above = (q > p).double()
    by_tv = q * (above - (q * above).sum())
    alpha = overlap(p, q)
    by_kl = q - p
    by_reverse = q * ((q / p).log() - (q * (q / p).log()).sum())
    to_middle = (2 * q / (p + q)).log()
    weight = torch.exp(-3 * alpha)
    mean = (q * above).sum()
    expected = {
        "forward_kl": by_kl,
        "reverse_kl": by_reverse,
        "js": q * (to_middle - (q * to_middle).sum()) / 2,
        "tv": by_tv,
        # -E_{x~q}[grad log q(x) (r(x) - mu) / sigma], r = 1[p > q]: the paper's policy gradient
        "tvd++": by_tv / (mean * (1 - mean)).sqrt(),
        "neg_log_overlap": by_tv / alpha,
        "lk_hybrid": weight * by_kl + (1 - weight) * by_tv,
    }
    for name, value in expected.items():
        torch.testing.assert_close(gradient(LOSSES[name], draft, target), value)
    every = torch.ones(draft.shape[:-1])
    for name in LOSSES.keys() - expected.keys():  # one that was added
        assert torch.autograd.gradcheck(LOSSES[name], (draft.requires_grad_(), target, every))


def test_the_gradient_of_tvd_plus_plus_by_hand_where_the_distributions_hardly_overlap() -> None:
    """q = (1 - e, e) against p = (0, 1): that of tv is e (1 - e), which sigma = sqrt(e (1 - e)) is
    a root of; so a hopeless position still learns. With a tie, r = 1/2 there."""
    for e in (1e-2, 1e-6, 1e-12, 1e-30):
        draft = torch.tensor([0.0, math.log(e)], dtype=torch.float64)
        target = torch.tensor([-torch.inf, 0.0], dtype=torch.float64)
        root = math.sqrt(e / (1 + e) / (1 + e))
        for dtype in (torch.float64, torch.float32):
            found = gradient(tvd_plus_plus, draft.to(dtype), target.to(dtype))
            assert found.tolist() == pytest.approx([root, -root], rel=1e-5)
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): r = (1, 1/2, 0), mu = 3/8, sigma^2 = 11/64
    sigma = math.sqrt(11 / 64)
    found = gradient(tvd_plus_plus, Q.log(), P.log())
    assert found.tolist() == pytest.approx(
        [-0.25 * 5 / 8 / sigma, -0.25 * 1 / 8 / sigma, 0.5 * 3 / 8 / sigma], abs=1e-12
    )


# --- tokens that the draft cannot propose

VOCABULARY_IDS = torch.tensor([0, 2, 3, 6])
OUTSIDE = torch.tensor([1, 4, 5])


def reduced(logits: Tensor) -> Tensor:
    """Logits of a draft with a reduced vocabulary."""
    return logits.index_fill(-1, OUTSIDE, -torch.inf)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tokens_that_the_draft_cannot_propose_are_a_constant(name: str, dtype: torch.dtype) -> None:
    """The gradient is the limit of that for smaller and smaller q.

    A KL has no limit, as its term p log(p / q) grows; without it, the gradient is q P - p, where P
    is what p gives the others.
    """
    draft, target = random_logits(9, 7, seed=30), random_logits(9, 7, seed=31)
    mask = torch.ones(9)
    exact = gradient(LOSSES[name], reduced(draft).to(dtype), target.to(dtype))
    assert exact.isfinite().all()
    assert (exact[:, OUTSIDE] == 0).all()
    almost = gradient(LOSSES[name], draft.index_fill(-1, OUTSIDE, -60.0), target)
    if name in ("forward_kl", "lk_hybrid"):
        p, q = target.softmax(-1), reduced(draft).softmax(-1)
        by_kl = (q * p[:, VOCABULARY_IDS].sum(-1, keepdim=True) - p).index_fill(1, OUTSIDE, 0.0) / 9
        weight = torch.exp(-3 * overlap(p, q)).unsqueeze(-1) if name == "lk_hybrid" else 1.0
        by_tv = gradient(tv, reduced(draft), target)
        almost = weight * by_kl + (1 - weight) * by_tv
    torch.testing.assert_close(exact, almost.to(dtype), rtol=0, atol=1e-6)
    value = LOSSES[name](reduced(draft).to(dtype), target.to(dtype), mask)
    assert abs(value.item()) < 10


@pytest.mark.parametrize("name", NAMES)
def test_values_by_hand(name: str) -> None:
    target = P.log().requires_grad_()
    value = LOSSES[name](Q.log().requires_grad_(), target, torch.tensor(True))
    value.backward()  # type: ignore[no-untyped-call]
    assert target.grad is None
    assert value.item() == pytest.approx(BY_HAND[name], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_position_whose_only_token_the_draft_cannot_propose_teaches_nothing_infinite(
    name: str,
) -> None:
    """As under greedy decoding, where p is one-hot."""
    target = torch.full((1, 7), -torch.inf).index_fill(1, torch.tensor([4]), 0.0)
    draft = reduced(random_logits(1, 7, seed=32)).float()
    assert abs(LOSSES[name](draft, target, torch.ones(1)).item()) <= 100
    found = gradient(LOSSES[name], draft, target)
    assert found.isfinite().all()
    if name != "reverse_kl":  # which has no limit where p is 0, and a floor instead
        assert found.abs().max() < 1e-6


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
