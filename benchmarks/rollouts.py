"""Speed of rollouts and labels on the embedded pair, and where the time of a real target goes.

    python benchmarks/rollouts.py [--out runs/bench/rollouts.json]
        [--parts speed processes accounting] [--target FOLDER] [--draft FOLDER] [--dtype bfloat16]

Speed: tokens/s of batched rollouts, of one-prompt-at-a-time `generate`, and of labels (completion
tokens only) made with both models and, with top_k 50, again from 64 kept target logits; each with
one and with two threads, of which the better counts. Processes: one and two that fill a dataset
together, a thread each. Metrics are medians over repetitions with their range; goals are printed
as met or missed.

Accounting, of `--target` and `--draft` or of random weights of a 135M Llama's shape: rollouts as a
share of the target's own forward of as many rows; labels as a share of forwards of 512 rows. The
figures of one line are taken in turn, and each is the least of the repetitions, so a busy machine
blurs ratios little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from embedded import BATCH, NEW_TOKENS, PLAIN, VOCABULARY, pair, requests, rolled_out, row
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eval.measuring.environment import describe_environment
from specdata.labels.config import LabelsConfig
from specdata.labels.labeller import (
    Labeller,
    kept_distributions,
    target_distributions,
    tokens_at_once,
)
from specdata.labels.make import make_labels
from specdata.labels.top_logits import TopLogitDistributions
from specdata.lm_head import find_lm_head
from specdata.models import DTYPES, device, load_model
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig, drawn_tokens
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.storage.dataset import fill_dataset
from specdata.storage.files import write_json
from specdata.storage.manifest import read_manifest
from specdata.storage.resume import Settings
from specdata.storage.schema import ROLLOUTS, Rollout

SCHEMA_VERSION = 1
PAIR = Path("runs/toy/pair")
TOP_K, KEPT = SamplingConfig(top_k=50), 64
# What is decoded: so many prompts in batches, and so many of them one at a time.
PROMPTS, ALONE = 128, 6
SHARD = 16  # prompts of one shard, where processes share the work
PARTS = ("speed", "processes", "accounting")
# Accounting: rows decoded together, tokens of a prompt and new ones, rollouts that are labelled.
BATCHES, PROMPT, NEW, LABELLED = (24, 64, 128), 90, 17, 8
LARGE = 512  # rows of the forward that labels and distillation are compared with
GOALS = {
    "rollouts_per_generate": 5.0,
    "labels_per_rollouts": 20.0,
    "two_processes": 1.7,
    "decode_share": 0.8,
}


def one_at_a_time(target: PreTrainedModel, asked: list[Request]) -> int:
    """Plain `generate`; returns the number of new tokens."""
    count = 0
    for request in asked:
        ids = torch.tensor([request.ids], device=target.device)
        generated = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=NEW_TOKENS,
        )
        count += generated.shape[1] - ids.shape[1]
    return count


def tokens_of(rows: Sequence[Rollout]) -> int:
    """Completion tokens."""
    return sum(len(row["completion_ids"]) for row in rows)


def measured(work: Callable[[], int], repeats: int) -> dict[str, float]:
    """Tokens/s of work that returns its number of tokens: median and range."""
    work()
    rates = []
    for _ in range(repeats):
        begun = time.perf_counter()
        count = work()
        rates.append(count / (time.perf_counter() - begun))
    return {"median": statistics.median(rates), "low": min(rates), "high": max(rates)}


def speed(folder: Path, repeats: int) -> dict[str, Any]:
    """Tokens/s of the three ways to use a target, and their ratios."""
    target, draft, name = pair(folder)
    asked = requests(folder, PROMPTS)
    rows = rolled_out(target, asked)
    ways: dict[str, Callable[[], int]] = {
        "generate": lambda: one_at_a_time(target, asked[:ALONE]),
        "rollouts": lambda: tokens_of(rolled_out(target, asked)),
        **labels(target, draft, rows),
    }
    rates: dict[str, Any] = {"pair": name, "completion_tokens": tokens_of(rows)}
    best = {}
    for way, work in ways.items():
        rates[way] = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rates[way][f"threads_{threads}"] = rate = measured(work, repeats)
            print(
                f"{way:>9}, threads {threads}: {rate['median']:7.0f} tokens/s"
                f" ({rate['low']:.0f} to {rate['high']:.0f})"
            )
        best[way] = max(rate["median"] for rate in rates[way].values())
    rates["rollouts_per_generate"] = best["rollouts"] / best["generate"]
    rates["labels_per_rollouts"] = best["labels"] / best["rollouts"]
    rates["relabels_per_rollouts"] = best["relabels"] / best["rollouts"]
    rates["labels_per_generate"] = best["labels"] / best["generate"]
    print(
        f"labels are {rates['labels_per_generate']:.1f} times generate; from kept logits "
        f"{rates['relabels_per_rollouts']:.1f} times rollouts"
    )
    # What no batching can exceed: the target's own multiplications, at the speed of a large one.
    rates["labels_ceiling"] = ceiling(target, rows)
    print(f"labels could at most reach {rates['labels_ceiling']:.0f} tokens/s on this processor")
    return rates


def labels(
    target: PreTrainedModel, draft: PreTrainedModel, rows: list[Rollout]
) -> dict[str, Callable[[], int]]:
    """Labelling with both models, and again with the draft alone from kept target logits."""
    p, q = find_lm_head(target), find_lm_head(draft)
    at_once = tokens_at_once(p, q)
    label = Labeller(partial(target_distributions, p, PLAIN, 0), q, p.vocabulary, PLAIN, 0, at_once)
    keep = Labeller(
        partial(target_distributions, p, TOP_K, KEPT), q, p.vocabulary, TOP_K, 0, at_once
    )
    kept = TopLogitDistributions(KEPT, p.vocabulary, TOP_K)
    again = Labeller(partial(kept_distributions, kept), q, p.vocabulary, TOP_K, 0, at_once)
    with_logits = keep(rows)
    return {
        "labels": lambda: tokens_of(label(rows)),
        "relabels": lambda: tokens_of(again(with_logits)),
    }


def ceiling(target: PreTrainedModel, rows: list[Rollout]) -> float:
    """Completion tokens/s if a label cost nothing but the target's matrix products."""
    square = torch.randn(2048, 2048, dtype=target.dtype, device=target.device)
    square @ square
    begun = time.perf_counter()
    for _ in range(5):
        square @ square
    if square.is_cuda:
        torch.cuda.synchronize()
    flops = 5 * 2 * 2048**3 / (time.perf_counter() - begun)
    # A token costs two operations a weight; the tied embedding is used as the output embedding.
    a_token = 2 * sum(weight.numel() for weight in target.parameters() if weight.dim() == 2)
    through = tokens_of(rows) + sum(len(row["prompt_ids"]) for row in rows)
    return flops / a_token * tokens_of(rows) / through


