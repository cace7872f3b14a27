"""The losses of distillation: seven divergences between the distributions p and q.

All share one signature, `(draft_logits, target_logits, mask) -> scalar`: the mean over the
positions where `mask` is true of a divergence between the target's p = softmax(target_logits) and
the draft's q = softmax(draft_logits). Gradients reach the draft only. Both must already be warped
as in serving (temperature; for p also truncation, a logit of -inf is a probability of 0).

Everything is computed from log probabilities in float32 (float64 stays float64), so that saturated
logits give finite values and gradients. z are the draft's logits, s_j = 1[q_j > p_j] and
alpha = sum_x min(p, q) is the probability that a drafted token is accepted.

A token whose draft logit is -inf is one that the draft cannot propose: q is 0 there, whatever is
learnt. What it adds to a loss is a constant; it gets no gradient, and where the constant would be
infinite (`forward_kl`, `lk_hybrid`, and `neg_log_overlap` if p is 0 everywhere else) it is left
out. So these may be negative then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distill.config import LossName

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]

# Smaller log probabilities count as this: a single -inf, as of a padding id that only one model
# has, would make a divergence infinite. No trained logit comes near it.
_LOG_FLOOR = -1e4
# Reverse KL charges q log(1/p) for mass where p is 0; float32 probabilities end at about exp(-100).
_REVERSE_FLOOR = -100.0

JS_BETA = 0.5
HYBRID_ETA = 3.0


def forward_kl(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """KL(p || q) = sum_x p (log p - log q): covers all that the target does.

    Gradient q - p. The classic distillation loss (Hinton et al. 2015, arXiv:1503.02531), the
    baseline of DistillSpec (Zhou et al. 2023, arXiv:2310.08461). Logits are (..., V) of any float
    type, the mask (...); the mean is in nats, 0 if no position counts.
    """
    values, gradient = _forward_kl(draft_logits.detach(), target_logits)
    loss = _Differentiated.apply(values, draft_logits, gradient)  # type: ignore[no-untyped-call]
    return _masked_mean(loss, mask)


def reverse_kl(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """KL(q || p) = sum_x q (log q - log p): avoids what the target never does.

    Gradient q_j (log(q_j/p_j) - KL(q || p)). On-policy distillation often uses it (GKD, Agarwal et
    al. 2023, arXiv:2306.13649). Arguments and result as in `forward_kl`.
    """
    log_p, log_q = _log_distributions(draft_logits, target_logits)
    return _masked_mean(_kl(log_q, log_p.clamp(min=_REVERSE_FLOOR)), mask)


def js(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """Beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q, with beta = 1/2.

    The generalised Jensen-Shannon divergence of GKD (arXiv:2306.13649); at most log 2. Arguments
    and result as in `forward_kl`.
    """
    log_p, log_q = _log_distributions(draft_logits, target_logits)
    weight_p, weight_q = (log_p.new_tensor(w).log() for w in (JS_BETA, 1 - JS_BETA))
    log_m = torch.logaddexp(log_p + weight_p, log_q + weight_q)
    divergence = JS_BETA * _kl(log_p, log_m) + (1 - JS_BETA) * _kl(log_q, log_m)
    return _masked_mean(divergence, mask)


def tv(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """TV(p, q) = 1/2 sum_x |p - q| = 1 - alpha: exactly the rejection probability.

    Gradient q_j (s_j - sum_k q_k s_k), which vanishes where p and q hardly overlap: start from a
    draft that is not random, or use `lk_hybrid`. DistillSpec (arXiv:2310.08461), appendix on TVD.
    Arguments and result as in `forward_kl`.
    """
    return _masked_mean(_tv(*_log_distributions(draft_logits, target_logits)), mask)


def tvd_plus_plus(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """TVD++: the total variation, with its gradient divided by the deviation of the reward.

    Goel et al. 2024 (arXiv:2403.00858) write the gradient of TV as a policy gradient, draw x from
    q, reward it with r = 1[p > q] and normalise: -E_{x~q}[grad log q(x) (r(x) - mu) / sigma]. Here
    the expectation is exact, over the whole vocabulary, so mu cancels and what remains is the
    gradient of `tv` divided by sigma. mu and sigma are those of r under q at the same position, not
    over a batch: a position's loss depends on nothing but the position, and its gradient, whose
    absolute values sum to 2 sigma, vanishes like the square root of that of `tv`. A tie has
    r = 1/2, the middle, as in `tv`.

    The value is the total variation, which is to become small; the paper's surrogate has this
    gradient and a value without a meaning. Arguments and result as in `forward_kl`.
    """
    log_p, log_q = _log_distributions(draft_logits, target_logits)
    with torch.no_grad():
        q, sign = log_q.exp(), torch.sign(log_q - log_p)
        above, below, tied = (
            (q * here).sum(dim=-1, keepdim=True) for here in (sign > 0, sign < 0, sign == 0)
        )
        # sigma^2 of r, which is 0, 1/2 or 1; written so that nothing cancels.
        variance = above * below + 0.25 * tied * (above + below)
        # q_j (s_j - sum_k q_k s_k), again without a difference of nearly equal numbers.
        centred = torch.where(
            sign > 0,
            below + tied / 2,
            torch.where(sign < 0, -above - tied / 2, (below - above) / 2),
        )
        gradient = q * centred / variance.clamp(min=torch.finfo(q.dtype).tiny).sqrt()
    logits = draft_logits.to(q.dtype)
    slope = (gradient * torch.where(logits > -torch.inf, logits, 0.0)).sum(dim=-1)
    return _masked_mean(_tv(log_p, log_q).detach() + (slope - slope.detach()), mask)


def neg_log_overlap(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """-log alpha = -log sum_x min(p, q), "LK-alpha": the log-likelihood of acceptance.

    Gradient that of `tv` divided by alpha, so it does not vanish; equals cross entropy when p is
    one-hot. Samarin et al. 2026 (arXiv:2602.23881). Arguments and result as in `forward_kl`.
    """
    values, gradient = _neg_log_overlap(draft_logits.detach(), target_logits)
    loss = _Differentiated.apply(values, draft_logits, gradient)  # type: ignore[no-untyped-call]
    return _masked_mean(loss, mask)


def lk_hybrid(draft_logits: Tensor, target_logits: Tensor, mask: Tensor) -> Tensor:
    """W KL(p || q) + (1 - w) TV(p, q), w = exp(-eta alpha) held constant, eta = 3.

    Where acceptance is low it is a KL with its strong gradient, where it is high it is the
    rejection probability itself; w is taken position by position. Samarin et al. 2026
    (arXiv:2602.23881). Arguments and result as in `forward_kl`.
    """
    values, gradient = _lk_hybrid(draft_logits.detach(), target_logits)
    loss = _Differentiated.apply(values, draft_logits, gradient)  # type: ignore[no-untyped-call]
    return _masked_mean(loss, mask)


@torch.no_grad()
def _forward_kl(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., V) -> (...) the values, and (..., V) their gradients by the draft's logits.

    Written out, and in place, as `_lk_hybrid`.
    """
    (_, q), kl, taught = _compared(draft_logits, target_logits)
    return kl.squeeze(-1), q.mul_(taught.sum(dim=-1, keepdim=True)).sub_(taught)


