"""Speed of rollouts and labels on the embedded pair, and where the time of a real target goes.

    python benchmarks/rollouts.py [--out runs/bench/rollouts.json]
        [--parts speed accounting] [--target FOLDER] [--draft FOLDER] [--dtype bfloat16]

Speed: tokens/s of batched rollouts, of one-prompt-at-a-time `generate`, and of labels (completion
tokens only) made with both models and, with top_k 50, again from 64 top target logits; each with
one and with two threads, of which the better counts. Metrics are medians over repetitions with
their range.

Accounting, of `--target` and `--draft` or of random weights of a 135M Llama's shape: rollouts as a
share of the target's own forward of as many rows; labels as a share of forwards of 512 rows. The
figures of one line are taken in turn, and each is the least of the repetitions, so a busy machine
blurs ratios little.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from embedded import BATCH, DEMO, NEW_TOKENS, PLAIN, pair, requests, rolled_out, row
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from eval.measuring.environment import describe_environment
from specdata.generation import plain_generation
from specdata.labels.make import Labeller
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.models import DTYPES, device, load_model
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig, drawn_tokens
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.storage.files import write_json
from specdata.storage.schema import Rollout
from specdata.texts import ModelSource, TopLogitSource, tokens_at_once
from specdata.top_logits import TopLogitDistributions

SCHEMA_VERSION = 1
PAIR = DEMO / "pair"
TOP_K, TOP_N = SamplingConfig(top_k=50), 64
# What is decoded: so many prompts in batches, and so many of them one at a time.
PROMPTS, ALONE = 128, 6
PARTS = ("speed", "accounting")
# Accounting: rows decoded together, tokens of a prompt and new ones, rollouts that are labelled.
BATCHES, PROMPT, NEW, LABELLED = (24, 64, 128), 90, 17, 8
LARGE = 512  # rows of the forward that labels and distillation are compared with


def one_at_a_time(target: PreTrainedModel, asked: list[Request]) -> int:
    """Plain `generate`; returns the number of new tokens."""
    count = 0
    for request in asked:
        ids = torch.tensor([request.ids], device=target.device)
        mask = torch.ones_like(ids)
        with plain_generation(target, SamplingConfig(), max_new_tokens=NEW_TOKENS) as config:
            generated = target.generate(ids, attention_mask=mask, generation_config=config)
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
        f"labels are {rates['labels_per_generate']:.1f} times generate; from top logits "
        f"{rates['relabels_per_rollouts']:.1f} times rollouts"
    )
    # What no batching can exceed: the target's own multiplications, at the speed of a large one.
    rates["labels_ceiling"] = ceiling(target, rows)
    print(f"labels could at most reach {rates['labels_ceiling']:.0f} tokens/s on this processor")
    return rates


def labels(
    target: PreTrainedModel, draft: PreTrainedModel, rows: list[Rollout]
) -> dict[str, Callable[[], int]]:
    """Labelling with both models, and again with the draft alone from top target logits."""
    p, q = find_lm_head(target), find_lm_head(draft)
    at_once = tokens_at_once(p, q)
    label = Labeller(ModelSource(p, PLAIN), q, PLAIN, 0, at_once)
    source = TopLogitSource(TopLogitDistributions(TOP_N, p.vocabulary, TOP_K))
    again = Labeller(source, q, TOP_K, 0, at_once)
    with_logits = cast(list[Rollout], ModelLogits(p, TOP_N)(rows))
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
        ModelSource(p, sampling),
        q,
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
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a line when it is measured
    record: dict[str, Any] = {}
    if "speed" in options.parts:
        record["speed"] = speed(options.pair, options.repeats)
    if "accounting" in options.parts:
        record["accounting"] = accounting(
            options.target, options.draft, options.dtype, options.repeats
        )
    dtype = options.dtype if options.parts == ["accounting"] else "float32"
    environment = describe_environment(device=str(device()), dtype=dtype, batch_size=BATCH)
    record = {"schema_version": SCHEMA_VERSION, "environment": environment.model_dump(), **record}
    write_json(options.out, record)


if __name__ == "__main__":
    main()
