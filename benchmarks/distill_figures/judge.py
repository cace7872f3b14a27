"""The quality of a draft from held-out rollouts of its target: exact expectations, no draws.

A rollout's tokens x are distributed as those that speculative decoding emits, whatever the draft,
so the rounds of decoding follow from the ratios q/p at the tokens alone. How many tokens a round
that starts at a position accepts is worked out in `specdata.expected_tokens`, whose means over all
positions are what training watches. Here the probability that a round starts at a position is
carried from left to right as well: then rounds and drafted tokens are those of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.distill_figures.data import DOMAINS, Data, of_domains
from eval.drafting.stopping.recorded import Reals, pad
from eval.measuring.intervals import resamples
from specdata.lm_head import LMHead, find_lm_head
from specdata.models import load_model
from specdata.probability import overlap, probabilities, to_vocabulary

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedModel

    from specdata.sampling import SamplingConfig

VERIFIERS = ("token", "block")
LENGTHS = range(1, 17)
SHOWN = (4, 8)
ROWS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft on R rollouts; sums of each, so that rollouts can be resampled.

    Attributes:
        tokens: (R,) completion tokens.
        overlap: (R,) sum over them of sum_x min(p, q).
        rounds: verifier -> (K, R) expected rounds at every length in `LENGTHS`.
        drafted: verifier -> (K, R) expected drafted tokens.
    """

    tokens: Reals
    overlap: Reals
    rounds: Mapping[str, Reals]
    drafted: Mapping[str, Reals]

    @classmethod
    def together(cls, parts: Sequence[Judged]) -> Judged:
        """Those of several domains, one after the other."""
        return cls(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.overlap for part in parts]),
            {v: np.concatenate([part.rounds[v] for part in parts], axis=1) for v in VERIFIERS},
            {v: np.concatenate([part.drafted[v] for part in parts], axis=1) for v in VERIFIERS},
        )

    @classmethod
    def mean(cls, seeds: Sequence[Judged]) -> Judged:
        """Of several trainings, judged on the same rollouts."""
        return cls(
            seeds[0].tokens,
            np.mean([each.overlap for each in seeds], axis=0),
            {v: np.mean([each.rounds[v] for each in seeds], axis=0) for v in VERIFIERS},
            {v: np.mean([each.drafted[v] for each in seeds], axis=0) for v in VERIFIERS},
        )

    def acceptance(self) -> Reals:
        """Mean of sum_x min(p, q), of all rollouts first and then of every resample."""
        drawn = resamples(len(self.tokens))
        means: Reals = (drawn @ self.overlap) / (drawn @ self.tokens)
        return means

    def tokens_per_round(self, verifier: str, length: int) -> Reals:
        """Likewise, expected tokens a round."""
        drawn = resamples(len(self.tokens))
        return (drawn @ self.tokens) / (drawn @ self.rounds[verifier][length - LENGTHS[0]])

    def speedup(self, verifier: str, draft_cost: float) -> tuple[int, Reals]:
        """The best length, and the speed-up over plain decoding there, likewise.

        Args:
            verifier: one of `VERIFIERS`.
            draft_cost: t_d / t_t, of a drafted token against a forward of the target.
        """
        rounds, drafted = self.rounds[verifier], self.drafted[verifier]
        seconds = rounds + draft_cost * drafted
        best = int(seconds.sum(axis=1).argmin())
        drawn = resamples(len(self.tokens))
        return LENGTHS[best], (drawn @ self.tokens) / (drawn @ seconds[best])


def interval(values: Reals) -> dict[str, float]:
    """A figure and its 95 % interval, of (1 + resamples,) values."""
    low, high = np.quantile(values[1:], (0.025, 0.975))
    return {"value": float(values[0]), "low": float(low), "high": float(high)}