@torch.no_grad()
def _neg_log_overlap(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., V) -> (...) the values, and (..., V) their gradients by the draft's logits.

    Written out, and in place, as `_lk_hybrid`.
    """
    log_p, log_q = _log_distributions(draft_logits, target_logits)
    q, least = log_q.softmax(dim=-1), torch.minimum(log_p, log_q)
    share = least.softmax(dim=-1)
    log_overlap = least.amax(dim=-1, keepdim=True) - share.amax(dim=-1, keepdim=True).log()
    # Of alpha q's is all of min(p, q) where q < p, and half where they are equal.
    share.mul_(log_p.sub_(log_q).sign_().add_(1)).mul_(0.5)
    gradient = q.mul_(share.sum(dim=-1, keepdim=True)).sub_(share)
    # Where the draft can propose no token that p gives, alpha stays 0.
    has_chance = log_overlap > _LOG_FLOOR / 2
    return -log_overlap.mul_(has_chance).squeeze(-1), gradient.mul_(has_chance)


@torch.no_grad()
def _lk_hybrid(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., V) -> (...) the values, and (..., V) their gradients by the draft's logits.

    Written out, and in place: half of a draft's training was autograd's way through these
    distributions.
    """
    (p, q), kl, taught = _compared(draft_logits, target_logits)
    difference = torch.sub(q, p, out=p)
    tv = 0.5 * difference.abs().sum(dim=-1, keepdim=True)
    weight = torch.exp(-HYBRID_ETA * (1 - tv))
    # Of KL: q sum(p) - p over the tokens that can be drafted; of TV: q (s - sum(q s)) / 2.
    sign = difference.sign_()
    slope = sign.sub_((q * sign).sum(dim=-1, keepdim=True)).mul_((1 - weight) / 2)
    gradient = slope.add_(weight * taught.sum(dim=-1, keepdim=True)).mul_(q)
    gradient.addcmul_(taught, weight, value=-1)
    return (weight * kl + (1 - weight) * tv).squeeze(-1), gradient


