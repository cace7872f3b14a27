"""Where the time of rollouts and labels goes.

    python benchmarks/rollouts.py [--out runs/bench/rollouts.json]
        [--target FOLDER] [--draft FOLDER] [--dtype bfloat16]   # by default the demo's pair

Rollouts as a share of the target's own forward of as many rows; labels as a share of forwards of
512 rows. The figures of one line are taken in turn, and each is the least of the repetitions, so a
busy machine blurs ratios little.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from embedded import DEMO, make_demo
from transformers import PreTrainedModel

from eval.measuring.environment import describe_environment
from specdata.labels.make import Labeller
from specdata.lm_head import find_lm_head
from specdata.models import DTYPES, device, load_model
from specdata.prepack import prepacked
from specdata.probability import SamplingConfig, drawn_tokens
from specdata.rollouts.backend import Request, TransformersBackend
from specdata.storage.files import write_json
from specdata.storage.schema import Rollout
from specdata.texts import ModelSource, tokens_at_once

SCHEMA_VERSION = 1
# Rows decoded together, tokens of a prompt and new ones, rollouts that are labelled.
BATCHES, PROMPT, NEW, LABELLED = (24, 64, 128), 90, 17, 8
LARGE = 512  # rows of the forward that labels and distillation are compared with


def least(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of each work, the least of the repetitions, which take turns."""
    seconds = dict.fromkeys(works, float("inf"))
    for _ in range(repeats + 1):  # the first is slow
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds


def accounting(target_folder: str, draft_folder: str, dtype: str, repeats: int) -> dict[str, Any]:
    """Shares of the forwards that rollouts, labels and distillation cannot do without."""
    target, draft = (load_model(folder, dtype=dtype) for folder in (target_folder, draft_folder))
    target.generation_config.eos_token_id = None  # every row has as many tokens
    found: dict[str, Any] = {
        "target": target_folder,
        "draft": draft_folder,
        "dtype": dtype,
        "rollouts": [],
        "labels": [],
    }
    samplers = {
        "temperature .2, top_p .9": SamplingConfig(0.2, 0, 0.9),
        "temperature 1": SamplingConfig(),
    }
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
    rows = [
        Rollout(
            example_id=f"{n}",
            dataset="bench",
            split="train",
            sample=0,
            turn=0,
            prompt_ids=prompt,
            completion_ids=text,
            finish="length",
        )
        for n, (prompt, text) in enumerate(texts)
    ]
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
    """Measure, print and write one JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(DEMO / "pair" / "target"))
    parser.add_argument("--draft", default=str(DEMO / "draft" / "model"))
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/rollouts.json"))
    options = parser.parse_args()
    if options.target.startswith(str(DEMO)) and not Path(options.draft).exists():
        make_demo()
    transformers.logging.disable_progress_bar()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a line when it is measured
    found = accounting(options.target, options.draft, options.dtype, options.repeats)
    environment = describe_environment(device=str(device()), dtype=options.dtype)
    record = {"schema_version": SCHEMA_VERSION, "environment": environment.model_dump()}
    write_json(options.out, record | {"accounting": found})


if __name__ == "__main__":
    main()