def processes(folder: Path, repeats: int) -> dict[str, Any]:
    """Tokens/s of rollouts and labels with one and two processes of a thread each."""
    rates: dict[str, Any] = {}
    for kind in ("rollouts", "labels"):
        medians = {}
        for count in (1, 2):
            runs = [together(folder, kind, count) for _ in range(repeats)]
            medians[count] = statistics.median(runs)
            rates[f"{kind}_{count}"] = {
                "median": medians[count],
                "low": min(runs),
                "high": max(runs),
            }
            print(f"{kind:>9}, processes {count}: {medians[count]:.0f} tokens/s")
        rates[kind] = medians[2] / medians[1]
    return rates


def together(folder: Path, kind: str, count: int) -> float:
    """Tokens/s of `count` processes that fill one dataset; loading the models is not counted."""
    with tempfile.TemporaryDirectory() as out:
        workers = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", kind, "--dataset", out, "--pair", folder],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(count)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]
        for worker in workers:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
        begun = time.perf_counter()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        tokens = [int(worker.stdout.readline()) for worker in workers if worker.stdout]
        seconds = time.perf_counter() - begun
        for worker in workers:
            worker.communicate()
        return tokens[0] / seconds


def worker(folder: Path, kind: str, out: Path) -> int:
    """Fill the dataset as one of the processes, after a line on stdin says so."""
    torch.set_num_threads(1)
    target, draft, _ = pair(folder)
    asked = requests(folder, 2 * PROMPTS)
    draw = torch.Generator().manual_seed(1)
    completions = torch.randint(3, VOCABULARY, (len(asked), 50), generator=draw).tolist()
    source = datasets.Dataset.from_list(list(map(row, asked, completions)))
    rolled_out(target, asked[:2])  # the first call of anything is slow
    print("ready", flush=True)
    sys.stdin.readline()
    if kind == "rollouts":
        starts = range(0, len(asked), SHARD)
        shards = [partial(rolled_out, target, asked[start : start + SHARD]) for start in starts]
        fill_dataset(out, ROLLOUTS, Settings({}), shards, lambda rows: None)
    else:
        make_labels(
            target,
            draft,
            source,
            out,
            LabelsConfig(shard_size=SHARD),
            sampling=PLAIN,
            seed=0,
            settings=Settings({}),
            report=lambda rows: None,
        )
    return int(read_manifest(out)["counts"]["tokens"])


