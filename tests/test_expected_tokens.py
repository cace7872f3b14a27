"""Expected tokens of a round, estimated from the target's text: exact where all is enumerated."""

from __future__ import annotations

import torch
from torch import Tensor

V = 3
END = 0
"""The token that ends a text."""


def models(seed: int, *, cut: bool = False) -> tuple[Tensor, Tensor]:
    """Two Markov chains, (V + 1, V) in float64: rows by the token before, the last at the start.

    With `cut` the draft cannot propose token 2, and the target never writes 1 after 1.
    """
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.rand(V + 1, V, generator=generator, dtype=torch.float64) for _ in "pq")
    if cut:
        q[:, 2] = 0.0
        p[1, 1] = 0.0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def rows(model: Tensor, text: tuple[int, ...]) -> Tensor:
    """(T, V) distributions of the tokens of a text."""
    return model[[V, *text[:-1]]] if text else model[:0]


def probability(model: Tensor, text: tuple[int, ...]) -> float:
    return float(rows(model, text).gather(-1, torch.tensor(text).unsqueeze(-1)).prod())
