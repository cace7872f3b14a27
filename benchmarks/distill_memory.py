"""Peak memory of a step of distillation over a large vocabulary, beside the models.

    python benchmarks/distill_memory.py [--out runs/bench/distill_memory.json]

Each case runs in a process of its own, on tiny models that are nearly all vocabulary, and Linux
counts. Beside the models are not their weights, the draft's gradients and what the target says,
which are there before. All logits at once would take about 31 GB in the largest case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peak_memory import peak
from transformers import LlamaConfig, LlamaForCausalLM

from distill.chunked import MEMORY_BUDGET
from distill.config import DistilConfig
from distill.trainer import draft_trainer
from eval.measuring.environment import describe_environment
from specdata.sampling import SamplingConfig
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
BUDGET_MIB = MEMORY_BUDGET >> 20
CASES: list[dict[str, Any]] = [
    {"rows": 8, "completion": 512, "vocabulary": 152_000},
    {"rows": 8, "completion": 512, "vocabulary": 152_000, "objective": "tvd++"},
    {"rows": 8, "completion": 512, "vocabulary": 152_000, "top_p": 0.9},
]


def llama(seed: int, vocabulary: int) -> LlamaForCausalLM:
    """A model that is nearly all vocabulary."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def case(
    rows: int,
    completion: int,
    vocabulary: int,
    objective: str = "lk_hybrid",
    top_p: float = 1.0,
) -> dict[str, float]:
    """Take the loss of one batch and its gradients, after a small one."""
    torch.set_num_threads(1)
    data = [
        {"prompt_ids": [1, 2], "completion_ids": list(range(3, completion + 3))}
        for _ in range(rows)
    ]
    data += [{"prompt_ids": [1, 2], "completion_ids": [3]} for _ in range(rows)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = draft_trainer(
            llama(0, vocabulary),
            llama(1, vocabulary),
            Dataset.from_list(data),
            Path(folder),
            DistilConfig(batch_size=rows, epochs=1, objective=objective),
            SamplingConfig(top_p=top_p),
            seed=0,
        )
        collated = trainer.data_collator
        step(trainer, collated([dict(row) for row in data[rows:]]))
        return peak(lambda: step(trainer, collated([dict(row) for row in data[:rows]])))


def step(trainer: Any, batch: dict[str, torch.Tensor]) -> None:
    """The loss of a batch, and gradients added to those that are there."""
    count = (batch["labels"] != -100).sum()
    trainer.student.train()
    trainer.compute_loss(trainer.student, batch, num_items_in_batch=count).backward()


def main() -> None:
    """Run every case and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/distill_memory.json"))
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(case(**options.case)))
        return
    records = []
    for settings in CASES:
        command = [sys.executable, __file__, "--case", json.dumps(settings)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=os.environ)
        measured = json.loads(done.stdout)
        records.append({**settings, **measured, "met": measured["peak_mib"] <= BUDGET_MIB})
        print(
            f"{settings['rows']} x {settings['completion']} positions, V={settings['vocabulary']}, "
            f"{settings.get('objective', 'lk_hybrid')}, top_p={settings.get('top_p', 1.0)}: "
            f"{measured['peak_mib']:4.0f} MiB beside the models, {measured['seconds']:.1f} s; "
            f"budget of {BUDGET_MIB} MiB {'met' if records[-1]['met'] else 'MISSED'}"
        )
    environment = describe_environment(device="cpu", dtype="float32")
    write_json(
        options.out,
        {
            "schema_version": SCHEMA_VERSION,
            "environment": environment.model_dump(),
            "budget_mib": BUDGET_MIB,
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
