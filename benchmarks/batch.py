"""Decoding speed of batches: a shared verification budget against fixed lengths and own rules.

    python benchmarks/batch.py [--head FOLDER] [--sizes 1 4 8 16] [--repeats 2] [--out FILE]

Each repeat decodes a group of prompts of all three embedded domains with every method, in turns,
at each size of the batch. A speed is tokens over seconds of all repeats, prompt processing
included; `median`, `least` and `most` are over repeats, intervals 95 % bootstraps over them.
Seconds are those of the clock, or with `--clock cpu` those that this thread computed, which others
that use the machine disturb less. Rules have one logistic calibration, fitted on the dev labels of
`--labels`.

`own` are sequences that each stop for themselves: the best of several thresholds. `shared` are the
same estimates under one budget, whose costs are measured first. By default the pair is the demo's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from embedded import make_demo
from rich.console import Console
from rich.table import Table
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping.calibration import fit_calibration
from eval.measuring.environment import describe_environment
from eval.measuring.intervals import bootstrap_weights, interval
from eval.runtime.budget import CostTable
from heads import BaseHead
from specdata.models import load_model, load_tokenizer
from specdata.prompts.config import PromptSet
from specdata.prompts.loading import load_prompts
from specdata.seeds import generator_for
from specdata.storage.dataset import stream_stored
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
TOY = Path("runs/toy")
SETS = ("instruct", "maths", "code")
LENGTHS = (2, 3, 4, 6, 8)
THRESHOLDS = (0.4, 0.6, 0.8)
LABELS = 20_000  # enough for two coefficients
FAMILIES = {"fixed": "K=", "own": "own, ", "shared": "shared, "}
"""Family -> how the names of its methods begin."""

Decoders = dict[str, SpeculativeDecoder]


def main() -> None:
    """Measure, print, and write one JSON file."""
    options = _options()
    torch.set_num_threads(options.threads)
    if options.labels == TOY / "labels" and not (TOY / "labels").exists():
        make_demo("make_rollouts", "train_draft", "train_head")
    target, draft = load_model(options.target), load_model(options.draft)
    sets = [PromptSet(name, split="test", count=options.prompts) for name in SETS]
    prompts = load_prompts(sets, load_tokenizer(options.target), seed=options.seed).prompts
    by_domain = [[p for p in prompts if p.dataset.startswith(name)] for name in SETS]
    mixed = [prompt for group in zip(*by_domain, strict=True) for prompt in group]
    asked = [(prompt.example_id, torch.tensor(prompt.ids)) for prompt in mixed]
    head = BaseHead.from_pretrained(options.head) if options.head else None
    calibration = _calibration(options.labels)
    shared = DecodeConfig(
        verifier=options.verifier, stop="logit", budget="shared", calibration=calibration
    )
    measuring = SpeculativeDecoder.from_config(target, draft, shared)
    costs = {"logit": measuring.measure_costs(max(options.sizes))}
    if head is not None:
        asking = shared.replace(stop="cost", calibration=calibration)  # the head's estimates
        asker = SpeculativeDecoder.from_config(target, draft, asking, head)
        costs["head"] = asker.measure_costs(max(options.sizes))
    methods = _methods(target, draft, head, shared, costs)
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(
            device=str(target.device), dtype=str(target.dtype).removeprefix("torch.")
        ).model_dump(),
        "pair": f"{options.target} with {options.draft}",
        "head": options.head,
        "verifier": options.verifier,
        "clock": options.clock,
        "threads": options.threads,
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
        "calibration": calibration,
        "costs": {name: asdict(table) for name, table in costs.items()},
        "sizes": {},
    }
    for size in options.sizes:
        report["sizes"][str(size)] = _measure(methods, asked, size, options)
        write_json(options.out, report)  # what is measured stays if the rest is cut short
    _show(report, Console(highlight=False, width=120))
    print(f"written: {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default=str(TOY / "pair" / "target"))
    parser.add_argument("--draft", default=str(TOY / "draft" / "model"))
    parser.add_argument("--labels", type=Path, default=TOY / "labels")
    parser.add_argument("--head", help="an acceptance head of the draft")
    parser.add_argument("--verifier", default="block")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=16, help="prompts of each embedded set")
    parser.add_argument("--repeats", type=int, default=2, help="groups of prompts at each size")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/batch.json"))
    return parser.parse_args()


def _calibration(labels: Path) -> tuple[float, float]:
    """The logistic model of max q on held-out labels."""
    accept: list[float] = []
    log_q_max: list[float] = []
    for row in stream_stored(labels):
        if row["split"] == "dev" and len(accept) < LABELS:
            accept += row["accept_prob"]
            log_q_max += row["log_q_max"]
    q_max = np.exp(np.array(log_q_max)).clip(max=1.0)
    fitted = fit_calibration(np.array(accept).clip(0.0, 1.0), q_max)
    return fitted.intercept, fitted.slope


def _methods(
    target: Any,
    draft: Any,
    head: BaseHead | None,
    shared: DecodeConfig,
    costs: Mapping[str, CostTable],
) -> Decoders:
    """Everything that is timed."""

    def made(config: DecodeConfig, head: BaseHead | None = None, table: str = "") -> Any:
        with_costs = costs[table] if table else None
        return SpeculativeDecoder.from_config(target, draft, config, head, costs=with_costs)

    own = shared.replace(budget="own")
    methods: Decoders = {
        "plain": SpeculativeDecoder.from_config(target, None, DecodeConfig()),
        **{
            f"K={length}": made(DecodeConfig(verifier=shared.verifier, length=length))
            for length in LENGTHS
        },
        **{f"own, logit {h}": made(own.replace(threshold=h)) for h in THRESHOLDS},
        "shared, logit": made(shared, table="logit"),
    }
    if head is not None:
        asks = own.replace(stop="head")
        methods |= {f"own, head {h}": made(asks.replace(threshold=h), head) for h in THRESHOLDS}
        calibration = shared.model_dump()["calibration"]  # a rule begins with its own defaults
        asks = shared.replace(stop="cost", calibration=calibration)
        methods["shared, head"] = made(asks, head, "head")
    return methods


def _measure(
    methods: Decoders,
    asked: Sequence[tuple[str, Tensor]],
    size: int,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Time every method at one size of the batch: the rows of the report."""
    clock: Callable[[], float] = time.perf_counter if options.clock == "wall" else time.thread_time
    count = max(2 * size, 4)
    sums = {name: np.zeros((options.repeats, 2)) for name in methods}
    rounds: dict[str, list[Any]] = {name: [] for name in methods}
    names = list(methods)
    for repeat in range(options.repeats):
        group = [asked[(repeat * count + place) % len(asked)] for place in range(count)]
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            generators = [generator_for(options.seed, key, str(repeat)) for key, _ in group]
            begun = clock()
            outs = methods[name].generate_batch(
                [prompt for _, prompt in group],
                max_new_tokens=options.max_new_tokens,
                generators=generators,
                size=size,
            )
            sums[name][repeat] = sum(len(out.tokens) for out in outs), clock() - begun
            rounds[name] += [record for out in outs for record in out.rounds]
    weights = bootstrap_weights(options.repeats)
    rows = {
        name: _speed(sums[name], weights)
        | {
            f"{what}_per_round": sum(getattr(r, what) for r in rounds[name]) / len(rounds[name])
            for what in ("drafted", "emitted", "draft_forwards")
        }
        for name in methods
    }
    best = {
        family: max(
            (name for name in names if name.startswith(begins)),
            key=lambda name: rows[name]["value"],
        )
        for family, begins in FAMILIES.items()
    }
    return {
        "prompts": options.repeats * count,
        "methods": rows,
        "best": best,
        "over_best": {
            name: {
                family: _ratio(sums[name], sums[best[family]], weights)
                for family in ("fixed", "own")
            }
            for name in names
            if name.startswith(FAMILIES["shared"])
        },
    }


