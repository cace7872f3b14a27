"""The papers' theorems about acceptance, rejections and bias, as exact numbers.

p is the target and q the draft throughout (Yin et al. write q for the target and p for the draft;
Sun et al. M_b for the target and M_s for the draft). A model is a function from a prefix, the
tuple of tokens since the start, to a distribution (V,). Contexts are enumerated, V^n of them at
position n, unless `memory` says that distributions depend on the position and the last few tokens
only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdata.probability import overlap, residual

Prefix = tuple[int, ...]
Model = Callable[[Prefix], Tensor]


# --- expected rejections (Yin et al. 2024, NeurIPS) ---


def expected_rejections(
    p: Model, q: Model, horizon: int, responses: int | None = 1, memory: int | None = None
) -> Tensor:
    """Expected rejections of batch verification at every position, float64 (T,).

    One response is token verification: Yin et al. 2024 (arXiv:2411.00841), Theorem 1,
    E[N_rej] = sum_n E_{x_{1:n-1} ~ p}[TV(p, q)], the sum of what is returned; by their Theorem 2 no
    lossless rejection rule has fewer. Drafts run to the end of the horizon T, so a speed-up of
    T / E[N_rej] counts rejections as target calls.

    Several are Theorem 3. With f(x_{1:n}) the probability that the output
    begins with x_{1:n} and its last token is a correction, f() = 1,

        f(x_{1:n}) = f(x_{1:n-1}) Pi p^{M+1}(x_n) + (p(x_{1:n-1}) - f(x_{1:n-1})) (p - q)+(x_n)
        E[N_rej]   = sum_n sum_{x_{1:n-1}} p(x_{1:n-1}) TV(p, q) - f(x_{1:n-1}) (TV(p, q) - Pi)

    Without `responses` (M) it is the limit of many, in which Pi is the target's mass outside the
    draft's support (0 in the paper, which assumes full support). `memory` is how many of the last
    tokens the distributions depend on, besides the position; None for all.
    """
    if responses is not None and responses < 1:
        raise ValueError(f"a batch needs at least 1 response, got {responses}")

    def extend(prefix: Prefix, weight: Tensor) -> Tensor:
        target, draft = p(prefix).double(), q(prefix).double()
        missed, distribution = first_token_missed(target, draft, responses)
        corrected = weight[1] * missed * distribution + (weight[0] - weight[1]) * (
            target - draft
        ).clamp(min=0.0)
        return torch.stack([weight[0] * target, corrected], dim=-1)

    def rejected(prefix: Prefix, weight: Tensor) -> Tensor:
        target, draft = p(prefix).double(), q(prefix).double()
        single = 1.0 - overlap(target, draft)
        missed, _ = first_token_missed(target, draft, responses)
        return weight[0] * single - weight[1] * (single - missed)

    return _by_length(extend, 2, horizon, memory, rejected)


def first_token_missed(p: Tensor, q: Tensor, responses: int | None) -> tuple[float, Tensor]:
    """Pi = prod_m TV(p^m, q), the probability that M first tokens are all rejected, and p^{M+1}.

    p^1 = p, (V,), and p^{m+1} = norm((p^m - q)+). Without `responses` (M) it is the limit of many.
    """
    if responses is None:
        outside = torch.where(q > 0, 0.0, p)
        missed = float(outside.sum())
        return missed, outside / missed if missed > 0 else p
    missed = 1.0
    for _ in range(responses):
        missed *= 1.0 - float(overlap(p, q))
        p = residual(p, q)
    return missed, p


# --- expected accepted tokens of one block (Leviathan et al.; Sun et al.) ---


def token_accepted(p: Model, q: Model, longest: int) -> Tensor:
    """E[tau] of token verification: sum_l sum_{x^l} prod_i min(p, q)(x_i | x^{i-1}).

    Here and below of blocks of each length from 1 to the longest: float64 (longest,).
    """

    def extend(prefix: Prefix, weight: Tensor) -> Tensor:
        return torch.minimum(p(prefix), q(prefix)).double().unsqueeze(-1) * weight

    return _by_length(extend, 1, longest + 1, None, lambda _, weight: weight[0])[1:].cumsum(0)


def block_accepted(p: Model, q: Model, longest: int) -> Tensor:
    """E[tau] of block verification: sum_i E_q[r_i], r_i = min(1, r_{i-1} p(x_i)/q(x_i)).

    Sun et al. 2025 (arXiv:2403.10444v2), Theorem 2 with P(tau >= i | x^i) = r_i. Enumerated as the
    measure q(x^i) r_i = min(q(x^i), q(x^{i-1}) r_{i-1} p(x_i)), which needs no division.
    """

    def extend(prefix: Prefix, weight: Tensor) -> Tensor:
        drafted, target = weight[0] * q(prefix).double(), weight[1] * p(prefix).double()
        return torch.stack([drafted, torch.minimum(drafted, target)], dim=-1)

    return _by_length(extend, 2, longest + 1, None, lambda _, weight: weight[1])[1:].cumsum(0)


def greedy_block_accepted(p: Model, q: Model, longest: int) -> Tensor:
    """E[tau] of greedy block verification: sum_l sum_{x^l} min(p(x^l), q(x^l)).

    Sun et al. 2024 (arXiv:2403.10444v1), Theorem 1: the most that any coupling of the two joint
    distributions accepts in one block.
    """

    def extend(prefix: Prefix, weight: Tensor) -> Tensor:
        return torch.stack([p(prefix).double(), q(prefix).double()], dim=-1) * weight

    return _by_length(extend, 2, longest + 1, None, lambda _, weight: weight.min())[1:].cumsum(0)


# --- rejection against bias at one position (Yin et al. 2024, Theorems 4 and 5) ---


def over_acceptance(p: Tensor, q: Tensor, epsilon: float) -> Tensor:
    """b(x) = min(1, (p(x) + epsilon)/q(x)), 1 where q = 0: (V,)."""
    return torch.where(q > 0, (p + epsilon) / q, 1.0).clamp(max=1.0)


def rejection(q: Tensor, accept: Tensor) -> float:
    """R = sum_x q(x) (1 - b(x)), the probability that a drafted token is rejected."""
    return float((q * (1.0 - accept)).sum())


def least_bias_at(p: Tensor, q: Tensor, rejected: float) -> float:
    """The least bias of any rule that rejects with probability R: TV(p, q) - R, not below 0.

    Yin et al. 2024, Theorem 5: a straight line from (0, TV) to (TV, 0).
    """
    return max(0.0, 1.0 - float(overlap(p, q)) - rejected)


# --- enumeration of contexts ---


def _by_length(
    extend: Callable[[Prefix, Tensor], Tensor],
    weights: int,
    count: int,
    memory: int | None,
    value: Callable[[Prefix, Tensor], Tensor],
) -> Tensor:
    """The sum of a value over the contexts of length 0, 1, .. count-1: float64 (count,).

    `extend` gives the weights (V, k) of a prefix's extensions from its own weights (k,), 1 for the
    empty prefix. Contexts that agree in their last `memory` tokens are merged and their weights
    added, which is exact where `extend` is linear and depends on those tokens only.
    """
    sums = []
    start = torch.ones(weights, dtype=torch.float64)
    level: dict[Prefix, tuple[Prefix, Tensor]] = {(): ((), start)}
    for _ in range(count):
        sums.append(sum(float(value(prefix, weight)) for prefix, weight in level.values()))
        longer: dict[Prefix, tuple[Prefix, Tensor]] = {}
        for prefix, weight in level.values():
            extensions = extend(prefix, weight)
            for token in extensions.any(dim=-1).nonzero().flatten().tolist():
                extended = (*prefix, token)
                key = extended if memory is None else extended[max(0, len(extended) - memory) :]
                first, total = longer.get(key, (extended, torch.zeros_like(start)))
                longer[key] = (first, total + extensions[token])
        level = longer
    return torch.tensor(sums, dtype=torch.float64)
