"""The papers' examples that follow from formulas alone, as records: a figure for each setting.

p is the target and q the draft, as in `recipes.papers.theory`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.verifiers import VERIFIERS
from eval.verifiers.biased import opt_loss, uno_loss
from recipes.papers import theory
from recipes.papers.acceptance import two_drafts
from recipes.papers.tables import Record

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
        mean = asdict(Interval.of(resamples(count) @ every[:count] / count))
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
