"""The papers' examples that follow from formulas alone, as records: a figure for each setting.

p is the target and q the draft, as in `eval.analysis.theory`.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from eval.analysis import theory
from eval.analysis.acceptance import two_drafts
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.verifiers import VERIFIERS

Record = dict[str, Any]


def accepted_lengths(
    p: Sequence[float], q: Sequence[float], lengths: Sequence[int]
) -> list[Record]:
    """E[tau] of one block where every token is drawn alike (Sun et al., sections 1 and 3).

    Args:
        p: the target's distribution at every position.
        q: the draft's.
        lengths: L of each record.
    """
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in (p, q))
    verifiers: dict[str, Callable[[theory.Model, theory.Model, int], float]] = {
        "token": theory.token_accepted,
        "block": theory.block_accepted,
        "greedy_block": theory.greedy_block_accepted,
    }
    return [
        {"verifier": name, "length": length, "accepted": accepted}
        for length in lengths
        for name, formula in verifiers.items()
        for accepted in [formula(lambda _: target, lambda _: draft, length)]
    ]


def bernoulli(p: Sequence[float], q: float, lengths: Sequence[int]) -> list[Record]:
    """E[tau] for Ber(p) against Ber(q) (Sun et al. v1, Figure 2).

    Args:
        p: chances of the target.
        q: chance of the draft.
        lengths: L of each record.
    """
    curves = {
        "token": theory.bernoulli_token_accepted,
        "block (v1)": theory.bernoulli_greedy_block_accepted,
    }
    return [
        {"target": f"Ber({chance:g})", "verifier": name, "length": length, "accepted": value}
        for chance in p
        for length in lengths
        for name, curve in curves.items()
        for value in [curve(chance, q, length)]
    ]


def markov_chains(
    vocabulary: int, horizon: int, spread: float, seed: int
) -> tuple[Tensor, Tensor, theory.Model, theory.Model]:
    """Two random chains whose transitions change with the position (Yin et al., section 5).

    Args:
        vocabulary: V.
        horizon: T.
        spread: of the draft's logits around the target's, which are standard normal.
        seed: of both.

    Returns:
        p and q, (T, V + 1, V), row V for the first token, and the same as models.
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
    vocabulary: int, horizon: int, spread: float, runs: Sequence[int], seed: int
) -> list[Record]:
    """Rejections of token verification, the mean of simulated runs and Theorem 1 (Yin et al.).

    Drafts run to the end of the horizon, and a rejection is corrected, as in the paper.

    Args:
        vocabulary: V.
        horizon: T.
        spread: as in `markov_chains`.
        runs: after how many runs there is a record.
        seed: of the chains and of the runs.
    """
    p, q, of_p, of_q = markov_chains(vocabulary, horizon, spread, seed)
    exact = float(theory.expected_rejections(of_p, of_q, horizon, memory=1).sum())
    verifier, generator = VERIFIERS["token"].make(), torch.Generator().manual_seed(seed)
    reaching, counts = q.cumsum(-1).tolist(), []
    for _ in range(max(runs)):
        done, last, rejected = 0, vocabulary, 0
        while done < horizon:
            tokens, contexts = [], [last]
            for rows, point in zip(
                reaching[done:], torch.rand(horizon, generator=generator).tolist(), strict=False
            ):
                tokens.append(min(bisect(rows[contexts[-1]], point), vocabulary - 1))
                contexts.append(tokens[-1])
            steps = torch.arange(done, horizon)
            drafted = q[steps, torch.tensor(contexts[:-1])]
            target = p[steps, torch.tensor(contexts[:-1])]
            # After a whole draft nothing is left to generate: its bonus token is not used.
            target = torch.cat([target, target[-1:]])
            tree = DraftTree.chain(torch.tensor(tokens), drafted)
            out = verifier.draw(tree, target, generator)
            accepted = len(out.nodes)
            done, last = done + accepted + 1, out.token
            rejected += accepted < len(tokens)
        counts.append(float(rejected))
    every = torch.tensor(counts, dtype=torch.float64).numpy()
    records: list[Record] = []
    for count in runs:
        mean = Interval.of(resamples(count) @ every[:count] / count)
        rows = [("simulated", mean.value, asdict(mean)), ("Theorem 1", exact, exact)]
        for by, value, figure in rows:
            records.append(
                {"runs": count, "by": by, "rejections": figure, "speedup": horizon / value}
            )
    return records


def batches(
    vocabulary: int, horizon: int, spread: float, responses: Sequence[int], seed: int
) -> list[Record]:
    """Rejections of batch verification over M, and the limit of many (Yin et al., Theorem 3).

    Args:
        vocabulary: V.
        horizon: T.
        spread: as in `markov_chains`.
        responses: M of each record.
        seed: of the chains.
    """
    *_, p, q = markov_chains(vocabulary, horizon, spread, seed)
    limit = float(theory.batch_rejections(p, q, horizon, None, memory=1).sum())
    records = []
    for count in responses:
        exact = float(theory.batch_rejections(p, q, horizon, count, memory=1).sum())
        for by, value in (("Theorem 3", exact), ("limit of many", limit)):
            records.append({"M": count, "by": by, "rejections": value, "speedup": horizon / value})
    return records


def tradeoff(p: Sequence[float], q: Sequence[float], epsilons: Sequence[float]) -> list[Record]:
    """Rejection against bias at one position (Yin et al., Theorems 4 and 5).

    Args:
        p: (V,) the target's distribution.
        q: (V,) the draft's.
        epsilons: over-acceptance of each record.
    """
    target, draft = (torch.tensor(row, dtype=torch.float64) for row in (p, q))
    records = []
    for epsilon in epsilons:
        accept = theory.over_acceptance(target, draft, epsilon)
        rejected = theory.rejection(draft, accept)
        for name, bias in (
            ("Pareto front", theory.least_bias_at(target, draft, rejected)),
            ("Decoding-OPT", theory.opt_loss(target, draft, epsilon)),
            ("Decoding-UNO", theory.uno_loss(target, draft, epsilon)),
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
