"""Savings by acceptance heads on the embedded pair, by exact expectation.

    python -m benchmarks.head_figures [--run runs/heads] [--parts goals ablation kinds] [--out FILE]

Trains heads on labelled rollouts of the three embedded domains and replays them on held-out ones:
against the best fixed draft length and every rule without training, with every threshold chosen on
dev rows and judged on test rows. Intervals are 95 % bootstraps over prompts, with the same
resamples for every comparison.

`goals` trains the shipped head on all three domains and on instructions alone; `ablation` drops one
ingredient at a time; `kinds` compares how well heads of every kind, max q and the margin predict
acceptance. What is missing is made: the pair and the draft (`--pair`, `--draft`; by default those
of recipes/configs/toy-full.yaml), then rollouts, labels and heads in `--run`. Whatever is finished
there is used again, so a killed benchmark goes on; parts that are not asked for stay in FILE as
they are.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.head_figures.data import (
    DEMO_PAIR,
    DOMAINS,
    MAX_NEW_TOKENS,
    SEED,
    Data,
    of_domains,
    prepare,
    train_shipped,
)
from benchmarks.head_figures.replay import (
    FEW,
    Recorded,
    Replayed,
    best_length,
    every_rule,
    of_rules,
    together,
    with_head,
)
from benchmarks.head_figures.variants import (
    ABLATION,
    ALONE,
    FULL,
    KINDS,
    PUBLISHED,
    Variant,
    trained,
)
from benchmarks.papers.replay import Times, saving
from eval.measuring.environment import describe_environment
from heads import BaseHead
from heads.loss import head_metrics, soft_auroc
from recipes.run import prepare_libraries
from specdata.draft_models.depths import depths_of
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
PARTS = ("goals", "ablation", "kinds")
Judged = Mapping[str, tuple[Recorded, Recorded]]
"""Domain -> its dev and test rows."""


def main() -> None:
    """Train, replay, print, and write one JSON file."""
    options = _options()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    prepare_libraries()
    console = Console(highlight=False, stderr=True)
    data = prepare(
        run=options.run,
        pair=options.pair,
        draft=options.draft,
        counts={
            "train": dict(zip(DOMAINS, options.train, strict=True)),
            "dev": dict.fromkeys(DOMAINS, options.dev),
            "test": dict.fromkeys(DOMAINS, options.test),
        },
        draws=options.draws,
        greedy=options.greedy,
        head=FULL.config(options.epochs),
    )
    times = Times(options.draft_seconds, options.target_seconds)
    judged = {
        domain: tuple(
            Recorded.of(data, of_domains(rows, {domain: len(rows)}))
            for rows in (data.dev, data.test)
        )
        for domain in DOMAINS
    }
    report = _begun(options, data)
    parts = {
        "goals": lambda: _goals_part(data, judged, times, options),
        "ablation": lambda: _ablation_part(data, judged, times, options, console),
        "kinds": lambda: _kinds_part(data, judged, options),
    }
    for part, measure in parts.items():
        if part in options.parts:
            made = report["environment"]
            report["made"][part] = {key: made[key] for key in ("git_commit", "git_dirty", "date")}
            for grown in measure():  # kept at each step, so that a killed run loses little
                report |= grown
                write_json(options.out, report)
    _show(report, Console(highlight=False, width=110))
    print(f"written: {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--run", type=Path, default=Path("runs/heads"), help="what is made")
    parser.add_argument("--pair", type=Path, default=DEMO_PAIR, help="holds the target")
    parser.add_argument(
        "--draft", type=Path, default=DEMO_PAIR.parent / "draft" / "model", help="the draft"
    )
    parser.add_argument(
        "--train",
        type=int,
        nargs=len(DOMAINS),
        default=(6144, 2048, 2048),
        metavar="N",
        help=f"training rollouts of {', '.join(DOMAINS)} (default: %(default)s)",
    )
    parser.add_argument("--dev", type=int, default=256, help="dev rollouts of each domain")
    parser.add_argument("--test", type=int, default=512, help="test rollouts of each domain")
    parser.add_argument("--draws", type=int, default=6, help="labelled draws of each position")
    parser.add_argument("--greedy", action="store_true", help="label likeliest tokens, as engines")
    parser.add_argument("--epochs", type=int, help="passes of each head (default: the recipe's)")
    parser.add_argument("--small", type=int, default=512, help="rollouts a domain of the ablation")
    parser.add_argument("--passes", type=int, default=3, help="of the ablation's training")
    parser.add_argument("--seeds", type=int, default=2, help="of each head of the ablation")
    parser.add_argument("--draft-seconds", type=float, default=0.182, help="t_d over t_t, assumed")
    parser.add_argument("--target-seconds", type=float, default=1.0, help="t_t")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/heads.json"))
    return parser.parse_args()


def _begun(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """The report with the parts that it holds already, if they are of the same settings."""
    about = _about(options, data)
    if options.out.is_file():
        stored = json.loads(options.out.read_text("utf-8"))
        if all(stored.get(key) == about[key] for key in about if key != "environment"):
            return {**stored, **about}
    return {**about, "made": {}}


def _about(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """The settings of a comparison, and the machine."""
    return {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(device="cpu", dtype="float32").model_dump(),
        "settings": {
            "train": dict(zip(DOMAINS, options.train, strict=True)),
            "dev": options.dev,
            "test": options.test,
            "draws": options.draws,
            "greedy": options.greedy,
            "ablation_rollouts": options.small,
            "ablation_passes": options.passes,
            "seeds": options.seeds,
            "head": FULL.config(options.epochs).model_dump(mode="json"),
            "sampling": asdict(data.sampling),
            "max_new_tokens": MAX_NEW_TOKENS,
        },
        "draft_seconds": options.draft_seconds,
        "target_seconds": options.target_seconds,
        "how": "replay by exact expectation; thresholds chosen on the domain's dev rows, judged on "
        "its test rows; the best fixed length is the best on the test rows themselves; intervals "
        "are 95 % bootstraps over prompts with common resamples",
    }


def _goals_part(
    data: Data, judged: Judged, times: Times, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The shipped head, the one of instructions alone and every rule."""
    train = dict(zip(DOMAINS, options.train, strict=True))
    heads = {"head": train_shipped(data)} | {
        variant.name: trained(
            variant, data, train, passes=options.epochs, seed=SEED, name=variant.name
        )
        for variant in (ALONE, PUBLISHED)
    }
    domains = {domain: _domain(dev, test, heads, times) for domain, (dev, test) in judged.items()}
    yield {"domains": domains}


