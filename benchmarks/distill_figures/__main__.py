"""Figures of distillation on the embedded pair's draft: losses, data, sizes.

    python -m benchmarks.distill_figures [--run runs/distill] [--parts objectives data size]
        [--out FILE]

Distils the demo's draft again and again from the same start, and measures every result on held-out
rollouts of the three embedded domains: acceptance sum min(p, q), expected tokens a round under
token and block verification, and the speed-up they promise at the best draft length. Intervals are
95 % bootstraps over prompts, with the same resamples for every comparison.

`objectives` compares losses, off-policy and mixed, trained on all three domains and on instructions
alone; `data` numbers and mixes of rollouts; `size` drafts of other depths, widths and origins. What
is missing is made: the pair (`--pair`, by default that of recipes/configs/toy-full.yaml), then
rollouts and drafts in `--run`. Whatever is finished there is used again, so a killed benchmark goes
on; parts that are not asked for stay in FILE as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console

from benchmarks.distill_figures.data import (
    DEMO_PAIR,
    DOMAINS,
    MAX_NEW_TOKENS,
    Data,
    of_domains,
    prepare,
)
from benchmarks.distill_figures.decoding import draft_costs
from benchmarks.distill_figures.drafts import SFT, Training, made, record, trained
from benchmarks.distill_figures.judge import Judge, Judged, faster, figures
from benchmarks.distill_figures.plots import draw
from benchmarks.distill_figures.starts import STARTS, started
from distill.config import Objective
from eval.measuring.environment import describe_environment
from recipes.run import prepare_libraries
from specdata.models import load_model
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
OBJECTIVES = (*get_args(Objective), SFT)
ALONE = "instructions alone"
THREE = "three domains"
UNDISTILLED = "undistilled"
DEMO = "1 x 128, the demo's"


class Benchmark:
    """The inputs that all parts share: the data, the judge, and the options."""

    def __init__(self, options: argparse.Namespace, data: Data) -> None:
        self.options = options
        self.data = data
        self.judge = Judge(data, options.test)
        self.console = Console(highlight=False, stderr=True)
        self.judged = cache(self.judge.of)
        self.base = self.judge.of(data.draft)
        each = options.rollouts
        self.mixes = {
            THREE: dict.fromkeys(DOMAINS, each),
            ALONE: {DOMAINS[0]: each * len(DOMAINS)},
        }
        self.default = Training(
            options.objective,
            self.mixes[THREE],
            share=options.share,
            epochs=options.passes,
            learning_rate=options.learning_rate,
        )

    def row(self, training: Training, seeds: int, cost: float | None = None) -> dict[str, Any]:
        """Train with each seed, and give the figures of their mean."""
        outs = [trained(training, self.data, seed=seed) for seed in range(seeds)]
        of_seeds = [self.judged(out) for out in outs]
        mean = _mean(of_seeds)
        settings = asdict(training)
        del settings["start"]
        found = {
            "training": settings,
            "seeds": seeds,
            "acceptance_of_seeds": {
                domain: [float(each[domain].acceptance()[0]) for each in of_seeds]
                for domain in DOMAINS
            },
            **figures(mean, self.base, cost or self.options.draft_cost),
            "faster_than_default": self._faster(mean, seeds),
            "made": record(outs[0]),
        }
        self.say(training.name(0), found)
        return found

    def _faster(self, judged: Mapping[str, Judged], seeds: int) -> dict[str, Any]:
        """Its speed-up against that of the default with the same seeds."""
        outs = [trained(self.default, self.data, seed=seed) for seed in range(seeds)]
        default = _mean([self.judged(out) for out in outs])
        return faster(judged, default, self.options.draft_cost)

    def undistilled(self) -> dict[str, Any]:
        """The figures of the draft that all others start from."""
        return figures(self.base, self.base, self.options.draft_cost)

    def say(self, name: str, found: Mapping[str, Any]) -> None:
        """One line of progress."""
        self.console.print(line(name, found))


def _mean(seeds: Sequence[Mapping[str, Judged]]) -> dict[str, Judged]:
    """Domain -> the mean of drafts of several seeds."""
    return {domain: Judged.mean([each[domain] for each in seeds]) for domain in DOMAINS}


def line(name: str, found: Mapping[str, Any]) -> str:
    """Acceptance and gain of each domain, and the speed-up of both verifiers."""
    domains = (found["domains"][domain] for domain in DOMAINS)
    shown = [f"{d['acceptance']['value']:.3f} ({d['gain']['value']:+.3f})" for d in domains]
    shown += [
        f"{verifier} K={best['length']}: {_in_words(best)}"
        for verifier, best in found["speedup"].items()
    ]
    return f"{name:60} {'  '.join(shown)}"


def _objectives(bench: Benchmark) -> Iterator[dict[str, Any]]:
    """Every loss, off-policy and mixed, on three domains and on instructions alone."""
    options = bench.options
    rows: dict[str, dict[str, Any]] = {}
    for seeds in range(1, options.seeds + 1):
        for share in (0.0, options.mixed):
            for mix, rollouts in bench.mixes.items():
                for objective in options.objectives:
                    if share and objective == SFT:
                        continue  # the target's own tokens are all it knows
                    training = bench.default.changed(
                        objective=objective, rollouts=rollouts, share=share
                    )
                    key = f"{objective}, {'mixed' if share else 'off-policy'}, {mix}"
                    rows[key] = {"mix": mix, **bench.row(training, seeds)}
                    yield {"objectives": {UNDISTILLED: bench.undistilled(), "rows": rows}}


def _data(bench: Benchmark) -> Iterator[dict[str, Any]]:
    """More and fewer rollouts, in as many passes and in as many steps; other mixes."""
    options, default = bench.options, bench.default
    points: dict[str, list[dict[str, Any]]] = {"equal passes": [], "equal steps": []}
    mixes: dict[str, dict[str, Any]] = {}
    for each in options.counts:
        rollouts = dict.fromkeys(DOMAINS, each)
        steps = default.epochs * options.rollouts / each
        for how, epochs in (("equal steps", steps), ("equal passes", default.epochs)):
            row = bench.row(default.changed(rollouts=rollouts, epochs=epochs), options.curve_seeds)
            points[how].append({"rollouts": each * len(DOMAINS), **row})
            yield {"data": {"points": points, "mixes": mixes}}
    whole = default.count
    first, *rest = DOMAINS
    shares = {
        THREE: dict.fromkeys(DOMAINS, 1),
        **{f"{domain} alone": {domain: 1} for domain in DOMAINS},
        "half of them instructions": {first: 2, **dict.fromkeys(rest, 1)},
    }
    for mix, parts in shares.items():
        rollouts = {
            domain: whole * parts[domain] // sum(parts.values())
            for domain in DOMAINS
            if domain in parts
        }
        mixes[mix] = bench.row(default.changed(rollouts=rollouts), options.curve_seeds)
        yield {"data": {"points": points, "mixes": mixes}}


def _size(bench: Benchmark) -> Iterator[dict[str, Any]]:
    """Drafts of other sizes and origins: acceptance, what a token costs, and the speed-up."""
    options, data = bench.options, bench.data
    names = options.starts or list(STARTS)
    folders = {
        name: started(STARTS[name], data, bench.default.rollouts, name=name) for name in names
    }
    trainings = {DEMO: bench.default} | {
        name: bench.default.changed(start=folder) for name, folder in folders.items()
    }
    drafts = {name: trained(training, data, seed=0) for name, training in trainings.items()}
    prompts = [
        ids
        for domain in DOMAINS
        for ids in of_domains(data.test, {domain: options.timed})["prompt_ids"]
    ]
    costs = draft_costs(data, drafts, prompts, max_new_tokens=MAX_NEW_TOKENS)
    rows = {}
    for name, training in trainings.items():
        before = bench.judge.of(training.start or data.draft)
        cost = options.draft_cost * costs[name]["relative"]
        rows[name] = {
            **bench.row(training, 1, cost),
            "before": figures(before, bench.base, cost),
            "cost": cost,
            "parameters": _parameters(drafts[name]),
            **costs[name],
        }
        del rows[name]["faster_than_default"]  # which compares drafts of one cost
        yield {"size": {"rows": rows}}


def _parameters(draft: Path) -> int:
    return sum(each.numel() for each in load_model(str(draft)).parameters())


PARTS = {
    "objectives": _objectives,
    "data": _data,
    "size": _size,
}


def main() -> None:
    """Train, judge, print, and write one JSON file."""
    options = _options()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(options.threads)
    prepare_libraries()
    data = prepare(
        run=options.run,
        pair=options.pair,
        counts={
            "train": dict(zip(DOMAINS, options.train, strict=True)),
            "dev": dict.fromkeys(DOMAINS, options.dev),
            "test": dict.fromkeys(DOMAINS, options.test_made),
        },
    )
    report = _begun(options, data)
    bench = Benchmark(options, data)
    for part in options.parts:
        report["made"][part] = made()
        for grown in PARTS[part](bench):  # kept at each step, so that a killed run loses little
            report |= grown
            write_json(options.out, report)
        draw(report, options.out.with_suffix(".png"))
    _show(report, Console(highlight=False, width=140))
    print(f"written: {options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--run", type=Path, default=Path("runs/distill"), help="what is made")
    parser.add_argument("--pair", type=Path, default=DEMO_PAIR, help="target and draft")
    parser.add_argument(
        "--train",
        type=int,
        nargs=len(DOMAINS),
        default=(6144, 2048, 2048),
        metavar="N",
        help=f"training rollouts of {', '.join(DOMAINS)} that are made (default: %(default)s)",
    )
    parser.add_argument("--dev", type=int, default=256, help="dev rollouts of each domain")
    parser.add_argument("--test-made", type=int, default=512, help="test rollouts of each domain")
    parser.add_argument("--test", type=int, default=256, help="those of them that are judged")
    parser.add_argument("--rollouts", type=int, default=512, help="a domain, of most trainings")
    parser.add_argument(
        "--objective", choices=OBJECTIVES, default="lk_hybrid", help="of most trainings"
    )
    parser.add_argument("--share", type=float, default=0.0, help="of the draft's own text, of most")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of most trainings")
    parser.add_argument("--passes", type=float, default=3.0, help="of most trainings")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES)
    parser.add_argument("--mixed", type=float, default=0.5, help="the draft's own share if mixed")
    parser.add_argument("--seeds", type=int, default=2, help="of each objective")
    parser.add_argument("--curve-seeds", type=int, default=1, help="of each point of data")
    parser.add_argument(
        "--counts",
        type=int,
        nargs="+",
        default=(32, 128, 512, 1024),
        metavar="N",
        help="rollouts a domain (default: %(default)s)",
    )
    parser.add_argument("--starts", nargs="+", choices=list(STARTS), help="default: all")
    parser.add_argument("--timed", type=int, default=8, help="prompts a domain of the clock")
    parser.add_argument("--draft-cost", type=float, default=0.182, help="t_d / t_t, assumed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/distill.json"))
    return parser.parse_args()


def _begun(options: argparse.Namespace, data: Data) -> dict[str, Any]:
    """The report with the parts that it holds already, if they are of the same settings."""
    about = {
        "schema_version": SCHEMA_VERSION,
        "environment": describe_environment(device="cpu", dtype="float32").model_dump(),
        "settings": {
            "train": dict(zip(DOMAINS, options.train, strict=True)),
            "test": options.test,
            "sampling": asdict(data.sampling),
            "max_new_tokens": MAX_NEW_TOKENS,
            "draft_cost": options.draft_cost,
        },
        "how": "acceptance: mean of sum_x min(p, q) over the tokens of held-out test rollouts; "
        "gain: over the undistilled draft on the same rollouts; tokens a round: exact expectation "
        "along them; speed-up: by t_d / t_t at the best length for all domains together; "
        "intervals are 95 % bootstraps over prompts with common resamples, of the mean of seeds",
    }
    if options.out.is_file():
        stored = json.loads(options.out.read_text("utf-8"))
        if all(stored.get(key) == about[key] for key in about if key != "environment"):
            return {**stored, **about}
    return {**about, "made": {}}


def _show(report: Mapping[str, Any], console: Console) -> None:
    """Print the tables."""
    for part, rows in _tables(report):
        console.print(f"[bold]{part}[/bold]")
        for name, found in rows:
            console.print(line(name, found))


def _tables(report: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[tuple[str, Any]]]]:
    objectives = report.get("objectives", {})
    if objectives:
        yield UNDISTILLED, [("", objectives[UNDISTILLED])]
    for part in ("objectives", "size"):
        yield part, [*report.get(part, {}).get("rows", {}).items()]
    data = report.get("data", {"points": {}, "mixes": {}})
    for how, points in data["points"].items():
        yield how, [(f"{point['rollouts']} rollouts", point) for point in points]
    yield "mixes", [*data["mixes"].items()]


def _in_words(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"


if __name__ == "__main__":
    main()