def _rate(sums: Any) -> Any:
    return sums[..., 0] / sums[..., 1]


def _speed(sums: Any, weights: Any) -> dict[str, float]:
    """Tokens a second of (repeats, 2) tokens and seconds, with its spread."""
    low, high = interval(_rate(weights @ sums))
    each = _rate(sums)
    return {
        "value": float(_rate(sums.sum(axis=0))),
        "low": low,
        "high": high,
        "median": float(np.median(each)),
        "least": float(each.min()),
        "most": float(each.max()),
    }


def _ratio(sums: Any, base: Any, weights: Any) -> dict[str, float]:
    """How many times as fast as another method on the same prompts."""
    low, high = interval(_rate(weights @ sums) / _rate(weights @ base))
    value = _rate(sums.sum(axis=0)) / _rate(base.sum(axis=0))
    return {"value": float(value), "low": low, "high": high}


def _show(report: Mapping[str, Any], console: Console) -> None:
    for size, measured in report["sizes"].items():
        table = Table("method", "tokens/s", "spread", "drafted", "emitted", title=f"batch {size}")
        for name, row in measured["methods"].items():
            mark = " *" if name in measured["best"].values() else ""
            table.add_row(
                name + mark,
                f"{row['value']:.0f}",
                f"{row['least']:.0f} to {row['most']:.0f}",
                f"{row['drafted_per_round']:.2f}",
                f"{row['emitted_per_round']:.2f}",
            )
        console.print(table)
        for name, ratios in measured["over_best"].items():
            for family, r in ratios.items():
                best = measured["best"][family]
                console.print(
                    f"{name} over the best {family} ({best}): "
                    f"{r['value']:.3f} [{r['low']:.3f}, {r['high']:.3f}]"
                )


if __name__ == "__main__":
    main()
