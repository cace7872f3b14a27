"""Time of one sampled verification: every verifier over every form of draft that it takes.

    python benchmarks/verify.py [--out runs/bench/verify.json] [--vocabularies 2048 32768 131072]

`Verifier.draw` is timed on drafts that it has not met before, distributions already computed,
float32 on the CPU. Each figure is the median over fresh drafts and the range of that median over
repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.drafts import DraftTree, How
from eval.measuring.environment import describe_environment
from eval.verifiers import VERIFIERS
from eval.verifiers.rule import Verifier
from specdata.storage.files import write_json

SCHEMA_VERSION = 1
LARGE_V = 32768
DRAFTS, REPEATS, BUDGET_SECONDS = 12, 5, 2.0
TINY_V = 200  # small enough for the full linear program, which is compared with the truncated

Maker = Callable[[Tensor, torch.Generator], DraftTree]


def chain_of_8(distributions: Tensor, generator: torch.Generator) -> DraftTree:
    """Distributions (depths, V) -> a chain of 8 tokens."""
    return DraftTree.chain(drawn(distributions[:8], 1, generator).flatten(), distributions[:8])


def paths_8_of_4(distributions: Tensor, generator: torch.Generator) -> DraftTree:
    """8 rollouts of 4 tokens; the distribution depends on the depth only, so 4 rows are held."""
    tokens = drawn(distributions[:4], 8, generator).T.contiguous()
    depth = torch.arange(4).repeat(8)
    index = torch.arange(32)
    parents = torch.where(depth == 0, 0, index)
    return DraftTree(tokens.flatten(), parents, distributions[:4], depth, "paths").checked()


def tree_of(how: How) -> Maker:
    """Makes 4x2x2 trees whose siblings are drawn as `how` states."""
    widths = (4, 2, 2)

    def make(distributions: Tensor, generator: torch.Generator) -> DraftTree:
        tokens, rows, level = [], [], 1
        for depth, width in enumerate(widths):
            rows += [distributions[depth]] * level
            for _ in range(level):
                tokens.append(siblings(distributions[depth], width, how, generator))
            level *= width
        return DraftTree.tree(widths, torch.cat(tokens), torch.stack(rows), how)

    return make


def siblings(distribution: Tensor, count: int, how: How, generator: torch.Generator) -> Tensor:
    """(count,) candidates for one position."""
    if how != "greedy":
        return torch.multinomial(distribution, count, replacement=how == "iid", generator=generator)
    best = distribution.topk(count - 1).indices
    rest = distribution.index_fill(0, best, 0.0)
    return torch.cat([best, torch.multinomial(rest, 1, generator=generator)])


def drawn(distributions: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """(rows, count) independent tokens of every distribution."""
    return torch.multinomial(distributions, count, replacement=True, generator=generator)


FORMS: Mapping[str, Maker] = {
    "chain of 8": chain_of_8,
    "8 paths of 4": paths_8_of_4,
    "tree 4x2x2": tree_of("iid"),
    "tree 4x2x2, distinct": tree_of("distinct"),
    "tree 4x2x2, greedy": tree_of("greedy"),
}


def models(vocabulary: int, depths: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Target and draft distributions (depths, V) that overlap by about 0.7."""
    logits = 2.5 * torch.randn(depths, vocabulary, generator=generator)
    noise = torch.randn(depths, vocabulary, generator=generator)
    return logits.softmax(-1), (logits + 0.75 * noise).softmax(-1)


def target_rows(tree: DraftTree, p: Tensor) -> Tensor:
    """(N+1, V) rows of the target by depth."""
    depths = [0]
    for parent in tree.parents.tolist():
        depths.append(depths[parent] + 1)
    return p[torch.tensor(depths)]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Milliseconds of one sampled verification.

    Args:
        median_ms: median over all.
        low_ms: tenth percentile.
        high_ms: ninetieth percentile.
        spread_ms: least and largest median of a repeat.
        walks: how many were timed.
        accepted: mean number of accepted tokens.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    spread_ms: tuple[float, float]
    walks: int
    accepted: float