def _domain(
    dev: Recorded, test: Recorded, heads: Mapping[str, BaseHead], times: Times
) -> dict[str, Any]:
    """All figures of one domain."""
    shipped = heads["head"]
    rules = every_rule(dev.with_head(shipped), test.with_head(shipped), times)
    for name, head in heads.items():
        if head is not shipped:
            rules[name] = with_head(head, dev, test, times)
    fixed = rules["fixed"]
    ours = rules["head"].counts
    return {
        "prompts": len(set(test.prompts)),
        "tokens": len(test.accept),
        "acceptance": test.traces.mean_accept(),
        "best_k": int(fixed.setting),
        "saving_over_best_k": asdict(saving(ours, fixed.counts, times)),
        f"saving_over_{PUBLISHED.name}": asdict(saving(ours, rules[PUBLISHED.name].counts, times)),
        "auroc": asdict(test.auroc(test.logits(shipped))),
        "auroc_of": {
            **{name: asdict(test.auroc(test.logits(head))) for name, head in heads.items()},
            "q": asdict(test.auroc(test.line(test.traces.tokens.q))),
        },
        "rules": of_rules(rules, fixed.counts, times),
    }


def _small(
    variant: Variant,
    rollouts: int,
    passes: int | None,
    data: Data,
    judged: Judged,
    times: Times,
    seeds: int,
) -> dict[str, tuple[list[Replayed], list[float]]]:
    """Domain -> replayed rule and AUROC of each seed, for a head of so many rollouts a domain."""
    found: dict[str, tuple[list[Replayed], list[float]]] = {d: ([], []) for d in DOMAINS}
    for seed in range(seeds):
        counts, name = dict.fromkeys(DOMAINS, rollouts), f"{variant.name}, {rollouts}"
        head = trained(
            variant, data, counts, passes=passes, seed=seed, name=f"{name}, {passes}, seed {seed}"
        )
        of_seed = _judged(head, judged, times)
        for domain, (rules, areas) in of_seed.items():
            found[domain][0].extend(rules)
            found[domain][1].extend(areas)
    return found


