"""A synthetic task for heads.

The draft is a tiny random Llama. A drafted token's acceptance is a function of the token alone,
which the draft's hidden state reveals, and its overlap one of the target's token before it, so a
working head predicts both almost perfectly.
"""

from pathlib import Path

import datasets
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from heads.config import HeadConfig
from heads.train import HeadResult, train_head
from specdata.sampling import SamplingConfig

VOCABULARY = 48
LEVELS = np.array([0.0, 0.3, 0.8, 1.0], dtype=np.float32)


def tiny_draft(seed: int = 0, context: int = 128) -> LlamaForCausalLM:
    """A random Llama of 2 layers x 32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=context,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def synthetic_rows(count: int, seed: int, split: str = "train", draws: int = 1) -> datasets.Dataset:
    """Labelled rows: token t is accepted with probability LEVELS[t % 4]; after t, that is overlap.

    With several draws, so are the others; rows of one draw hold none.
    """
    generator, more = np.random.default_rng(seed), np.random.default_rng([seed, 1])
    rows = []
    for number in range(count):
        prompt, length = int(generator.integers(2, 6)), int(generator.integers(4, 14))
        drafted = generator.integers(1, VOCABULARY, length)
        prompt_ids = generator.integers(1, VOCABULARY, prompt)
        completion_ids = generator.integers(1, VOCABULARY, length)
        before = np.concatenate([prompt_ids, completion_ids])[prompt - 1 : -1]
        others = more.integers(1, VOCABULARY, length * (draws - 1))
        rows.append(
            {
                "example_id": f"{split}-{number}",
                "sample": 0,
                "prompt_ids": prompt_ids.tolist(),
                "completion_ids": completion_ids.tolist(),
                "draft_ids": drafted.tolist(),
                "accept_prob": LEVELS[drafted % 4].tolist(),
                "overlap": LEVELS[before % 4].tolist(),
                "more_draft_ids": others.tolist(),
                "more_accept_prob": LEVELS[others % 4].tolist(),
            }
        )
    return datasets.Dataset.from_list(rows)


def drive(
    out: Path, config: HeadConfig, rows: int = 50, seed: int = 7, draws: int = 1, context: int = 128
) -> HeadResult:
    """Train on the synthetic task."""
    return train_head(
        draft=tiny_draft(context=context),
        train=synthetic_rows(rows, seed=1, draws=draws),
        dev=synthetic_rows(30, seed=2, split="dev"),
        out=out,
        config=config,
        seed=seed,
        sampling=SamplingConfig(top_k=50),
    )