def stand_in(layers: int, dtype: str) -> PreTrainedModel:
    """Random weights of a 135M Llama's shape, or of its first layers."""
    torch.manual_seed(layers)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()


def least(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each work, the least of the repetitions, which take turns."""
    seconds = dict.fromkeys(works, float("inf"))
    for _ in range(repeats + 1):  # the first is slow
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds


def accounting(
    target_folder: Path | None, draft_folder: Path | None, dtype: str, repeats: int
) -> dict[str, Any]:
    """Shares of the forwards that rollouts, labels and distillation cannot do without."""
    target, draft = (
        load_model(str(folder), dtype=dtype) if folder else stand_in(layers, dtype)
        for folder, layers in ((target_folder, 30), (draft_folder, 2))
    )
    target.generation_config.eos_token_id = None  # every row has as many tokens
    found: dict[str, Any] = {
        "target": str(target_folder or "random weights of a 135M Llama"),
        "draft": str(draft_folder or "random weights of its first two layers"),
        "dtype": dtype,
        "rollouts": [],
        "labels": [],
    }
    samplers = {"temperature .2, top_p .9": SamplingConfig(0.2, 0, 0.9), "temperature 1": PLAIN}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in BATCHES:
            for name, sampling in samplers.items():
                line = decoding(target, size, sampling, repeats)
                found["rollouts"].append({"threads": threads, "sampler": name, **line})
                print(
                    f"rollouts, threads {threads}, {size} rows, {name}: decoding "
                    f"{line['decode']:.0f} tokens/s, {line['share']:.0%} of the bare forward "
                    f"({line['bare']:.0f}), {line['share_of_prepacked']:.0%} of one with "
                    f"prepacked weights; sampling {line['sampling_share']:.0%} of a step"
                )
        line = labelling(target, draft, repeats)
        found["labels"].append({"threads": threads, **line})
        print(
            f"labels, threads {threads}: {line['tokens_read']:.0f} tokens/s read, "
            f"{line['share']:.0%} of forwards of {LARGE} rows by both models"
        )
    return found


@torch.inference_mode()
def decoding(
    target: PreTrainedModel, size: int, sampling: SamplingConfig, repeats: int
) -> dict[str, Any]:
    """Tokens/s of decoding a batch, the prompts' own time left out, and what bounds it."""
    vocabulary = target.config.get_text_config().vocab_size
    draw = torch.Generator().manual_seed(0)
    asked = [
        Request(torch.randint(3, vocabulary, (PROMPT - n % 20,), generator=draw).tolist(), (n,))
        for n in range(size)
    ]
    ids = torch.randint(3, vocabulary, (size, 1), generator=draw, device="cpu").to(target.device)
    logits = target(input_ids=ids, use_cache=False).logits[:, -1]
    uniforms = torch.rand(size, generator=draw, dtype=torch.float64).to(target.device)

    def bare() -> object:
        return target(input_ids=ids, use_cache=False).logits

    def packed() -> float:
        with prepacked(target):
            return least({"": bare}, 1)[""]

    backend = TransformersBackend(target, sampling, NEW, size, seed=0)
    prompts_read, steps = float("inf"), float("inf")

    def completed() -> None:
        """Decode the batch; the first token is drawn when all prompts have been read."""
        nonlocal prompts_read, steps
        ticks = [time.perf_counter()]
        backend.complete(asked, lambda _rows, _tokens: ticks.append(time.perf_counter()))
        prompts_read = min(prompts_read, ticks[1] - ticks[0])
        steps = min(steps, ticks[-1] - ticks[1])

    fast = min(packed() for _ in range(repeats))
    seconds = least(
        {
            "bare": bare,
            "decoding": completed,
            "sampling": lambda: drawn_tokens(logits, sampling, uniforms),
        },
        repeats,
    )
    step = steps / (NEW - 1)
    return {
        "rows": size,
        "bare": size / seconds["bare"],
        "bare_prepacked": size / fast,
        "decode": size / step,
        "prompts": sum(len(request.ids) for request in asked) / prompts_read,
        "share": seconds["bare"] / step,
        "share_of_prepacked": fast / step,
        "sampling_share": seconds["sampling"] / step,
    }


@torch.inference_mode()
def labelling(target: PreTrainedModel, draft: PreTrainedModel, repeats: int) -> dict[str, Any]:
    """Tokens/s that labelling reads, prompts included and padding not, and what bounds it."""
    p, q = find_lm_head(target), find_lm_head(draft)
    sampling = SamplingConfig(0.2, 0, 0.9)
    work = Labeller(
        partial(target_distributions, p, sampling, 0),
        q,
        p.vocabulary,
        sampling,
        0,
        tokens_at_once(p, q),
    )
    draw = torch.Generator().manual_seed(0)
    texts = [
        torch.randint(3, p.vocabulary, (2, PROMPT), generator=draw).tolist()
        for _ in range(LABELLED)
    ]
    rows = [row(Request(prompt, (n,)), text) for n, (prompt, text) in enumerate(texts)]
    ids = torch.randint(3, p.vocabulary, (1, LARGE), generator=draw).to(target.device)

    def labelled() -> None:
        with prepacked(target, draft):
            work(rows)

    seconds = least(
        {
            "target": lambda: target(input_ids=ids, use_cache=False),
            "draft": lambda: draft(input_ids=ids, use_cache=False),
            "labels": labelled,
        },
        repeats,
    )
    read = 2 * PROMPT * LABELLED
    return {
        "target_rate": LARGE / seconds["target"],
        "draft_rate": LARGE / seconds["draft"],
        "tokens_read": read / seconds["labels"],
        "share": read * (seconds["target"] + seconds["draft"]) / LARGE / seconds["labels"],
    }


def goals(record: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked for, what came, and whether that is met; parts that were left out are not."""
    cases = []
    if speeds := record.get("speed"):
        for name in ("rollouts_per_generate", "labels_per_rollouts"):
            cases.append((name, speeds[name], GOALS[name]))
    for kind in ("rollouts", "labels"):
        if scaling := record.get("processes"):
            cases.append((f"{kind}, two processes per one", scaling[kind], GOALS["two_processes"]))
    for line in record.get("accounting", {}).get("rollouts", ()):
        name = (
            f"decoding per bare forward of {line['rows']}, {line['sampler']}, "
            f"threads {line['threads']}"
        )
        cases.append((name, line["share"], GOALS["decode_share"]))
    return [
        {"name": name, "found": value, "goal": f"at least {goal:g}", "met": value >= goal}
        for name, value, goal in cases
    ]


def main() -> None:
    """Run the parts and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/rollouts.json"))
    parser.add_argument("--pair", type=Path, default=PAIR)
    parser.add_argument("--target", type=Path, help="a model's folder, for the accounting")
    parser.add_argument("--draft", type=Path, help="its draft's folder, for the accounting")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="for the accounting")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--dataset", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    if options.worker:
        print(worker(options.pair, options.worker, options.dataset), flush=True)
        return
    record: dict[str, Any] = {}
    if "speed" in options.parts:
        record["speed"] = speed(options.pair, options.repeats)
    if "processes" in options.parts:
        record["processes"] = processes(options.pair, options.repeats)
    if "accounting" in options.parts:
        record["accounting"] = accounting(
            options.target, options.draft, options.dtype, options.repeats
        )
    record["goals"] = goals(record)
    for entry in record["goals"]:
        mark = "met" if entry["met"] else "MISSED"
        print(f"goal {mark}: {entry['name']} {entry['found']:.2f}, {entry['goal']}")
    dtype = options.dtype if options.parts == ["accounting"] else "float32"
    environment = describe_environment(device=str(device()), dtype=dtype, batch_size=BATCH)
    record = {"schema_version": SCHEMA_VERSION, "environment": environment.model_dump(), **record}
    write_json(options.out, record)


if __name__ == "__main__":
    main()
