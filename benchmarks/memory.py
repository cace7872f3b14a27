"""Memory that `--plan` foretells, beside what a process is measured to hold.

    python benchmarks/memory.py [--out docs/memory.json]

At each size a pair of random weights is made; then rollouts and distillation run in processes of
their own. Read is the most that the GPU's allocator held or, without a GPU, the most resident
memory beyond what was there after the imports (`/proc/self/status`, VmHWM). glibc gives large
tensors back at once there; recipes have it keep what is freed (`keep_freed_memory`), for speed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from distill.distillation import distil
from distill.toy import save_tokenizer, train_tokenizer
from distill.training import save_model
from eval.measuring.environment import describe_environment
from recipes.config import PipelineConfig, build
from recipes.memory import Engine, Planned
from specdata.models import device, load_model
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.storage.files import write_json
from specdata.toy.corpus import corpus

PROMPT, NEW, ROWS, STEPS = 64, 128, 8, 2


@dataclass(frozen=True)
class Size:
    """A target; its draft is made of its first two layers."""

    layers: int
    width: int
    vocabulary: int


SIZES = {
    "small": Size(8, 512, 8192),
    "medium": Size(12, 768, 16384),
    "large": Size(16, 1024, 32768),
}


def make(folder: Path, size: Size) -> None:
    """Write target and draft."""
    texts = corpus(seed=0, examples_per_family=20, library_characters=2_000)
    tokenizer = train_tokenizer(texts, 320)
    for name, layers in (("target", size.layers), ("draft", 2)):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=size.vocabulary,
                hidden_size=size.width,
                intermediate_size=3 * size.width,
                num_hidden_layers=layers,
                num_attention_heads=size.width // 64,
                num_key_value_heads=size.width // 128,
                max_position_embeddings=1024,
                tie_word_embeddings=False,
                eos_token_id=None,
            )
        )
        save_model(model, folder / name)
        save_tokenizer(tokenizer, folder / name)


def settings(folder: Path) -> PipelineConfig:
    """A run of the pair."""
    sets = [{"name": "instruct", "split": each, "count": 4} for each in ("train", "dev")]
    return build(
        {
            "output": str(folder / "run"),
            "models": {"target": str(folder / "target"), "draft": str(folder / "draft")},
            "rollouts": {"sets": sets, "max_new_tokens": NEW, "batch_size": 64},
            "draft": {"epochs": 1, "batch_size": ROWS, "max_length": PROMPT + NEW, "report_to": []},
            "eval": {"sets": sets, "methods": [{"name": "plain", "decoder": "plain"}]},
        }
    )


def work(folder: Path, stage: str) -> None:
    """Do what a stage does with its models."""
    config = settings(folder)
    if stage == "rollouts":
        backend = TransformersBackend(
            load_model(config.models.target), config.sampling, NEW, config.rollouts.batch_size, 0
        )
        backend.complete([Request([row + 3] * PROMPT, ("a", row)) for row in range(64)])
        return
    assert config.draft is not None
    rows = Dataset.from_list(
        [
            {"prompt_ids": [row % 200 + 3] * PROMPT, "completion_ids": [row % 100 + 5] * NEW}
            for row in range(ROWS * STEPS)
        ]
    )
    distil(
        target=config.models.target,
        draft=str(config.models.draft),
        train=rows,
        dev=rows.select(range(ROWS)),
        out=folder / "distilled",
        config=config.draft,
        sampling=config.sampling,
        seed=0,
    )


def resident(name: str) -> int:
    """Bytes that Linux says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(folder: Path, stage: str) -> int:
    """The most bytes of a process that does a stage, on a CPU beyond what it has imported."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--work", str(folder), stage],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def planned(folder: Path) -> dict[str, int]:
    """The same, foretold."""
    config = settings(folder)
    plan = Planned(config, Engine(1), device().type)
    stages = {name: plan.of(name) for name in ("rollouts", "draft")}
    return {name: memory.total for name, memory in stages.items() if memory}


def compare(name: str, folder: Path) -> list[dict[str, Any]]:
    """Both, of each stage."""
    make(folder, SIZES[name])
    foretold = planned(folder)
    return [
        {"size": name, "stage": stage, "planned": expected, "measured": measured(folder, stage)}
        for stage, expected in foretold.items()
    ]


def main() -> None:
    """Measure all sizes, or do one stage's work and print its bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.work:
        base = resident("VmRSS")
        work(Path(given.work[0]), given.work[1])
        used = torch.cuda.max_memory_allocated() or resident("VmHWM") - base
        print(used)
        return
    rows: list[dict[str, Any]] = []
    for name in given.sizes:
        with tempfile.TemporaryDirectory() as folder:
            rows += compare(name, Path(folder))
        for row in rows[-2:]:
            print(
                json.dumps({**row, "ratio": round(row["planned"] / row["measured"], 3)}), flush=True
            )
    if given.out:
        where = describe_environment(device=str(device()), dtype="float32").model_dump(mode="json")
        write_json(given.out, {"environment": where, "rows": rows})


if __name__ == "__main__":
    main()