def prefix_acceptance(ratios: Reals, lengths: Sequence[int], longest: int, verifier: str) -> Reals:
    """Probability that a round from each token on accepts so many tokens of R given sequences.

    Args:
        ratios: (R, N) q/p at their tokens.
        lengths: (R,) how many tokens each has.
        longest: L, most drafted tokens.
        verifier: one of `VERIFIERS`.

    Returns:
        (R, N, L): of 1, 2, .. L tokens; 0 where the last token of the sequence would be drafted,
        which the target gives.
    """
    width = ratios.shape[1]
    padded = np.pad(ratios, ((0, 0), (0, longest - 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, longest, axis=1)
    if verifier == "token":
        alive = np.minimum(windows, 1.0).cumprod(axis=-1)
    else:
        alive = np.minimum.accumulate(np.minimum(windows.cumprod(axis=-1), 1.0), axis=-1)
    left = np.asarray(lengths)[:, None] - 1 - np.arange(width)
    return np.where(np.arange(longest) < left[..., None], alive, 0.0)


def expected_rounds(alive: Reals, lengths: Sequence[int], length: int) -> tuple[Reals, Reals]:
    """Expected rounds, and drafted tokens, of decoding R given sequences.

    Args:
        alive: (R, N, L) of `prefix_acceptance`.
        lengths: (R,) how many tokens each has.
        length: drafted tokens of a round, K <= L; fewer at the end of a sequence.

    Returns:
        (R,) and (R,).
    """
    rows, width, _ = alive.shape
    # That a round accepts exactly 0, 1, .. K tokens: the next one starts after one more.
    edge = np.ones((rows, width, 1))
    exactly = -np.diff(np.concatenate([edge, alive[..., :length], 0.0 * edge], axis=-1), axis=-1)
    starts = np.zeros((rows, width + length + 1))
    starts[:, 0] = 1.0
    for position in range(width):
        reached = starts[:, position : position + 1] * exactly[:, position]
        starts[:, position + 1 : position + length + 2] += reached
    left = np.asarray(lengths)[:, None] - np.arange(width)
    starts = np.where(left > 0, starts[:, :width], 0.0)
    return starts.sum(axis=1), (starts * (left - 1).clip(0, length)).sum(axis=1)


class Judge:
    """Held-out rollouts of each domain, with the target's distributions at them."""

    def __init__(self, data: Data, rollouts: int) -> None:
        self.sampling: SamplingConfig = data.sampling
        self.rows = {domain: of_domains(data.test, {domain: rollouts}) for domain in DOMAINS}
        head = find_lm_head(load_model(str(data.target), dtype="float32"))
        # States and not distributions are kept: they are V / H times smaller.
        self._head = head
        self._states = {domain: list(_states(head, rows)) for domain, rows in self.rows.items()}

    def of(self, draft: str | Path) -> dict[str, Judged]:
        """Judge the draft in a folder: domain -> figures."""
        head = find_lm_head(load_model(str(draft), dtype="float32"))
        return {domain: self._judged(domain, head) for domain in DOMAINS}

    @torch.inference_mode()
    def distributions(
        self, draft: PreTrainedModel, domain: str
    ) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
        """P and q (n, V) at the completion tokens of every batch, and the row of each token."""
        head, rows = find_lm_head(draft), self.rows[domain]
        batches = zip(self._states[domain], _states(head, rows), _batches(rows), strict=True)
        for theirs, ours, batch in batches:
            row = [index for index in batch for _ in rows[index]["completion_ids"]]
            yield *self._both(head, theirs, ours), row

    def _both(self, head: LMHead, theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
        p_logits = self._head.logits(theirs)
        q_logits = to_vocabulary(head.logits(ours), p_logits.shape[-1])
        return probabilities(p_logits, self.sampling), probabilities(q_logits, self.sampling)

    @torch.inference_mode()
    def _judged(self, domain: str, head: LMHead) -> Judged:
        rows = self.rows[domain]
        tokens = rows["completion_ids"]
        overlaps, ratios = list[float](), list[list[float]]()
        batches = zip(self._states[domain], _states(head, rows), _batches(rows), strict=True)
        for theirs, ours, batch in batches:
            p, q = self._both(head, theirs, ours)
            completions = tokens[batch.start : batch.stop]
            sizes = [len(completion) for completion in completions]
            at = torch.tensor([token for each in completions for token in each]).unsqueeze(-1)
            accepted = overlap(p, q).double()
            overlaps += [float(part.sum()) for part in torch.split(accepted, sizes)]
            ratio = (q.gather(-1, at) / p.gather(-1, at)).squeeze(-1).double()
            ratios += [part.tolist() for part in torch.split(ratio, sizes)]
        lengths, values = [len(each) for each in tokens], pad(ratios)
        found: dict[str, Any] = {}
        for verifier in VERIFIERS:
            alive = prefix_acceptance(values, lengths, LENGTHS[-1], verifier)
            found[verifier] = np.array([expected_rounds(alive, lengths, k) for k in LENGTHS])
        return Judged(
            np.array(lengths, dtype=np.float64),
            np.array(overlaps),
            {verifier: each[:, 0] for verifier, each in found.items()},
            {verifier: each[:, 1] for verifier, each in found.items()},
        )


def _batches(rows: datasets.Dataset) -> list[range]:
    """Indices of rows that are read together."""
    starts = range(0, len(rows), ROWS_AT_ONCE)
    return [range(start, min(start + ROWS_AT_ONCE, len(rows))) for start in starts]


@torch.inference_mode()
def _states(head: LMHead, rows: datasets.Dataset) -> Iterator[Tensor]:
    """(n, H) states that predict the completion tokens of every batch."""
    for batch in _batches(rows):
        prompts, completions = (
            [rows[name][index] for index in batch] for name in ("prompt_ids", "completion_ids")
        )
        texts = [
            torch.tensor((prompt + rest)[:-1])
            for prompt, rest in zip(prompts, completions, strict=True)
        ]
        states = head.states(pad_sequence(texts, batch_first=True))
        yield torch.cat(
            [
                own[len(prompt) - 1 :][: len(rest)]
                for own, prompt, rest in zip(states, prompts, completions, strict=True)
            ]
        )


def faster(
    judged: Mapping[str, Judged], rival: Mapping[str, Judged], draft_cost: float
) -> dict[str, dict[str, float]]:
    """Verifier -> how much larger a draft's speed-up over all domains is than a rival's, less 1."""
    ours, theirs = (
        Judged.together([each[domain] for domain in DOMAINS]) for each in (judged, rival)
    )
    return {
        verifier: interval(
            ours.speedup(verifier, draft_cost)[1] / theirs.speedup(verifier, draft_cost)[1] - 1.0
        )
        for verifier in VERIFIERS
    }


def figures(
    judged: Mapping[str, Judged], base: Mapping[str, Judged], draft_cost: float
) -> dict[str, Any]:
    """Of each domain acceptance, the gain over the base and tokens a round; speed-up of all.

    Args:
        judged: domain -> a draft.
        base: likewise, the undistilled draft.
        draft_cost: t_d / t_t.
    """
    whole = Judged.together([judged[domain] for domain in DOMAINS])
    return {
        "domains": {
            domain: {
                "acceptance": interval(judged[domain].acceptance()),
                "gain": interval(judged[domain].acceptance() - base[domain].acceptance()),
                "tokens_per_round": {
                    verifier: {
                        str(k): interval(judged[domain].tokens_per_round(verifier, k))
                        for k in SHOWN
                    }
                    for verifier in VERIFIERS
                },
            }
            for domain in DOMAINS
        },
        "speedup": {
            verifier: {"length": length, **interval(values)}
            for verifier in VERIFIERS
            for length, values in (whole.speedup(verifier, draft_cost),)
        },
    }
