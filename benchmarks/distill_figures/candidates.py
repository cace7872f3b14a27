"""Acceptance of several candidates for one position, in the manner of MCSD's Table 5.

Yang et al. 2024 (arXiv:2401.06706) give the acceptance rate of k candidates at temperatures 0 and
1. Here it is an expectation at every position of held-out rollouts, drawn at temperature 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.distill_figures.data import DOMAINS
from benchmarks.distill_figures.judge import Judge, interval
from eval.measuring.intervals import resamples
from eval.verifiers.optimum import optimal_acceptance
from specdata.models import load_model
from specdata.probability import overlap, residual

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COUNTS = (1, 4)
SEED = 0
Rule = Callable[[Tensor, Tensor, int, torch.Generator], Tensor]
"""(p (n, V), q (n, V), k, generator) -> (n,) probability that one of k candidates is accepted."""


def greedy(p: Tensor, q: Tensor, k: int, _: torch.Generator) -> Tensor:
    """Temperature 0: whether the target's token is among the draft's k most likely."""
    return (q.topk(k, dim=-1).indices == p.argmax(dim=-1, keepdim=True)).any(dim=-1).to(p.dtype)


def naive(p: Tensor, q: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """The target's mass on k tokens that are drawn from q without replacement."""
    return p.gather(-1, torch.multinomial(_positive(q, k), k, generator=generator)).sum(dim=-1)


def rrs(p: Tensor, q: Tensor, k: int, _: torch.Generator) -> Tensor:
    """Recursive rejection sampling of independent candidates: 1 - prod TV(p^k, q)."""
    missed = torch.ones_like(p[:, 0])
    for _step in range(k):
        missed = missed * (1.0 - overlap(p, q))
        p = residual(p, q)
    return 1.0 - missed


def rrs_wor(p: Tensor, q: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """The same of candidates without replacement, in expectation given those that were rejected.

    A rejected candidate is distributed as (q - p)+; it is drawn, and taken out of q.
    """
    missed = torch.ones_like(p[:, 0])
    for _ in range(k):
        missed = missed * (1.0 - overlap(p, q))
        # Where nothing can be rejected, or nothing is left, what follows no longer counts.
        rejected = torch.multinomial((q - p).clamp(min=1e-30), 1, generator=generator)
        p = residual(p, q)
        q = q.scatter(-1, rejected, 0.0)
        q = q / q.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    return 1.0 - missed


def optimum(p: Tensor, q: Tensor, k: int, _: torch.Generator) -> Tensor:
    """The most that any lossless rule accepts of k independent candidates."""
    return torch.tensor(
        [optimal_acceptance(*each, k) for each in zip(p, q, strict=True)], dtype=p.dtype
    )


RULES: Mapping[str, Rule] = {
    "greedy": greedy,
    "naive": naive,
    "rrs": rrs,
    "rrs_wor": rrs_wor,
    "optimum": optimum,
}


def _positive(q: Tensor, k: int) -> Tensor:
    """Weights of which at least k are not 0."""
    return q.clamp(min=1e-30) if (q > 0).sum(dim=-1).min() < k else q


def table(judge: Judge, draft: Path) -> dict[str, Any]:
    """Domain -> rule -> number of candidates -> acceptance, with intervals over prompts."""
    model = load_model(str(draft), dtype="float32")
    return {domain: _domain(judge, model, domain) for domain in DOMAINS}


@torch.inference_mode()
def _domain(judge: Judge, model: PreTrainedModel, domain: str) -> dict[str, Any]:
    rows = len(judge.rows[domain])
    generator = torch.Generator().manual_seed(SEED)
    sums = {(name, k): np.zeros((2, rows)) for name in RULES for k in COUNTS}
    for p, q, row in judge.distributions(model, domain):
        for (name, k), total in sums.items():
            values = RULES[name](p, q, k, generator).double().numpy()
            total += [np.bincount(row, w, rows) for w in (values, np.ones(len(values)))]
    drawn = resamples(rows)
    found: dict[str, Any] = {name: {} for name in RULES}
    for (name, k), (accepted, positions) in sums.items():
        found[name][str(k)] = interval((drawn @ accepted) / (drawn @ positions))
    return found
