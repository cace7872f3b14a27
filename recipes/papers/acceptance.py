"""Acceptance of K candidates for one position, by rule: computed from p and q, without a draw.

"Acceptance" is the probability that the emitted token is one of the candidates. Its mean over the
positions of the target's own text is what papers print as the acceptance rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.verifiers.importance import as_distribution
from eval.verifiers.kseq import any_accepted, discount
from eval.verifiers.optimum import optimal_acceptance
from eval.verifiers.selection.groups import largest
from eval.verifiers.selection.solvers import Solver, selector
from recipes.papers.trees import scales
from specdata.probability import nucleus, overlap

POINTS = 32
"""Of the quadrature over rejected candidates: off by .011 at most in 700 pairs over five tokens."""


def recursive(p: Tensor, q: Tensor, k: int, *, distinct: bool = False) -> float:
    """Recursive rejection (SpecInfer; MCSD, Alg. 1): 1 - prod_k TV(p^k, q).

    Of distinct candidates (MCSD, Alg. 2) it is exact given those that are rejected; their average
    is a quadrature of `POINTS` points (Sobol), since there is no product form.
    """
    uniforms = None
    if distinct:
        sobol = torch.quasirandom.SobolEngine(max(1, k - 1))  # type: ignore[no-untyped-call]
        uniforms = sobol.draw(POINTS, dtype=torch.float64) + 0.5 / POINTS
    p, q = (each.double().expand(POINTS if distinct else 1, -1) for each in (p, q))
    p, q = (each / each.sum(dim=-1, keepdim=True) for each in (p, q))
    return float(overlap(p, scales(p, q, uniforms, k)[:, -1:] * q).mean())


def naive(p: Tensor, q: Tensor, k: int) -> float:
    """The target's own draw, if it was drafted (MCNS): sum_x p (1 - (1 - q)^K)."""
    return float((p.double() * (1.0 - (1.0 - q.double()) ** k)).sum())


def k_seq(p: Tensor, q: Tensor, k: int) -> float:
    """K-SEQ (SpecTr, Sun et al. 2023, Alg. 3): 1 - (1 - beta(rho))^K."""
    p, q = (each.double() / each.double().sum() for each in (p, q))
    return any_accepted(float(overlap(q, p / discount(p, q, k))), k)


def importance(
    p: Tensor,
    q: Tensor,
    k: int,
    solver: Solver = "truncated",
    s: int = 5,
    alphabet: int | None = None,
) -> float:
    """Selection, then speculative sampling (Khisti et al. 2025): sum_x min(p, b).

    With an alphabet, of K candidates m are inside with a binomial probability, and b is that of m.
    What the verifier accepts beyond this, a residual token that was drafted, is left out, as in
    the paper.
    """
    target, draft = as_distribution(p), as_distribution(q)
    likely = np.arange(len(target)) if alphabet is None else largest(target, alphabet)
    inside = draft[likely].sum()
    accepted = 0.0
    for m in range(1, k + 1):
        chance = math.comb(k, m) * inside**m * max(0.0, 1.0 - inside) ** (k - m)
        if chance > 0.0:
            part = draft[likely] / inside
            b = selector(solver, s)(target[likely], [part] * m).distribution
            accepted += chance * float(np.minimum(target[likely], b).sum())
    return accepted


def likeliest(p: Tensor, q: Tensor, k: int) -> float:
    """The k likeliest tokens of the draft: sum of p over them (any rule, where p is one-hot)."""
    return float(p[q.topk(k).indices].sum())


RULES: dict[str, Callable[..., float]] = {
    "optimum": optimal_acceptance,
    "importance": importance,
    "kseq": k_seq,
    "rrs": recursive,
    "rrs_wor": partial(recursive, distinct=True),
    "naive": naive,
    "likeliest": likeliest,
}
"""(p (V,), q (V,), k, parameters) -> acceptance; verifiers by their names in `VERIFIERS`."""


BUCKETS = {f"{n}-{2 * n - 1}" if n > 1 else "1": (n, 2 * n - 1) for n in (1, 2, 4, 8, 16, 32, 64)}
BUCKETS["128+"] = (128, 1 << 62)
"""Least and most tokens of the buckets that effective alphabets are counted in, by name."""


def effective_alphabet(p: Tensor, q: Tensor, of: str, top_p: float) -> list[float]:
    """1 for the bucket of the effective alphabet of p or q (`of`), what top-p leaves; else 0."""
    left = int((nucleus({"p": p, "q": q}[of], top_p) > 0).sum())
    return [float(least <= left <= most) for least, most in BUCKETS.values()]


def two_drafts(
    q: Sequence[float], fixed: Sequence[Sequence[float]], points: int
) -> list[dict[str, Any]]:
    """Acceptance of two drafts over few tokens (Khisti et al. 2025, Example 1 and Figure 2).

    `fixed` are the first V - 2 probabilities of each target, whose last two are x and the rest, for
    `points` x evenly from 0 to the rest. Records of `target`, `x`, `scheme` ("optimal", "SpecTr",
    "SpecInfer") and `acceptance`.
    """
    draft = torch.tensor(q, dtype=torch.float64)
    records = []
    for first in fixed:
        rest = 1.0 - sum(first)
        name = f"p = ({', '.join([*(f'{each:.3g}' for each in first), 'x', f'{rest:.3g} - x'])})"
        for x in np.linspace(0.0, rest, points).tolist():
            p = torch.tensor([*first, x, rest - x], dtype=torch.float64)
            for scheme, rule in (("optimal", "optimum"), ("SpecTr", "kseq"), ("SpecInfer", "rrs")):
                accepted = RULES[rule](p, draft, 2)
                records.append({"target": name, "x": x, "scheme": scheme, "acceptance": accepted})
    return records
