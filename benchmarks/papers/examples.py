"""What follows from formulas alone: acceptance of K candidates by rule, and the papers' examples.

Acceptance is the probability that the emitted token is one of the candidates for one position. Its
mean over the positions of the target's own text is what papers print as the acceptance rate.
p is the target and q the draft, as in `benchmarks.papers.theory`.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.papers import theory
from benchmarks.papers.tables import Record
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.verifiers import VERIFIERS
from eval.verifiers.biased import opt_loss, uno_loss
from eval.verifiers.importance import as_distribution
from eval.verifiers.kseq import any_accepted, discount
from eval.verifiers.optimum import optimal_acceptance
from eval.verifiers.selection.pairs import largest
from eval.verifiers.selection.solvers import Solver, selector
from specdata.probability import overlap

POINTS = 32
"""Of the quadrature over rejected candidates; docs/papers/mcsd has its error."""
NOTHING = 1e-12
"""A mass that is only left by rounding."""


def recursive(p: Tensor, q: Tensor, k: int, *, distinct: bool = False) -> float:
    """Recursive rejection (SpecInfer; MCSD, Alg. 1): 1 - prod_k TV(p^k, q).

    The residual after any number of rejections is (p - t q)+, normalised: t is 0 at first, and
    t + m/z after a rejection, where m = sum_x (p - t q)+ and z is the mass of q that is still drawn
    from, 1 with replacement. Of distinct candidates (MCSD, Alg. 2) t depends on those that were
    rejected, and there is no product form: it is the mean over a quadrature of `POINTS` points
    (Sobol).
    """
    points = POINTS if distinct else 1
    p, q = (each.double().expand(points, -1) for each in (p, q))
    p, q = (each / each.sum(dim=-1, keepdim=True) for each in (p, q))
    sobol = torch.quasirandom.SobolEngine(max(1, k - 1))  # type: ignore[no-untyped-call]
    uniforms = sobol.draw(points, dtype=torch.float64) + 0.5 / points
    remaining, t = q.clone(), torch.zeros_like(q[:, :1])
    for step in range(k):
        residual = (p - t * q).clamp(min=0.0)
        mass, left = (each.sum(dim=-1, keepdim=True) for each in (residual, remaining))
        can = (mass > NOTHING) & (left > NOTHING)
        t = torch.where(can, t + mass / left.clamp(min=NOTHING), t)
        if distinct and step + 1 < k:
            rejected = (mass * remaining - left * residual).clamp(min=0.0).cumsum(dim=-1)
            point = uniforms[:, step, None] * rejected[:, -1:]
            drawn = torch.searchsorted(rejected, point, right=True).clamp(max=q.shape[-1] - 1)
            remaining.scatter_(-1, drawn, 0.0)
    return float(overlap(p, t * q).mean())


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


def two_drafts(q: Sequence[float], points: int) -> list[Record]:
    """Acceptance of two drafts over two tokens (Khisti et al. 2025, Example 1).

    Records of `x`, the probability of the first token, for `points` x evenly from 0 to 1, of
    `scheme` ("optimal", "SpecTr", "SpecInfer") and `acceptance`.
    """
    draft = torch.tensor(q, dtype=torch.float64)
    records = []
    for x in np.linspace(0.0, 1.0, points).tolist():
        p = torch.tensor([x, 1.0 - x], dtype=torch.float64)
        for scheme, rule in (("optimal", "optimum"), ("SpecTr", "kseq"), ("SpecInfer", "rrs")):
            records.append({"x": x, "scheme": scheme, "acceptance": RULES[rule](p, draft, 2)})
    return records


ACCEPTED = {
    "token": theory.token_accepted,
    "block": theory.block_accepted,
    "greedy_block": theory.greedy_block_accepted,
}


def accepted_lengths(
    p: Sequence[float],
    q: Sequence[float],
    lengths: Sequence[int],
    verifiers: Sequence[str] = tuple(ACCEPTED),
) -> list[Record]:
    """E[tau] of one block of each length, every token of law p or q (Sun et al., section 1)."""
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in (p, q))
    accepted = {
        name: ACCEPTED[name](lambda _: target, lambda _: draft, max(lengths)).tolist()
        for name in verifiers
    }
    return [
        {"verifier": name, "length": length, "accepted": accepted[name][length - 1]}
        for length in lengths
        for name in verifiers
    ]


def bernoulli(p: Sequence[float], q: float, lengths: Sequence[int]) -> list[Record]:
    """E[tau] + 1 for Ber(p), of each p, against Ber(q) (Sun et al. v1, Figure 2: from i = 0)."""
    names = {"token": "token", "greedy_block": "block, version 1"}
    return [
        {"target": f"Ber({chance:g})", **record, "verifier": names[record["verifier"]]}
        | {"accepted": 1.0 + record["accepted"]}
        for chance in p
        for record in accepted_lengths((1.0 - chance, chance), (1.0 - q, q), lengths, [*names])
    ]


def markov_chains(
    vocabulary: int, horizon: int, spread: float, seed: int
) -> tuple[Tensor, Tensor, theory.Model, theory.Model]:
    """Two random chains whose transitions change with the position (Yin et al., section 5).

    The target's logits are standard normal, the draft's lie around them with the given spread: p
    and q, (T, V + 1, V), row V for the first token, and the same as models.
    """
    generator = torch.Generator().manual_seed(seed)
    size = (horizon, vocabulary + 1, vocabulary)
    logits = torch.randn(size, generator=generator, dtype=torch.float64)
    noise = torch.randn(size, generator=generator, dtype=torch.float64)
    p, q = logits.softmax(-1), (logits + spread * noise).softmax(-1)

    def model(rows: Tensor) -> theory.Model:
        return lambda prefix: rows[len(prefix), prefix[-1] if prefix else vocabulary]

    return p, q, model(p), model(q)


def rejections(
    vocabulary: int, horizon: int, spread: float, runs: Sequence[int], seed: int, responses: int = 1
) -> list[Record]:
    """Rejections of batches of `responses` drafts, simulated and by theorem (Yin et al.).

    Of `markov_chains`, the mean after each number of runs; one draft is token verification. Drafts
    run to the end of the horizon, and a rejection is corrected, as in the paper.
    """
    p, q, of_p, of_q = markov_chains(vocabulary, horizon, spread, seed)
    exact = float(theory.expected_rejections(of_p, of_q, horizon, responses, memory=1).sum())
    verifier = VERIFIERS["token" if responses == 1 else "batch"].make()
    generator, reaching, counts = torch.Generator().manual_seed(seed), q.cumsum(-1).tolist(), []
    for _ in range(max(runs)):
        done, last, rejected = 0, vocabulary, 0
        while done < horizon:
            contexts = [[last] for _ in range(responses)]
            points = torch.rand(responses, horizon, generator=generator).tolist()
            for path, of_path in zip(contexts, points, strict=True):
                for rows, point in zip(reaching[done:], of_path, strict=False):
                    path.append(min(bisect(rows[path[-1]], point), vocabulary - 1))
            before, tokens = torch.tensor(contexts)[:, :-1], torch.tensor(contexts)[:, 1:]
            steps = torch.arange(done, horizon)
            drawn_from = q[steps, before]
            draft = DraftTree.paths(tokens, drawn_from)
            if responses == 1:
                draft = DraftTree.chain(tokens[0], drawn_from[0])
            # After a whole draft nothing is left to generate: its bonus token is not used.
            after = p[(steps + 1).clamp(max=horizon - 1), tokens].flatten(end_dim=1)
            out = verifier.draw(draft, torch.cat([p[done, last].unsqueeze(0), after]), generator)
            rejected += len(out.nodes) < len(steps)
            done, last = done + len(out.nodes) + 1, out.token
        counts.append(rejected)
    every = np.array(counts, dtype=np.float64)
    records: list[Record] = []
    for count in runs:
        mean = Interval.of(resamples(count) @ every[:count] / count).stored()
        theorem = "Theorem 1" if responses == 1 else "Theorem 3"
        for by, figure in (("simulated", mean), (theorem, exact)):
            records.append({"runs": count, "M": f"M = {responses}", "by": by, "rejections": figure})
    return records


def batches(
    vocabulary: int, horizon: int, spread: float, responses: Sequence[int], seed: int
) -> list[Record]:
    """Rejections of batch verification over each M, and the limit of many (Yin et al., Theorem 3).

    Of `markov_chains`.
    """
    *_, p, q = markov_chains(vocabulary, horizon, spread, seed)
    limit = float(theory.expected_rejections(p, q, horizon, None, memory=1).sum())
    records = []
    for count in responses:
        exact = float(theory.expected_rejections(p, q, horizon, count, memory=1).sum())
        for by, value in (("Theorem 3", exact), ("limit of many", limit)):
            records.append({"M": count, "by": by, "rejections": value, "fewer": horizon / value})
    return records


def tradeoff(p: Sequence[float], q: Sequence[float], epsilons: Sequence[float]) -> list[Record]:
    """Rejection against bias at one position by over-acceptance (Yin et al., Theorems 4 and 5)."""
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in (p, q))
    records = []
    for epsilon in epsilons:
        accept = theory.over_acceptance(target, draft, epsilon)
        rejected = theory.rejection(draft, accept)
        for name, bias in (
            ("Pareto front", theory.least_bias_at(target, draft, rejected)),
            ("Decoding-OPT", opt_loss(target, draft, epsilon)),
            ("Decoding-UNO", uno_loss(target, draft, epsilon)),
        ):
            row = {"epsilon": epsilon, "rule": name, "rejected": rejected, "bias": bias}
            records.append(row)
    return records


FORMULAS: dict[str, Callable[..., list[Record]]] = {
    "accepted_lengths": accepted_lengths,
    "bernoulli": bernoulli,
    "rejections": rejections,
    "batches": batches,
    "tradeoff": tradeoff,
    "two_drafts": two_drafts,
}
"""Examples that a protocol names (`kind: formula`, `of: NAME`, with the arguments beside it)."""
