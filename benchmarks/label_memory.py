"""Peak memory of labelling long rows over a large vocabulary, beyond the models.

    python benchmarks/label_memory.py [--out runs/bench/label_memory.json]

Each case runs in a process of its own, on tiny models with V = 131072 ids, and Linux counts. The
logits of both models at T = 4096 would be 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peak_memory import peak
from transformers import LlamaConfig, LlamaForCausalLM

from eval.measuring.environment import describe_environment
from specdata.labels.labeller import Labeller, target_distributions, tokens_at_once
from specdata.lm_head import find_lm_head
from specdata.probability import SamplingConfig
from specdata.storage.files import write_json
from specdata.storage.schema import Rollout

SCHEMA_VERSION = 1
VOCABULARY, LONGEST = 131072, 4096
BUDGET_MIB = 512
CASES: list[dict[str, Any]] = [
    {"length": LONGEST, "top_p": 1.0, "top": 0},
    # Sorting takes long, and the distributions of so many positions are never there together.
    {"length": 128, "top_p": 0.9, "top": 0},
    {"length": 512, "top_p": 1.0, "top": 64},
]


def llama(seed: int) -> LlamaForCausalLM:
    """A model that is nearly all vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def row(length: int) -> Rollout:
    """A prompt of 2 tokens and a completion that fills up the length."""
    return Rollout(
        example_id="long",
        dataset="bench",
        split="train",
        sample=0,
        turn=0,
        prompt_ids=[1, 2],
        completion_ids=list(range(3, length + 1)),
        finish="length",
    )


def case(length: int, top_p: float, top: int) -> dict[str, float]:
    """Label one row of `length` tokens, keeping `top` logits."""
    torch.set_num_threads(1)
    p, q = find_lm_head(llama(0)), find_lm_head(llama(1))
    sampling = SamplingConfig(top_p=top_p)
    distributions = partial(target_distributions, p, sampling, top)
    work = Labeller(distributions, q, VOCABULARY, sampling, 0, tokens_at_once(p, q))
    work([row(3)])
    return peak(lambda: work([row(length)]))


def main() -> None:
    """Run every case and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/label_memory.json"))
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(**options.case)))
        return
    records = []
    for settings in CASES:
        command = [sys.executable, __file__, "--case", json.dumps(settings)]
        measured = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        records.append({**settings, **measured, "met": measured["peak_mib"] <= BUDGET_MIB})
        print(
            f"T={settings['length']:<5} top_p={settings['top_p']} kept={settings['top']:<3}"
            f" {measured['peak_mib']:4.0f} MiB beyond the models, {measured['seconds']:.1f} s;"
            f" goal of {BUDGET_MIB} MiB {'met' if records[-1]['met'] else 'MISSED'}"
        )
    environment = describe_environment(device="cpu", dtype="float32")
    write_json(
        options.out,
        {
            "schema_version": SCHEMA_VERSION,
            "environment": environment.model_dump(),
            "vocabulary": VOCABULARY,
            "budget_mib": BUDGET_MIB,
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
