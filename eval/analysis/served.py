"""Is a served engine lossless? What it answers, judged by its target's own distributions.

Greedy texts are compared with transformers' `generate`, and differences told apart as ties or bugs.
Of sampled texts each token's place in the target's distribution is looked up (`count_cells`): under
a lossless engine places are uniform and independent, whatever the target, so how often they fall
into cells is known beforehand, and one sample tells more than two would. The p-value is twice the
lesser of two: of the cells, and of the mean place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from scipy.special import chndtrinc
from scipy.stats import chi2, chisquare, norm
from torch import Tensor
from transformers import PreTrainedModel

from eval.analysis.certificate import BINS, POWER, count_cells
from eval.analysis.ties import greedy_reference, judge_difference
from eval.measuring.records import Strict
from specdata.rollouts.backend import Request
from specdata.sampling import SamplingConfig, generator_for

LEVEL = 1e-4
"""A sound engine fails the test once in 1 / LEVEL times."""


class Answers(Protocol):
    """Has an engine complete prompts with a sampler: the new ids of each."""

    def __call__(self, requests: Sequence[Request], sampling: SamplingConfig) -> list[list[int]]:
        """In the order of the requests."""


class CertifiedServer(Strict):
    """What was found of a served engine.

    Attributes:
        texts: greedy texts; those that are neither tied nor bugs are `generate`'s.
        ties: of them those that differ by rounding.
        bugs: those that differ otherwise.
        differences: where they differ, and why it is one or the other.
        samples: pairs of neighbouring tokens of sampled texts; 0 where the sampler is greedy.
        p_value: chance of cells as uneven if the engine is lossless.
        visible_bias: total variation of the cells that would have been seen with power `POWER`.
    """

    texts: int
    ties: int
    bugs: int
    differences: list[str]
    samples: int = 0
    p_value: float = 1.0
    visible_bias: float = 1.0

    @property
    def is_exact(self) -> bool:
        """True if nothing speaks against it."""
        return not self.bugs and self.p_value >= LEVEL

    def __str__(self) -> str:
        same = self.texts - self.ties - self.bugs
        said = "Lossless" if self.is_exact else "NOT LOSSLESS"
        said += f": {same} of {self.texts} greedy texts are the target's, {self.ties} tied"
        said += f", {self.bugs} wrong" if self.bugs else ""
        if self.samples:
            said += (
                f"; sampled texts follow the target's distribution with p {self.p_value:.2g} "
                f"({2 * self.samples:,} tokens: a bias of {self.visible_bias:.2g} would have been "
                f"seen with power {POWER:g})"
            )
        return f"{said}."


def certify_server(
    answers: Answers,
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: Sequence[Tensor],
    sampling: SamplingConfig,
    *,
    texts: int,
    max_new_tokens: int,
    seed: int,
) -> CertifiedServer:
    """Certify an engine that is asked for completions.

    All prompts, each (T,), are completed greedily, and so many other `texts` are sampled, prompts
    taken in turn. The draft is given if it is a model and known: what an engine does wrong moves
    tokens that the draft prefers, so the test sees smaller faults with it.
    """
    requests = [Request(each.tolist(), ("greedy", n)) for n, each in enumerate(prompts)]
    differences = {}
    for number, decoded in enumerate(answers(requests, SamplingConfig(0.0))):
        plain = greedy_reference(target, prompts[number], max_new_tokens).tolist()
        if decoded != plain:
            differences[number] = judge_difference(
                target, requests[number].ids, plain, decoded, max_new_tokens
            )
    verdicts = [each.verdict for each in differences.values()]
    found = CertifiedServer(
        texts=len(prompts),
        ties=verdicts.count("tie"),
        bugs=verdicts.count("bug"),
        differences=[f"prompt {number}: {each}" for number, each in differences.items()],
    )
    if sampling.temperature == 0:
        return found
    asked = [prompts[number % len(prompts)] for number in range(texts)]
    requests = [Request(each.tolist(), ("sampled", n)) for n, each in enumerate(asked)]
    sampled = [torch.tensor(each) for each in answers(requests, sampling)]
    pair, ties = (target, draft or target), generator_for(seed, "certificate", "cells")
    counts = count_cells(pair, [*zip(asked, sampled, strict=True)], sampling, ties)
    # A total variation of d has a noncentrality of at least 4 d^2 n, as in `two_sample_test`.
    freedom, count = len(counts) - 1, int(counts.sum())
    seen = chndtrinc(chi2.isf(LEVEL / 2, freedom), freedom, 1 - POWER)
    # Most faults move all tokens one way, which the mean quarter shows sooner than 16 cells do.
    square = counts.reshape(BINS, BINS)
    quarters, middle = square.sum(0) + square.sum(1), (BINS - 1) / 2
    moved = float((quarters * (np.arange(BINS) - middle)).sum())
    deviation = moved / math.sqrt(max(1, 2 * count) * (BINS**2 - 1) / 12)
    p_values = (float(chisquare(counts).pvalue), 2 * float(norm.sf(abs(deviation))))
    return found.model_copy(
        update={
            "samples": count,
            "p_value": min(1.0, 2 * min(p_values)),
            "visible_bias": min(1.0, math.sqrt(seen / (4 * max(1, count)))),
        }
    )
