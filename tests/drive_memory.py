"""Labels or a step of distillation over a large vocabulary: MiB taken at most beyond the models.

Run as `python -m tests.drive_memory labels` or `distillation`, so that the peak is of this alone.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from distill.config import DistilConfig
from distill.trainer import draft_trainer
from specdata.labels.make import Labeller
from specdata.lm_head import find_lm_head
from specdata.sampling import SamplingConfig
from specdata.storage.schema import Rollout
from specdata.texts import ModelSource, tokens_at_once


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


def row(completion: int) -> Rollout:
    return Rollout(
        example_id="long",
        dataset="d",
        split="train",
        sample=0,
        turn=0,
        prompt_ids=[1, 2],
        completion_ids=list(range(3, 3 + completion)),
        finish="length",
    )


def labels() -> float:
    """One row of 1536 tokens, V = 131072, keeping 8 logits."""
    vocabulary, sampling = 131072, SamplingConfig()
    p, q = (find_lm_head(llama(seed, vocabulary)) for seed in (0, 1))
    label = Labeller(ModelSource(p, sampling), q, sampling, 0, tokens_at_once(p, q))
    label([row(1)])
    return peak(lambda: label([row(1534)]))


def distillation() -> float:
    """The loss of 2 x 512 positions, V = 65536, and its gradients."""
    long, short = ([dict(row(size))] * 2 for size in (512, 1))
    with tempfile.TemporaryDirectory() as folder:
        trainer = draft_trainer(
            llama(0, 65536),
            llama(1, 65536),
            Dataset.from_list([*long, *short]),
            Path(folder),
            DistilConfig(batch_size=2, epochs=1),
            SamplingConfig(),
            seed=0,
        )

        def step(rows: list[dict[str, object]]) -> None:
            batch = trainer.data_collator([dict(each) for each in rows])
            trainer.student.train()
            count = (batch["labels"] != -100).sum()
            trainer.compute_loss(trainer.student, batch, num_items_in_batch=count).backward()

        step(short)
        return peak(lambda: step(long))


def peak(work: Callable[[], object]) -> float:
    """MiB that Linux counts at most, beyond what was there before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    base = resident("VmRSS")
    work()
    return resident("VmHWM") - base


def resident(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(f"{globals()[sys.argv[1]]():.0f}\n")
