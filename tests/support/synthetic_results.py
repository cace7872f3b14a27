"""Results of a simulated machine, realistic in shape, for the tests of metrics, report, release.

A drafted token is accepted with a prompt's own probability until the first rejection; one draft
token costs 2 ms and one target forward 11 ms, give or take 3 %.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from eval.decode_config import Method
from eval.measuring.environment import Environment
from eval.measuring.intervals import Interval
from eval.measuring.methods import PLAIN
from eval.measuring.pooled import ALL_SETS
from eval.measuring.records import PromptRecord, record_prompt
from eval.measuring.results import Results, Run, Setup, VerifierRow, build_results
from eval.rounds import Round

T_DRAFT, T_TARGET = 0.002, 0.011
PROMPTS = 12
MAX_NEW_TOKENS = 96
BIAS = 0.041
"""Total variation a token of the biased verifier."""
PARTS = ("draft_seconds", "target_seconds", "overhead_seconds")

ENVIRONMENT = Environment(
    hardware={"cpu": "Simulated CPU @ 2.0 GHz", "cores": 2, "threads": 1, "gpu": None},
    software={"python": "3.11.9", "torch": "2.13.0", "transformers": "5.23.0"},
    git_commit="0123456789abcdef0123456789abcdef01234567",
    git_dirty=False,
    date="2026-01-02T03:04:05+00:00",
    device="cpu",
    dtype="float32",
)


def simulate(
    rng: np.random.Generator, name: str, *, lengths: tuple[int, int], ease: float, width: int = 1
) -> PromptRecord:
    """One generation: every round drafts a length between the two given, `width` nodes a depth."""
    rounds: list[Round] = []
    left = MAX_NEW_TOKENS
    while left > 0:
        wanted = int(rng.integers(lengths[0], lengths[1] + 1)) if lengths[1] else 0
        depth = min(wanted, left - 1)
        accepted = 0
        while accepted < depth and rng.random() < ease:
            accepted += 1
        draft = depth * T_DRAFT * (1 + 0.03 * rng.standard_normal())
        target = T_TARGET * (1 + 0.03 * rng.standard_normal())
        rounds.append(
            Round(depth * width, depth, accepted, accepted + 1, depth, draft, target, 0.0004)
        )
        left -= accepted + 1
    seconds = sum(r.draft_seconds + r.target_seconds + r.overhead_seconds for r in rounds)
    return record_prompt(name, rounds, seconds=seconds + 0.001, finish="length")


def setup(dataset: str, *, head: str | None = None, **method: object) -> Setup:
    """A method of a dataset, by default a chain of 4 with token verification."""
    how = Method(**method)  # type: ignore[arg-type]
    sampling = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "max_new_tokens": 96}
    return Setup(
        dataset=dataset,
        method=how,
        target="acme/target-7b",
        draft="acme/draft-160m" if how.uses_draft else None,
        head=head,
        sampling=sampling,  # type: ignore[arg-type]
    )


def methods(dataset: str) -> Iterator[tuple[Setup, tuple[int, int], float, int]]:
    """Every method with its draft lengths, ease factor and tree width."""
    yield setup(dataset, name=PLAIN, decoder="plain"), (0, 0), 1.0, 1
    for length in (2, 4, 6, 8, 12):
        yield setup(dataset, name=f"fixed-{length}", length=length), (length, length), 1.0, 1
    yield setup(dataset, name="block-6", verifier="block", length=6), (6, 6), 1.03, 1
    for threshold, lengths in ((0.3, (1, 4)), (0.5, (2, 6)), (0.7, (3, 9)), (0.9, (6, 13))):
        rule = {"name": f"head-{threshold}", "stop": "head", "threshold": threshold}
        yield setup(dataset, head="acme/head", **rule), lengths, 1.08, 1
    rules = {"confidence": 0.4, "entropy": 1.5, "logit": 0.7}
    for stop, threshold in rules.items():
        rule = {"name": f"{stop}-{threshold}", "stop": stop, "threshold": threshold}
        rule |= {"calibration": (0.0, 1.0)} if stop == "logit" else {}
        yield setup(dataset, **rule), (2, 8), 1.04, 1
    tree = {"verifier": "rrs_wor", "drafter": "tree", "widths": (4, 2, 1), "siblings": "distinct"}
    yield setup(dataset, name="tree-4x2x1", **tree), (3, 3), 1.15, 7
    theirs = {"decoder": "assisted", "threshold": 0.4, "limit": 5}
    yield setup(dataset, name="transformers", **theirs), (2, 5), 0.98, 1
    biased = {"verifier": "biased_opt", "verifier_args": {"epsilon": 0.05}, "length": 6}
    yield setup(dataset, name="biased-0.05", **biased), (6, 6), 1.2, 1


@cache
def synthetic_results(*datasets: str, timed: bool = True) -> Results:
    """Results with every family of methods on several datasets, in batches of 4 if not timed."""
    rng = np.random.default_rng(0)
    measured = []
    for index, dataset in enumerate(datasets):
        eases = rng.beta(14, 5 - index, size=PROMPTS)
        for what, lengths, factor, width in methods(dataset):
            sizes = {"lengths": lengths, "width": width}
            records = [
                simulate(rng, f"{dataset}-{i}", ease=min(0.98, float(ease) * factor), **sizes)  # type: ignore[arg-type]
                for i, ease in enumerate(eases)
            ]
            if not what.method.lossless:
                records = [
                    replace(r, variation=BIAS * r.tokens, variation_tokens=r.tokens)
                    for r in records
                ]
            if not timed:
                nothing = dict.fromkeys(("seconds", *PARTS), 0.0)
                records = [replace(record, **nothing) for record in records]
            measured.append((what, records))
    batch = 1 if timed else 4
    return build_results(ENVIRONMENT.model_copy(update={"batch_size": batch}), measured)


def rebuilt(results: Results, change: Callable[[Run], Run | None]) -> Results:
    """The results of changed runs; those of which nothing is left are dropped."""
    runs = [changed for run in results.runs if (changed := change(run)) is not None]
    return build_results(results.environment, [(run, run.generations) for run in runs])


def slower(run: Run, factor: float) -> Run:
    """The same tokens in another time."""
    made = [replace(each, seconds=each.seconds * factor) for each in run.generations]
    return run.model_copy(update={"generations": made})


def only(results: Results, *names: str) -> Results:
    """Some methods, or data sets, alone."""
    return rebuilt(results, lambda run: run if {run.name, run.dataset} & {*names} else None)


def verifier_row(
    kind: str, verifier: str, tokens: float = 3.2, gain: Interval | None = None, **more: object
) -> VerifierRow:
    """Of all prompt sets, without a ceiling."""
    row = {"dataset": ALL_SETS, "verifier": verifier, "parameters": {}, "draft_kind": kind}
    row |= {"expected_tokens": Interval(tokens, tokens - 0.1, tokens + 0.1), "gain": gain}
    row |= {"lossless": True, "positions": 100, "microseconds": 1.0}
    unknown = dict.fromkeys(("ceiling", "share_of_ceiling", "speedup"))
    return VerifierRow(**row | unknown | more)  # type: ignore[arg-type]


def one_round(
    drafted: int, accepted: int, *, depth: int | None = None, emitted: int | None = None
) -> Round:
    return Round(
        drafted=drafted,
        depth=drafted if depth is None else depth,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        draft_forwards=drafted,
        draft_seconds=0.1 * drafted,
        target_seconds=0.5,
        overhead_seconds=0.01,
    )


def by_hand() -> list[PromptRecord]:
    return [
        record_prompt(
            "a", [one_round(3, 3), one_round(3, 1), one_round(2, 0)], seconds=4.0, finish="length"
        ),
        record_prompt("b", [one_round(1, 1, emitted=1)], seconds=1.0, finish="eos"),
    ]
