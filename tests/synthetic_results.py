"""Results of a simulated machine, realistic in shape, for the tests of metrics, report, release.

A drafted token is accepted with a prompt's own probability until the first rejection; one draft
token costs 2 ms and one target forward 11 ms, give or take 3 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from eval.measuring.environment import Environment
from eval.measuring.methods import PLAIN
from eval.measuring.records import PromptRecord, record_prompt
from eval.measuring.results import Method, Results, build_results
from eval.rounds import Round

T_DRAFT, T_TARGET = 0.002, 0.011
PROMPTS = 12
MAX_NEW_TOKENS = 96
BIAS = 0.041
"""Total variation a token of the biased verifier."""
PARTS = ("draft_seconds", "target_seconds", "overhead_seconds")

ENVIRONMENT = Environment(
    hardware={"cpu": "Simulated CPU @ 2.0 GHz", "cores": 2, "threads": 1, "gpu": None},
    software={"python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0"},
    git_commit="0123456789abcdef0123456789abcdef01234567",
    git_dirty=False,
    date="2026-01-02T03:04:05+00:00",
    device="cpu",
    dtype="float32",
)


def simulate(
    rng: np.random.Generator,
    prompt_id: str,
    *,
    lengths: tuple[int, int],
    ease: float,
    width: int = 1,
) -> PromptRecord:
    """One generation: every round drafts a length between the two given, `width` nodes a depth."""
    rounds: list[Round] = []
    left = MAX_NEW_TOKENS
    while left > 0:
        wanted = int(rng.integers(lengths[0], lengths[1] + 1)) if lengths[1] else 0
        depth = min(wanted, left - 1)
        accepted = 0
        while accepted < depth and rng.random() < ease:
            accepted += 1
        draft = depth * T_DRAFT * (1 + 0.03 * rng.standard_normal())
        target = T_TARGET * (1 + 0.03 * rng.standard_normal())
        rounds.append(
            Round(depth * width, depth, accepted, accepted + 1, depth, draft, target, 0.0004)
        )
        left -= accepted + 1
    seconds = sum(r.draft_seconds + r.target_seconds + r.overhead_seconds for r in rounds)
    return record_prompt(prompt_id, rounds, seconds=seconds + 0.001, finish="length")


def method(name: str, dataset: str, **changes: object) -> Method:
    """A chain with token verification and fixed length, changed as given."""
    base = {
        "method": name,
        "dataset": dataset,
        "target": "acme/target-7b",
        "draft": "acme/draft-160m",
        "head": None,
        "drafter": "chain",
        "verifier": "token",
        "stop": "fixed",
        "length": 4,
        "threshold": None,
        "sampling": {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "max_new_tokens": 96},
    }
    return Method(**(base | changes))  # type: ignore[arg-type]


def methods(dataset: str) -> Iterator[tuple[Method, tuple[int, int], float, int]]:
    """Every method with its draft lengths, ease factor and tree width."""
    none = {"draft": None, "drafter": None, "verifier": None, "stop": None, "length": None}
    yield method(PLAIN, dataset, **none), (0, 0), 1.0, 1
    for length in (2, 4, 6, 8, 12):
        yield method(f"fixed-{length}", dataset, length=length), (length, length), 1.0, 1
    block = {"verifier": "block", "length": 6}
    yield method("block-6", dataset, **block), (6, 6), 1.03, 1
    for threshold, lengths in ((0.3, (1, 4)), (0.5, (2, 6)), (0.7, (3, 9)), (0.9, (6, 13))):
        head = {"stop": "head", "head": "acme/head", "threshold": threshold, "length": 20}
        yield method(f"head-{threshold}", dataset, **head), lengths, 1.08, 1
    for stop, threshold in (("confidence", 0.4), ("entropy", 1.5), ("logit", 0.7)):
        rule = {"stop": stop, "threshold": threshold, "length": 20}
        yield method(f"{stop}-{threshold}", dataset, **rule), (2, 8), 1.04, 1
    tree = {
        "drafter": "tree",
        "verifier": "rrs_wor",
        "length": 3,
        "parameters": {"widths": [4, 2, 1]},
    }
    yield method("tree-4x2x1", dataset, **tree), (3, 3), 1.15, 7
    hugging_face = {"drafter": "transformers", "length": 5, "stop": "confidence", "threshold": 0.4}
    yield method("transformers", dataset, **hugging_face), (2, 5), 0.98, 1
    biased = {"verifier": "biased_opt", "lossless": False, "length": 6}
    yield method("biased-0.05", dataset, **biased), (6, 6), 1.2, 1


def synthetic_results(
    seed: int = 0,
    datasets: tuple[str, ...] = ("alpaca", "gsm8k", "code"),
    *,
    timed: bool = True,
) -> Results:
    """Results with every family of methods on several datasets, in batches of 4 if not timed."""
    rng = np.random.default_rng(seed)
    measured = []
    for index, dataset in enumerate(datasets):
        eases = rng.beta(14, 5 - index, size=PROMPTS)
        for what, lengths, factor, width in methods(dataset):
            records = [
                simulate(
                    rng,
                    f"{dataset}-{i}",
                    lengths=lengths,
                    ease=min(0.98, float(ease) * factor),
                    width=width,
                )
                for i, ease in enumerate(eases)
            ]
            if not what.lossless:
                records = [
                    replace(r, variation=BIAS * r.tokens, variation_tokens=r.tokens)
                    for r in records
                ]
            if not timed:
                nothing = dict.fromkeys(("seconds", *PARTS), 0.0)
                records = [replace(record, **nothing) for record in records]
            measured.append((what, records))
    batch = 1 if timed else 4
    return build_results(ENVIRONMENT.model_copy(update={"batch_size": batch}), measured)
