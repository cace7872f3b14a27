"""Memory that does not grow with positions times vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM

from distill.config import DistilConfig
from tests.support.acceptance import labeller, rollout
from tests.support.tiny import tiny_llama
from tests.support.trainings import PLAIN, trainer_of


def models(vocabulary: int) -> list[LlamaForCausalLM]:
    """Two that are nearly all vocabulary."""
    made = [tiny_llama(seed, vocab=vocabulary).float() for seed in (0, 1)]
    for model in made:
        model.config.max_position_embeddings = 4096
    return made


def label(_folder: Path) -> float:
    """MiB of one row of 1536 tokens, V = 131072, keeping 8 logits."""
    target, draft = models(131072)
    work = labeller(target, draft, PLAIN)
    work([rollout(0, [1])])
    return peak(lambda: work([rollout(0, [*range(3, 1537)])]))


def distil(folder: Path) -> float:
    """MiB of the loss of 2 x 512 positions, V = 65536, and its gradients."""
    target, draft = models(65536)
    long, short = ([dict(rollout(0, [*range(3, 3 + size)]))] * 2 for size in (512, 1))
    rows, config = Dataset.from_list([*long, *short]), DistilConfig(batch_size=2, epochs=1)
    trainer = trainer_of(target, draft, rows, folder, config)

    def step(rows: list[dict[str, object]]) -> None:
        batch = trainer.data_collator([dict(each) for each in rows])
        trainer.model.train()
        count = (batch["labels"] != -100).sum()
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=count).backward()

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


def measured(work: Callable[[Path], float], folder: Path) -> None:
    """In a process of its own, so that the peak is of this alone."""
    torch.set_num_threads(1)
    (folder / "mib").write_text(str(work(folder)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("work", "mib"),
    [
        (label, 512),  # the logits of one model alone would be 768 MiB in float32
        (distil, 1536),  # all logits, and what autograd makes of them, would be 3.3 GiB
    ],
)
def test_memory_does_not_grow_with_positions_times_vocabulary(
    work: Callable[[Path], float], mib: int, tmp_path: Path, server: ForkServerContext
) -> None:
    process = server.Process(target=measured, args=(work, tmp_path))
    process.start()
    process.join()
    assert float((tmp_path / "mib").read_text()) < mib