def _judged(
    head: BaseHead, judged: Judged, times: Times
) -> dict[str, tuple[list[Replayed], list[float]]]:
    """Domain -> the head's rule replayed, and its AUROC."""
    found = {}
    for domain, (dev, test) in judged.items():
        area = soft_auroc(test.logits(head), test.accept)
        assert area is not None
        found[domain] = [with_head(head, dev, test, times, FEW)], [area]
    return found


def _mean(values: Sequence[float]) -> dict[str, float]:
    """Of seeds: their mean, and the least and the greatest."""
    return {"value": sum(values) / len(values), "low": min(values), "high": max(values)}


def _against(
    ours: Sequence[Replayed], others: Sequence[Replayed], test: Recorded, times: Times
) -> dict[str, float]:
    """Savings of rules of several seeds against others, resampled by prompt."""
    counts = together([each.counts for each in ours])
    rivals = together([each.counts for each in others])
    prompts = [*test.prompts] * len(ours)
    return asdict(saving(counts, rivals, times, prompts))


def _ablation_part(
    data: Data, judged: Judged, times: Times, options: argparse.Namespace, console: Console
) -> Iterator[dict[str, Any]]:
    """Each ingredient dropped, on few rollouts: what it saves, and loses against the whole."""
    about = {
        "rollouts": options.small,
        "seeds": options.seeds,
        "how": "AUROC: mean of seeds, least and greatest; savings: all seeds, resampled by prompt",
    }
    rows: list[dict[str, Any]] = []
    whole = _small(FULL, options.small, options.passes, data, judged, times, options.seeds)
    fixed = {domain: best_length(test.traces, times) for domain, (_, test) in judged.items()}
    for variant in ABLATION:
        begun = time.perf_counter()
        found = whole
        if variant is not FULL:
            found = _small(
                variant, options.small, options.passes, data, judged, times, options.seeds
            )
        domains: dict[str, Any] = {}
        for domain, (replayed, areas) in found.items():
            test = judged[domain][1]
            base = [fixed[domain]] * len(replayed)
            domains[domain] = {
                "auroc": _mean(areas),
                "saving_over_best_k": _against(replayed, base, test, times),
                "saving_over_shipped": _against(replayed, whole[domain][0], test, times),
            }
        rows.append({"variant": variant.name, "domains": domains})
        console.print(f"ablation, {variant.name}: {time.perf_counter() - begun:.0f} s")
        yield {"ablation": {**about, "rows": rows}}


def _kinds_part(
    data: Data, judged: Judged, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """How well each kind of head, and each score alone, predicts the labels."""
    train, kinds = dict(zip(DOMAINS, options.train, strict=True)), {}
    for variant in KINDS:
        if variant is PUBLISHED and depths_of(data.draft) > 1:
            continue  # no state knows a drafted token
        name = f"kinds, {variant.name}"
        head = trained(variant, data, train, passes=options.epochs, seed=SEED, name=name)
        kinds[variant.name] = {
            domain: asdict(head_metrics(test.logits(head), test.accept, head.rejection_weight))
            for domain, (_, test) in judged.items()
        }
        yield {"kinds": kinds}


def _show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    if "domains" in report:
        rules = Table("rule", *DOMAINS, title="time saved against the best fixed length")
        names = next(iter(report["domains"].values()))["rules"]
        for name in names:
            found = [report["domains"][domain]["rules"][name] for domain in DOMAINS]
            rules.add_row(name, *(_percent(each["saving_over_best_k"]) for each in found))
        console.print(rules)
    for row in report.get("ablation", {}).get("rows", ()):
        of_each = (row["domains"][domain] for domain in DOMAINS)
        shown = [
            f"{each['auroc']['value']:.3f} {_percent(each['saving_over_best_k'])}"
            for each in of_each
        ]
        console.print(f"{row['variant']:46}", *shown)
    for name, of_domain in report.get("kinds", {}).items():
        numbers = ("auroc", "kl", "ece")
        found = [" ".join(f"{of_domain[domain][n]:.3f}" for n in numbers) for domain in DOMAINS]
        console.print(f"{name:46}", *found, sep="  ")


def _percent(figure: Mapping[str, float]) -> str:
    return f"{100 * figure['value']:.1f} [{100 * figure['low']:.1f}, {100 * figure['high']:.1f}]"


if __name__ == "__main__":
    main()
