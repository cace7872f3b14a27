"""Block verification of a chain, in numbers: how much is accepted, what a rejection leaves.

Sun et al. 2025 (ICLR, arXiv:2403.10444v2), Algorithm 2; without a cap on the ratios, Algorithm 3 of
its first version (arXiv:2403.10444v1). Written once: the rules of `eval/verifiers/block.py` sample
and enumerate it, and `heads/generate.py` runs it in transformers alone. Published folders carry a
copy, so it imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# A residual with less mass than this can only be reached through rounding; p itself is used then.
NEGLIGIBLE_MASS = 1e-15


def prefix_ratios(p: Sequence[float], q: Sequence[float], cap: float = 1.0) -> list[float]:
    """r_0 .. r_L with r_i = min(cap, r_{i-1} p(x_i)/q(x_i)), of L drafted tokens' probabilities."""
    ratios = [1.0]
    for p_token, q_token in zip(p, q, strict=True):
        # r p is formed first: 0 / q stays 0 where p / q would overflow.
        ratios.append(min(cap, ratios[-1] * p_token / q_token))
    return ratios


def longest_prefix(
    ratios: Sequence[float],
    target: Tensor,
    later: Callable[[], Tensor],
    bernoulli: Callable[[float], bool],
) -> int:
    """tau, the longest prefix that passes: h_L = min(1, r_L), h_i = m_i / (m_i + 1 - r_i).

    m_i is the mass of (r_i p - q)+ after i tokens. The tests are independent, so they are drawn
    from the longest prefix down; the first that passes makes the shorter ones unnecessary.

    Args:
        ratios: r_0 .. r_L of `prefix_ratios`.
        target: (L + 1, V) the target's distributions, before each token and after the last.
        later: gives (L - 1, V), what the tokens after the first were drawn from, on the target's
            device; called only where a test needs them.
        bernoulli: True with the given probability.
    """
    length, masses = len(ratios) - 1, list[float]()
    for tau in range(length, 0, -1):
        ratio = ratios[tau]
        if ratio >= 1.0:
            return tau
        if ratio <= 0.0:
            continue
        passes = ratio
        if tau < length:
            if not masses:  # all read from the device at once
                scales = torch.tensor(ratios[1:length], dtype=target.dtype).unsqueeze(1)
                scaled = scales.to(target.device, non_blocking=True) * target[1:length]
                masses = (scaled - later()).clamp(min=0.0).sum(dim=-1).tolist()
            passes = masses[tau - 1] / (masses[tau - 1] + 1.0 - ratio)
        if bernoulli(passes):
            return tau
    return 0


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+): the distribution after a rejection, (..., V); p itself where no mass is left.

    The masses need not be equal: verifiers pass `r * p` and `q` to get a scaled residual.
    """
    excess = (p - q).clamp(min=0.0)
    mass = excess.sum(dim=-1, keepdim=True)
    if mass.device.type == "cpu" and bool((mass > NEGLIGIBLE_MASS).all()):  # else that read waits
        return excess / mass
    normalised = excess / mass.clamp(min=torch.finfo(mass.dtype).tiny)
    return torch.where(mass > NEGLIGIBLE_MASS, normalised, p / p.sum(dim=-1, keepdim=True))
