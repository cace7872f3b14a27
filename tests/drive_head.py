"""Train a head on a synthetic task; run by test_head_training.py in processes of its own.

    accelerate launch --cpu --num_processes 2 tests/drive_head.py --out FOLDER [--epochs 3 ...]

The draft is a tiny random Llama. A drafted token's acceptance is a function of the token alone,
which the draft's hidden state reveals, so a working head predicts it almost perfectly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from heads.config import HeadConfig
from heads.train import HeadResult, train_head
from specdata.sampling import SamplingConfig

VOCABULARY = 48
LEVELS = np.array([0.0, 0.3, 0.8, 1.0], dtype=np.float32)


def tiny_draft(seed: int = 0) -> LlamaForCausalLM:
    """A random Llama of 2 layers x 32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def synthetic_rows(count: int, seed: int, split: str = "train") -> datasets.Dataset:
    """Labelled rows in which token t is accepted with probability LEVELS[t % 4]."""
    generator = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        prompt, length = int(generator.integers(2, 6)), int(generator.integers(4, 14))
        drafted = generator.integers(1, VOCABULARY, length)
        rows.append(
            {
                "example_id": f"{split}-{number}",
                "sample": 0,
                "prompt_ids": generator.integers(1, VOCABULARY, prompt).tolist(),
                "completion_ids": generator.integers(1, VOCABULARY, length).tolist(),
                "draft_ids": drafted.tolist(),
                "accept_prob": LEVELS[drafted % 4].tolist(),
            }
        )
    return datasets.Dataset.from_list(rows)


def drive(out: Path, config: HeadConfig, rows: int = 50, seed: int = 7) -> HeadResult:
    """Train on the synthetic task."""
    return train_head(
        draft=tiny_draft(),
        train=synthetic_rows(rows, seed=1),
        dev=synthetic_rows(30, seed=2, split="dev"),
        out=out,
        config=config,
        seed=seed,
        sampling=SamplingConfig(top_k=50),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--save-steps", type=int, default=4)
    options = parser.parse_args()
    config = HeadConfig(
        depth=1,
        batch_size=16,
        learning_rate=3e-3,
        epochs=options.epochs,
        micro_batch_size=options.micro_batch_size,
        save_steps=options.save_steps,
    )
    drive(options.out, config, rows=options.rows)


if __name__ == "__main__":
    main()
