"""Expected tokens of a round of speculative decoding, estimated from text that the target wrote.

A round that drafts K tokens x_1 .. x_K ~ q emits the accepted ones and one more, 1 + E[tau] tokens.
For a text written by the target, x ~ p, both expectations can be read off the ratios q(x_i)/p(x_i)
at its own tokens, without drawing from the draft and without a sum over the vocabulary:

* token verification (Leviathan et al. 2023, arXiv:2211.17192): E[tau] is the sum over i of
  sum_{x^i} prod_{j<=i} min(p, q)(x_j) = E_{x~p}[prod_{j<=i} min(1, q(x_j)/p(x_j))];
* block verification (Sun et al. 2025, arXiv:2403.10444v2, Algorithm 2): E[tau] is the sum over i of
  E_{x~q}[r_i] with r_0 = 1, r_i = min(1, r_{i-1} p(x_i)/q(x_i)). As r_i = 0 where p(x^i) = 0, this
  is E_{x~p}[w_i] with w_i = r_i q(x^i)/p(x^i). Let Q_i = q(x^i)/p(x^i). Then w_0 = 1 and
  w_i = min(Q_i, r_{i-1} Q_{i-1}) = min(Q_i, w_{i-1}): the least of 1, Q_1, .., Q_i.

Each term is in [0, 1], so the estimates are bounded, and block is at least token on every text.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Verification = Literal["token", "block"]


def log_ratios(p: Tensor, q: Tensor) -> Tensor:
    """Log q(x)/p(x) for the probabilities of the text's own tokens, same shape.

    A token that the draft cannot propose gives -inf. One that the target itself gives 0, which only
    rounding at the edge of a truncation can bring about, counts as if both gave it the same.
    """
    ratios = q.log() - p.log()
    at_the_edge = torch.zeros_like(ratios).masked_fill(q == 0, float("-inf"))
    return torch.where(p > 0, ratios, at_the_edge)


def expected_tokens(
    ratios: Tensor, lengths: Tensor, drafted: int, verification: Verification
) -> Tensor:
    """Tokens that a round emits if it starts at each position of texts written by the target.

    Their mean over texts is the expectation over what the target may write, given what lies before
    the position. A round ends where the text ends, by an end token or by the limit of its length,
    and its last token is followed by no other. So every position is a start, and none is left out
    for being near the end, which would prefer long texts.

    Args:
        ratios: (B, T) `log_ratios` of the tokens, anything in the padding; or (B, T, S) where q
            depends on a token's place in its round: those of the first S places, the last of which
            stands for all later ones.
        lengths: (B,) tokens of each text.
        drafted: K, tokens drafted in a round.
        verification: how they are verified.

    Returns:
        (B, T) 1 + tau at each start, at most K + 1; 0 in the padding.
    """
    ratios = ratios if ratios.dim() == 3 else ratios.unsqueeze(-1)
    width, places = ratios.shape[1:]
    position = torch.arange(width, device=ratios.device)
    left = lengths.unsqueeze(1) - position  # tokens from a start to the end of its text
    of_texts = ratios.masked_fill((left <= 0).unsqueeze(-1), 0.0)
    after = torch.nn.functional.pad(of_texts, (0, 0, 0, drafted - 1))
    windows = torch.stack(
        [after[:, i : i + width, min(i, places - 1)] for i in range(drafted)], dim=-1
    )  # (B, T, K)
    if verification == "token":
        logs = windows.clamp(max=0.0).cumsum(dim=-1)
    else:
        logs = windows.cumsum(dim=-1).clamp(max=0.0).cummin(dim=-1).values
    # The last token of a text ends the round whether it is accepted or not.
    counts = torch.arange(1, drafted + 1, device=ratios.device) < left.unsqueeze(-1)
    emitted = 1.0 + torch.where(counts, logs.exp(), 0.0).sum(dim=-1)
    return torch.where(left > 0, emitted, 0.0)