def fresh(draft: tuple[DraftTree, Tensor], generator: torch.Generator) -> tuple[DraftTree, Tensor]:
    """An equally hard draft with new distributions: all token ids shifted by one amount.

    In decoding no two rounds have the same distributions, so cached selections must not help here.
    """
    tree, target = draft
    vocabulary = tree.vocabulary
    shift = int(torch.randint(vocabulary, (), generator=generator))
    tokens = (tree.tokens + shift) % vocabulary
    moved = dataclasses.replace(
        tree, tokens=tokens, distributions=tree.distributions.roll(shift, -1)
    )
    return moved, target.roll(shift, -1)


def time_draws(
    verifier: Verifier, drafts: list[tuple[DraftTree, Tensor]], generator: torch.Generator
) -> Timing:
    """Verify all drafts several times, within a budget of seconds."""
    verifier.draw(*fresh(drafts[0], generator), generator)
    every, medians, accepted = [], [], 0
    begun = time.perf_counter()
    for _ in range(REPEATS):
        seconds = []
        for draft in drafts:
            tree, target = fresh(draft, generator)
            start = time.perf_counter()
            outcome = verifier.draw(tree, target, generator)
            seconds.append(1e3 * (time.perf_counter() - start))
            accepted += len(outcome.nodes)
        every += seconds
        medians.append(statistics.median(seconds))
        if time.perf_counter() - begun > BUDGET_SECONDS:
            break
    ordered = sorted(every)
    return Timing(
        median_ms=statistics.median(ordered),
        low_ms=ordered[len(ordered) // 10],
        high_ms=ordered[-1 - len(ordered) // 10],
        spread_ms=(min(medians), max(medians)),
        walks=len(ordered),
        accepted=accepted / len(ordered),
    )


def every_verifier() -> Iterator[tuple[str, dict[str, Any], Verifier]]:
    """Every verifier with the settings it is timed with."""
    for name, entry in VERIFIERS.items():
        for settings in entry.grid:
            yield name, dict(settings), entry.make(**settings)


def measurements(vocabulary: int, generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """A record for every verifier and form at one vocabulary."""
    p, q = models(vocabulary, 9, generator)
    for form, make in FORMS.items():
        begun = time.perf_counter()
        trees = [make(q, generator) for _ in range(DRAFTS)]
        checked_ms = 1e3 * (time.perf_counter() - begun) / DRAFTS
        drafts = [(tree, target_rows(tree, p)) for tree in trees]
        for name, settings, verifier in every_verifier():
            if trees[0].kind not in verifier.takes:
                continue
            timing = time_draws(verifier, drafts, generator)
            record = {
                "verifier": name,
                "settings": settings,
                "form": form,
                "vocabulary": vocabulary,
                **dataclasses.asdict(timing),
                "draft_and_check_ms": checked_ms,
            }
            yield record


def selection_at_one_position(generator: torch.Generator) -> Iterator[dict[str, Any]]:
    """`importance` on two candidates: Luce selection, and truncated against full LP."""
    cases = [(LARGE_V, {"solver": "luce"}), (TINY_V, {"solver": "truncated", "s": 5})]
    cases.append((TINY_V, {"solver": "lp"}))
    for vocabulary, settings in cases:
        p, q = models(vocabulary, 1, generator)
        trees = [DraftTree.siblings(drawn(q, 2, generator).flatten(), q[0]) for _ in range(DRAFTS)]
        drafts = [(tree, target_rows(tree, p.expand(2, vocabulary))) for tree in trees]
        verifier = VERIFIERS["importance"].make(**settings)
        yield {
            "verifier": "importance",
            "settings": settings,
            "form": "2 siblings",
            "vocabulary": vocabulary,
            **dataclasses.asdict(time_draws(verifier, drafts, generator)),
        }


def main() -> None:
    """Run everything and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/verify.json"))
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[2048, LARGE_V, 131072])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(options.seed)
    records = list(selection_at_one_position(generator))
    for vocabulary in options.vocabularies:
        records += measurements(vocabulary, generator)
    for record in records:
        settings = " ".join(f"{key}={value}" for key, value in record["settings"].items())
        print(
            f"{record['verifier']:>16} {settings:<24} {record['form']:<22}"
            f" V={record['vocabulary']:<7} {record['median_ms']:8.3f} ms"
        )
    environment = describe_environment(device="cpu", dtype="float32")
    write_json(
        options.out,
        {
            "schema_version": SCHEMA_VERSION,
            "environment": environment.model_dump(),
            "records": records,
        },
    )


if __name__ == "__main__":
    main()
