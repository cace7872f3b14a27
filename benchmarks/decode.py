"""Decoding speed against plain `generate` and transformers' assisted generation.

    python benchmarks/decode.py [--engine eager] [--prompts 4] [--repeats 2] [--out FILE]

Batch 1, temperature 1. All methods decode the same prompts with the same seeds, taking turns on
each prompt. A speed is tokens over seconds of all prompts, prompt processing included; intervals
are 95 % bootstraps over prompts. By default the pair is the demo's (`make demo` makes it; without
it, its first two stages are run).

With a GPU, `--shapes 7b` or `--shapes 1.1b` measures models of those shapes with a 68M draft in
bfloat16: random weights that agree as often as `--acceptance` says (`benchmarks/shaped_pair.py`),
against transformers' assisted generation and against the limit: tokens a round over the kernels'
time of its forwards, with nothing between them. `--shapes tiny` tries this on a CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedded import DEMO, make_demo
from rich.console import Console
from rich.table import Table
from shaped_pair import AGREEMENT, SHAPES, limits, prompts_of, shaped_pair
from torch import Tensor
from transformers import PreTrainedModel

from eval.decoder import DecodeConfig, Generation, SpeculativeDecoder
from eval.measuring.assisted import assisted_generate
from eval.measuring.environment import describe_environment
from eval.measuring.intervals import Interval, resamples
from eval.runtime.engines import ENGINES, Engine
from specdata.config import PromptSet
from specdata.generation import plain_generation
from specdata.models import load_model, load_tokenizer
from specdata.probability import SamplingConfig
from specdata.prompts.loading import load_prompts
from specdata.sampling import generator_for, seed_for
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
LENGTHS = (2, 4, 6, 8)

CHAINS = {f"K={length}": DecodeConfig(length=length) for length in LENGTHS}
OTHERS = {
    "block K=6": DecodeConfig(verifier="block", length=6),
    "block K=8": DecodeConfig(verifier="block", length=8),
    "block K=10": DecodeConfig(verifier="block", length=10),
    "block, cost rule": DecodeConfig(verifier="block", stop="cost"),
    "tree 2x1x1x1x1x1": DecodeConfig(
        verifier="traversal", drafter="tree", widths=(2, 1, 1, 1, 1, 1)
    ),
    "tree 2x2x1x1": DecodeConfig(verifier="traversal", drafter="tree", widths=(2, 2, 1, 1)),
}
# With --shapes.
SHAPE_LENGTHS, SHAPE_OTHERS = (4, 8), {"block K=8": OTHERS["block K=8"]}
Decode = Callable[[Tensor, int, str], Generation]
"""(prompt (T,), most new tokens, what seeds the draws) -> the generation."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The measurement and its prompts."""

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: Sequence[tuple[str, Tensor]]


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = _options()
    torch.set_num_threads(options.threads)
    console = Console(highlight=False, stderr=True)
    if options.shapes == "pair":
        pair = _load(options)
        methods = _methods(pair, options.engine, options.seed)
    else:
        target, draft = shaped_pair(options.shapes, options.acceptance, options.seed)
        prompts = prompts_of(target, options.seed)
        pair = Pair(f"{options.shapes} with random weights", target, draft, prompts)
        methods = _methods(pair, options.engine, options.seed, SHAPE_LENGTHS, SHAPE_OTHERS)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(
            device=str(pair.target.device), dtype=str(pair.target.dtype).removeprefix("torch.")
        ).model_dump(),
        "pair": pair.name,
        "engine": options.engine,
        "max_new_tokens": options.max_new_tokens,
        "prompts": len(pair.prompts),
        "repeats": options.repeats,
        "speeds": _speeds(pair, methods, options, console),
    }
    if options.shapes != "pair":
        report["agreement"] = {"how": AGREEMENT, "acceptance": options.acceptance}
        report["limit"] = _limit(pair, options)
        for name, row in report["limit"]["lengths"].items():
            # Tokens a second with nothing between forwards, and the share of it that was reached.
            speed = report["speeds"][name]
            row["tokens_per_second"] = 1e3 * speed["tokens_per_round"] / row["round_ms"]
            row["share"] = speed["tokens_per_second"]["value"] / row["tokens_per_second"]
    write_json(options.out, report)
    _show(report, Console(highlight=False, width=100))
    print(f"written: {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(DEMO / "pair" / "target"))
    parser.add_argument("--draft", default=str(DEMO / "draft" / "model"))
    parser.add_argument("--engine", choices=ENGINES, default="captured")
    parser.add_argument("--shapes", choices=("pair", *SHAPES), default="pair")
    parser.add_argument(
        "--acceptance", type=float, default=0.8, help="with --shapes: sum min(p, q) of the pair"
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each embedded set")
    parser.add_argument("--repeats", type=int, default=2, help="seeds of each prompt")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/decode.json"))
    options = parser.parse_args()
    if options.shapes not in ("pair", "tiny") and not torch.cuda.is_available():
        parser.error(f"--shapes {options.shapes} needs a GPU, and torch finds none: try tiny")
    return options


def _load(options: argparse.Namespace) -> Pair:
    if options.target.startswith(str(DEMO)) and not Path(options.draft).exists():
        make_demo()
    target, draft = load_model(options.target), load_model(options.draft)
    sets = [
        PromptSet(name=name, split="test", count=options.prompts)
        for name in ("instruct", "maths", "code")
    ]
    prompts = load_prompts(sets, load_tokenizer(options.target), seed=options.seed).prompts
    return Pair(
        f"{options.target} with {options.draft}",
        target,
        draft,
        [(prompt.example_id, torch.tensor(prompt.ids)) for prompt in prompts],
    )


def _methods(
    pair: Pair,
    engine: Engine,
    seed: int,
    lengths: Sequence[int] = LENGTHS,
    others: Mapping[str, DecodeConfig] | None = None,
) -> dict[str, Decode]:
    """Everything that is timed; the first is what speed-ups are over."""
    methods: dict[str, Decode] = {"generate": _plain(pair.target, seed)}
    methods["plain"] = _ours(pair.target, None, DecodeConfig(), engine, seed)
    for length in lengths:
        methods[f"K={length}"] = _ours(pair.target, pair.draft, CHAINS[f"K={length}"], engine, seed)
        methods[f"transformers K={length}"] = _assisted(pair, length, seed)
    for name, config in (OTHERS if others is None else others).items():
        methods[name] = _ours(pair.target, pair.draft, config, engine, seed)
    return methods


def _plain(target: PreTrainedModel, seed: int) -> Decode:
    """Transformers' `generate` without a draft."""

    def decode(prompt: Tensor, budget: int, name: str) -> Generation:
        ids = prompt.unsqueeze(0).to(target.device)
        torch.manual_seed(seed_for(seed, name))
        begun = time.perf_counter()
        mask = torch.ones_like(ids)
        with plain_generation(target, SamplingConfig(), max_new_tokens=budget) as config:
            sequence = target.generate(ids, attention_mask=mask, generation_config=config)
        tokens = sequence[0, len(prompt) :].cpu()
        return Generation(tokens, (), "length", time.perf_counter() - begun)

    return decode


def _assisted(pair: Pair, length: int, seed: int) -> Decode:
    return lambda prompt, budget, name: assisted_generate(
        pair.target,
        pair.draft,
        prompt,
        length=length,
        sampling=SamplingConfig(),
        max_new_tokens=budget,
        seed=seed_for(seed, name),
    )


def _ours(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    config: DecodeConfig,
    engine: Engine,
    seed: int,
) -> Decode:
    decoder = SpeculativeDecoder.from_config(target, draft, config, engine=engine)
    decoder.warm_up()
    return lambda prompt, budget, name: decoder.generate(
        prompt, max_new_tokens=budget, generator=generator_for(seed, name)
    )


def _speeds(
    pair: Pair, methods: Mapping[str, Decode], options: argparse.Namespace, console: Console
) -> dict[str, dict[str, Any]]:
    """Time every method on every prompt, in turns; the rows of the report."""
    for name, decode in methods.items():  # captures what is to be captured
        begun = time.perf_counter()
        for _, prompt in pair.prompts[:2]:
            decode(prompt, options.max_new_tokens, "warm-up")
        console.print(f"warm-up of {name}: {time.perf_counter() - begun:.1f} s")
    counts = {name: np.zeros((len(pair.prompts), 2)) for name in methods}
    rounds: dict[str, list[Any]] = {name: [] for name in methods}
    for repeat in range(options.repeats):
        for index, (key, prompt) in enumerate(pair.prompts):
            for name, decode in methods.items():
                out = decode(prompt, options.max_new_tokens, f"{key} {repeat}")
                counts[name][index] += len(out.tokens), out.seconds
                rounds[name] += out.rounds
    weights = resamples(len(pair.prompts))
    base = counts["generate"]
    speeds = {}
    for name, table in counts.items():
        speeds[name] = {
            "tokens_per_second": _interval(table, weights),
            "over_generate": _interval(table, weights, base),
            "tokens_per_round": sum(r.emitted for r in rounds[name]) / max(1, len(rounds[name])),
        } | {
            f"{part}_ms_per_round": 1e3
            * _mean([getattr(r, f"{part}_seconds") for r in rounds[name]])
            for part in ("draft", "target", "overhead")
        }
        if name.startswith("K="):
            other = counts.get(f"transformers {name}")
            if other is not None:
                speeds[name]["over_transformers"] = _interval(table, weights, other)
    fixed = max(
        (name for name in speeds if name.startswith("K=")),
        key=lambda name: speeds[name]["tokens_per_second"]["value"],
    )
    for name in speeds:
        speeds[name]["over_best_fixed"] = _interval(counts[name], weights, counts[fixed])
    return speeds


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _interval(sums: Any, weights: Any, base: Any = None) -> dict[str, float | None]:
    """Speed, or its ratio to another method's on the same prompts, with a bootstrap interval.

    Args:
        sums: (prompts, 2) tokens and seconds.
        weights: of `resamples`.
        base: the other method's sums.
    """
    speeds = np.divide(*(weights @ sums).T)
    if base is not None:
        speeds = speeds / np.divide(*(weights @ base).T)
    return Interval.of(speeds).stored()


def _limit(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """The time of a round's forwards without what lies between them."""
    context = len(pair.prompts[0][1]) + options.max_new_tokens // 2
    return {
        "of": "forwards one after the other, with the Python between their kernels",
        "context": context,
        "lengths": {
            f"K={length}": row
            for length, row in limits(
                (pair.target, pair.draft), options.engine, SHAPE_LENGTHS, context
            ).items()
        },
    }


def _show(report: Mapping[str, Any], console: Console) -> None:
    table = Table(title=f"{report['pair']}, engine {report['engine']}")
    columns = ("method", "tokens/s", "over generate", "over transformers", "over best K=",
               "tokens a round", "draft, target, rest: ms a round")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, row in report["speeds"].items():
        table.add_row(
            name,
            f"{row['tokens_per_second']['value']:.0f}",
            _shown(row["over_generate"]),
            _shown(row.get("over_transformers")),
            _shown(row["over_best_fixed"]),
            f"{row['tokens_per_round']:.2f}",
            ", ".join(
                f"{row[f'{part}_ms_per_round']:.2f}" for part in ("draft", "target", "overhead")
            ),
        )
    console.print(table)
    for name, row in report.get("limit", {}).get("lengths", {}).items():
        limit = row["tokens_per_second"]
        console.print(f"{name}: {100 * row['share']:.0f} % of the limit of {limit:.0f} tokens/s")


def _shown(interval: Mapping[str, float] | None) -> str:
    return "" if interval is None else Interval(**interval).within(2)


if __name__ == "__main__":
    main()