def _compared(
    draft_logits: Tensor, target_logits: Tensor
) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """P and q (..., V), KL(p || q) (..., 1) over the tokens that can be drafted, and p of these."""
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_p, p = _distribution(target_logits.to(wide))
    log_q, q = _distribution(draft_logits.to(wide))
    # As numbers: a CPU takes several times as long to write and to read a mask.
    taught = torch.gt(draft_logits, -torch.inf, out=torch.empty_like(p)).mul_(p)
    return (p, q), log_p.sub_(log_q).mul_(taught).sum(dim=-1, keepdim=True), taught


def _distribution(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(..., V) logits -> log probabilities, and the probabilities.

    By softmax twice: on a CPU torch's exp takes up to 40 times as long where it underflows, as it
    does almost everywhere in a greedy or saturated distribution.
    """
    return logits.log_softmax(dim=-1).clamp_(min=_LOG_FLOOR), logits.softmax(dim=-1)


class _Differentiated(torch.autograd.Function):
    """Values (...) of logits (..., V), whose gradients (..., V) are known."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, logits: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, (gradient * grad[..., None]).to(ctx.dtype), None


def bucketed(draft_logits: Tensor, top: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Draft and target logits with all tokens outside the top N as one, for any loss of `LOSSES`.

    softmax of what comes back is q and p of the top N tokens and of the tail. Where N = V the tail
    is empty and every loss has the value and gradient that it has on all logits. Else, by the data
    processing inequality, `forward_kl`, `reverse_kl`, `js` and `tv` (the value of `tvd++`) are
    lower bounds of theirs, and so is `neg_log_overlap`, because merging tokens can only raise
    sum_x min(p, q). `lk_hybrid` weighs two lower bounds by an alpha that is too large, so it is
    none where KL is smaller than TV. The draft's tail learns its mass from the target's, and not
    which tokens of it are likely.

    (n, V) warped logits, and columns of `specdata.top_logits` at the temperature at which p and q
    are compared -> (n, N + 1) each, float32 or wider; the target's without a gradient.
    """
    wide = draft_logits.to(torch.promote_types(draft_logits.dtype, torch.float32))
    ids = top["top_ids"].long()
    others = wide.scatter(-1, ids, -torch.inf)
    # Where the draft can propose none of them, log of their sum has no gradient.
    is_empty = others.isneginf().all(dim=-1, keepdim=True)
    tail = others.masked_fill(is_empty, 0.0).logsumexp(dim=-1, keepdim=True)
    tail = tail.masked_fill(is_empty, -torch.inf)
    target_logits = torch.cat([top["top_logits"], top["rest_logit"]], dim=-1)
    return torch.cat([wide.gather(-1, ids), tail], dim=-1), target_logits.detach()


LOSSES: Mapping[LossName, Loss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "js": js,
    "tv": tv,
    "tvd++": tvd_plus_plus,
    "neg_log_overlap": neg_log_overlap,
    "lk_hybrid": lk_hybrid,
}
LESS_BYTES: Mapping[LossName, int] = {"lk_hybrid": 68, "neg_log_overlap": 68}
"""Of losses that take less than others (`distill.objective.ENTRY_BYTES`)."""


def _log_distributions(draft_logits: Tensor, target_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log p and log q, (..., V), float32 or wider, no gradient for p."""
    wide = torch.promote_types(draft_logits.dtype, torch.float32)
    log_q = draft_logits.to(wide).log_softmax(dim=-1).clamp(min=_LOG_FLOOR)
    log_p = target_logits.detach().to(wide).log_softmax(dim=-1).clamp_(min=_LOG_FLOOR)
    return log_p, log_q


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b)."""
    return (log_a.exp() * (log_a - log_b)).sum(dim=-1)


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    # |p - q| rather than 1 - overlap: no cancellation when the distributions are close.
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    weights = mask.to(values.dtype)
    return (values * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)
