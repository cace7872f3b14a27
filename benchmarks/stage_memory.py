"""Peak memory of each stage of a run, beside what `--plan` says of it.

    python benchmarks/stage_memory.py [--out runs/bench/stage_memory.json] [--stages rollouts ...]

Each stage runs in a process of its own, on random weights over a large vocabulary. What libraries
take (some 700 MiB) is not counted: the stage is first run on a tiny pair, then Linux counts. In
several processes, where an engine cannot be made twice, what it touches first is counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from peak_memory import peak
from transformers import LlamaConfig, LlamaForCausalLM

from eval.measuring.environment import describe_environment
from recipes.config import PipelineConfig, build
from recipes.memory import WITHIN, memory_of
from recipes.run import prepare_libraries, run_stage
from specdata.processes import join_processes, leave_processes, process_count
from specdata.storage.files import write_json
from specdata.toy.corpus import corpus
from specdata.toy.tokenizer import save_tokenizer, train_tokenizer

SCHEMA_VERSION = 1
MODELS = ("target", "draft")
POSITIONS = 512
# Vocabulary; layers, width and width inside of the two models.
LARGE = (16384, (4, 640, 1792), (2, 256, 704))
TINY = (512, (2, 64, 128), (1, 64, 128))
Sizes = tuple[int, tuple[int, int, int], tuple[int, int, int]]
# Stage -> the recipe that makes it.
RECIPES = {
    "rollouts": "make_rollouts",
    "draft": "train_draft",
    "labels": "train_head",
    "head": "train_head",
    "eval": "run_eval",
}


def configuration(folder: Path, *, shard_teacher: bool = False) -> PipelineConfig:
    """A run with every stage, small in time."""
    counts = {"train": 24, "dev": 8}
    sets = [{"name": "instruct", "split": each, "count": counts[each]} for each in counts]
    methods = [{"name": "plain", "decoder": "plain"}, {"name": "K=3", "length": 3}]
    return build(
        {
            "output": str(folder / "run"),
            "models": {"target": str(folder / "target"), "draft": str(folder / "draft")},
            "rollouts": {"sets": sets, "max_new_tokens": 64, "batch_size": 24, "shard_size": 24},
            "draft": {
                "epochs": 1,
                "batch_size": 8,
                "report_to": [],
                "shard_teacher": shard_teacher,
            },
            "labels": {"draws": 2},
            "head": {"kind": "immediate", "epochs": 1, "features": ["hidden_before", "entropy"]},
            "eval": {
                "max_new_tokens": 8,
                "engine": "captured",
                "sets": [{"name": "instruct", "split": "test", "count": 1}],
                "methods": methods,
            },
        }
    )


def make_pair(folder: Path, vocabulary: int, *sizes: tuple[int, int, int]) -> None:
    """Random weights of both models, with one tokenizer."""
    texts = corpus(seed=0, examples_per_family=20, library_characters=2_000)
    tokenizer = train_tokenizer(texts, 320)
    transformers.logging.disable_progress_bar()
    for seed, (name, (layers, width, inner)) in enumerate(zip(MODELS, sizes, strict=True)):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=POSITIONS,
            tie_word_embeddings=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        save_tokenizer(tokenizer, folder / name)


def make(folder: Path, stage: str, *, shard_teacher: bool = False) -> None:
    """Make one stage of a run."""
    config = configuration(folder, shard_teacher=shard_teacher)
    recipe = import_module(f"recipes.{RECIPES[stage]}")
    if stage == "labels":  # the recipe would go on to the head
        labels, _ = recipe.stages(config)
        run_stage(labels, config, lambda: recipe._label(config, labels))
    else:
        recipe.main(config)


def case(folder: Path, stage: str, *, shard_teacher: bool) -> dict[str, Any]:
    """Make one stage of both runs in this process: MiB as planned and as measured."""
    torch.set_num_threads(1)
    planned = memory_of(stage, configuration(folder / "large", shard_teacher=shard_teacher))
    assert planned is not None
    if process_count() == 1:
        make(folder / "tiny", stage)
        gc.collect()
    else:  # an engine of DeepSpeed cannot be made twice
        prepare_libraries()
        join_processes()
        import_module("distill.distillation")
    measured = peak(lambda: make(folder / "large", stage, shard_teacher=shard_teacher))
    parts = {name: size / 2**20 for name, size in planned.parts.items()}
    return {"stage": stage, "planned_mib": sum(parts.values()), "parts_mib": parts, **measured}


def main() -> None:
    """Run the stages in order and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/stage_memory.json"))
    parser.add_argument("--stages", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--folder", type=Path, help="keep the run there, to go on with it")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--shard-teacher", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        found = case(options.folder, options.case, shard_teacher=options.shard_teacher)
        # One write, so that lines of several processes stay apart.
        sys.stdout.write(f"case {json.dumps(found)}\n")
        sys.stdout.flush()
        leave_processes()
        return
    with tempfile.TemporaryDirectory() as temporary:
        records = measure(options.folder or Path(temporary), options.stages)
    environment = describe_environment(device="cpu", dtype="float32")
    write_json(
        options.out,
        {
            "schema_version": SCHEMA_VERSION,
            "environment": environment.model_dump(),
            "within": WITHIN,
            "records": records,
        },
    )


def measure(
    folder: Path, stages: Sequence[str], large: Sizes = LARGE, tiny: Sizes = TINY
) -> list[dict[str, Any]]:
    """Each stage in a process of its own."""
    for name, sizes in (("large", large), ("tiny", tiny)):
        if not (folder / name).exists():
            make_pair(folder / name, *sizes)
    records = []
    for stage in stages:
        (record,) = cases(folder, stage, [sys.executable])
        records.append(record)
        print(
            f"{stage:<9} planned {record['planned_mib']:5.0f} MiB, measured "
            f"{record['peak_mib']:5.0f} MiB; within {WITHIN:g}x: "
            f"{'met' if record['met'] else 'MISSED'}",
            flush=True,
        )
    return records


def cases(
    folder: Path, stage: str, launcher: Sequence[str], *, shard_teacher: bool = False
) -> list[dict[str, Any]]:
    """One stage in the processes of a launcher: a record of each."""
    command = [*launcher, __file__, "--case", stage, "--folder", str(folder)]
    done = subprocess.run(
        [*command, *(["--shard-teacher"] if shard_teacher else [])],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"error: {stage} ended with {done.returncode}: {done.stderr[-8000:]}")
    said = [line.removeprefix("case ") for line in done.stdout.splitlines() if "case {" in line]
    records = [json.loads(line) for line in said]
    for record in records:
        record["met"] = 1 / WITHIN <= record["planned_mib"] / record["peak_mib"] <= WITHIN
    return records


if __name__ == "__main__":
    main()
