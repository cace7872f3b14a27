"""Settings of a draft for engines: their command lines, and acceptance by position.

Options are those of vLLM 0.28 to main of September 2026 (`vllm/config/speculative.py`), SGLang main
of the same time (`srt/arg_groups`) and llama.cpp b10195 to b11160 (`llama-server --help`);
`tests/test_serving.py` lists them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

import numpy as np

from eval.measuring.results import Results, Run

DEFAULT_LENGTHS = {
    "vLLM": (5, "the number in vLLM's own example"),
    "SGLang": (3, "SGLang's default"),
    "llama.cpp": (3, "llama.cpp's default"),
}
"""Engine -> the draft length in its lines, and whose it is: no evaluation here measures engines,
and a length that is best in one engine's loop says nothing about another."""


def serving_lines(draft: str, target: str) -> dict[str, str]:
    """The command lines with which engines serve a draft and its target (Hub ids or folders).

    Of vLLM with greedy drafts, its default, and of "vLLM, sampled" with sampled drafts and block
    verification; of llama.cpp from files that were converted to GGUF.
    """
    k = DEFAULT_LENGTHS["SGLang"][0]
    sglang = [
        f"sglang serve --model-path {shlex.quote(target)}",
        f"  --speculative-algorithm STANDALONE --speculative-draft-model-path {shlex.quote(draft)}",
        f"  --speculative-num-steps {k} --speculative-eagle-topk 1",
        f"  --speculative-num-draft-tokens {k + 1}",
    ]
    llama = [
        "llama-server --model target.gguf --spec-draft-model draft.gguf",
        f"  --spec-type draft-simple --spec-draft-n-max {DEFAULT_LENGTHS['llama.cpp'][0]}",
    ]
    return {
        "vLLM": vllm_line(draft, target),
        "vLLM, sampled": vllm_line(draft, target, sampled=True),
        "SGLang": " \\\n".join(sglang),
        "llama.cpp": " \\\n".join(llama),
    }


def vllm_line(draft: str, target: str, *, sampled: bool = False) -> str:
    """The command with which vLLM serves a pair; `sampled` as in `serving_lines`."""
    settings: dict[str, Any] = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": DEFAULT_LENGTHS["vLLM"][0],
    }
    if sampled:
        settings |= {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"}
    option = shlex.quote(json.dumps(settings, ensure_ascii=False))
    return f"vllm serve {shlex.quote(target)} --speculative-config {option}"


def synthetic_acceptance(draft: str, runs: Mapping[str, Run]) -> dict[str, dict[str, Any]]:
    """For each prompt set a speculative configuration of vLLM that simulates its acceptance.

    vLLM refuses `synthetic_acceptance_rates` that increase with the position. Measured shares do
    now and then, because rounds near the end of a text draft fewer tokens: each share is counted
    over the rounds that drafted so deep. So they are replaced by the nearest sequence that does
    not increase, in least squares weighted by those rounds (pool adjacent violators).

    Args:
        draft: Hub id or folder.
        runs: prompt set -> a chain of fixed length.
    """
    return {
        dataset: {
            "method": "draft_model",
            "model": draft,
            "num_speculative_tokens": len(run.acceptance_by_position),
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": non_increasing(run),
        }
        for dataset, run in runs.items()
    }


def non_increasing(run: Run) -> list[float]:
    """Acceptance by position, made non-increasing; see `synthetic_acceptance`."""
    from scipy.optimize import isotonic_regression  # here: it takes a while, lines do not need it

    rounds = np.zeros(len(run.acceptance_by_position))
    for record in run.generations:
        rounds[: len(record.drafted_by_position)] += record.drafted_by_position
    fitted = isotonic_regression(run.acceptance_by_position, weights=rounds, increasing=False)
    rates: list[float] = fitted.x.clip(0.0, 1.0).tolist()
    return rates


def acceptance_positions(results: Results) -> dict[str, Run]:
    """For each data set its longest fixed chain: the acceptance vector that simulators ask for."""
    positions = {}
    for dataset in results.datasets():
        fixed = [run for run in results.of(dataset) if run.method.fixed_length]
        chains = [run for run in fixed if run.method.is_chain]
        chains = [run for run in chains if run.method.verifier == "token"] or chains
        if chains:
            positions[dataset] = max(chains, key=lambda run: len(run.acceptance_by_position))
    return positions
