"""Search for the best draft tree: by the acceptance trace and measured times, then by the clock.

Every k-configuration that follows MCSD's monotonic rule (Yang et al. 2024, arXiv:2401.06706) with
at most 16 or 32 paths, and Sequoia's best static tree of each size, are judged by the tokens that
they emit a round along the target's held-out text (`eval.analysis.tree_trace`) and by what their
rounds take (`eval.analysis.tree_times`). The few that promise most are then decoded, beside the
best chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
from transformers import PreTrainedModel

from eval.analysis.static_trees import (
    DEEPEST,
    Reals,
    Tree,
    best_trees,
    child_counts,
    depth_of,
    k_configuration,
    monotone_configurations,
    nodes_of,
    positional_acceptance,
    positional_tokens,
    round_starts,
    survival,
)
from eval.analysis.tree_results import (
    SCHEMA_VERSION,
    Candidate,
    Clocked,
    Family,
    Prediction,
    RoundTimes,
    TreeSearch,
)
from eval.analysis.tree_times import (
    CHAINS,
    TREE_VERIFIER,
    TREES,
    chain_config,
    decode_in_turn,
    measure_rounds,
    tree_config,
)
from eval.analysis.tree_trace import TreeTrace, make_trace, read_trace, write_trace
from eval.measuring.intervals import Interval, resamples
from eval.measuring.methods import MethodConfig
from eval.measuring.metrics import compute_metrics, speed_ratio_interval
from eval.measuring.records import PromptRecord, record_prompt
from eval.runtime.engines import Engine
from specdata.sampling import SamplingConfig
from specdata.terminal import progress

TRACE = "tree-trace.safetensors"
ROLLOUTS = 32
"""Most held-out rollouts of a prompt set that are gone through."""
PROMPTS, TIMED_PROMPTS = 1, 2
"""Prompts of a set whose rounds are timed to fit `RoundTimes`, and that the short list decodes."""
CHAIN_LENGTHS = range(1, 13)
BUDGETS = (16, 32)
"""Most paths of a k-configuration."""
MOST_FOLLOWED = 64
"""Nodes of an evaluated tree that traversal verification is followed on."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What a search decodes with.

    Attributes:
        target: the model of p.
        draft: the model of q.
        sampling: of both; its temperature must not be 0.
        engine: how forwards run.
        tokens: most new tokens of a prompt.
        seed: of every draw.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    sampling: SamplingConfig
    engine: Engine
    tokens: int
    seed: int


def search_trees(
    rows: datasets.Dataset,
    pair: Pair,
    folder: Path,
    *,
    methods: Sequence[MethodConfig] = (),
    rollouts: int = ROLLOUTS,
    made_of: Mapping[str, str | None],
) -> TreeSearch:
    """Search, and say what the methods of an evaluation should emit a round.

    Args:
        rows: held-out rollouts of the target, at least one.
        pair: the models and how they decode.
        folder: the trace is kept here, and read again if it is of the same rollouts and models.
        methods: of an evaluation.
        rollouts: how many of each prompt set are read, the first ones.
        made_of: contents of what goes in; stored with the trace and the result.

    Raises:
        ValueError: if no round could be timed.
        ConfigError: if the models cannot score trees.
    """
    begun = time.perf_counter()
    chosen = rows.select(_first_of_each(rows["dataset"], rollouts))
    trace = _trace(chosen, pair, folder / TRACE, methods, made_of)
    with progress(_generations(chosen), "trees", "generation") as bar:
        times = measure_rounds(
            _prompts(chosen, PROMPTS),
            target=pair.target,
            draft=pair.draft,
            sampling=pair.sampling,
            engine=pair.engine,
            seed=pair.seed,
            report=lambda: bar.update(1),
        )
        judged = _Judge(trace, times)
        shown, listed = judged.shown()
        clocked = _clock(listed, _prompts(chosen, TIMED_PROMPTS), pair, lambda: bar.update(1))
    accepted = {
        "iid": judged.mean(trace.iid).cumsum().tolist(),
        "distinct": judged.mean(trace.distinct).cumsum().tolist(),
    }
    timed = [each.model_copy(update={"clocked": clocked[_key(each)]}) for each in listed]
    rest = [each for each in shown if _key(each) not in clocked]
    return TreeSearch(
        schema_version=SCHEMA_VERSION,
        made_of=dict(made_of),
        rollouts=len(trace.lengths),
        positions=int(trace.lengths.sum()),
        accepted=accepted,
        times=times,
        searched=len(judged.configurations),
        candidates=[*timed, *rest],
        frontier=judged.frontier(),
        predictions=list(judged.predictions(methods)),
        seconds=time.perf_counter() - begun,
    )


def _first_of_each(names: Sequence[str], most: int) -> list[int]:
    taken: dict[str, int] = {}
    kept = []
    for index, name in enumerate(names):
        taken[name] = taken.get(name, 0) + 1
        if taken[name] <= most:
            kept.append(index)
    return kept


def _prompts(rows: datasets.Dataset, most: int) -> dict[str, list[int]]:
    """Some prompts of each set, by their ids."""
    kept = rows.select(_first_of_each(rows["dataset"], most))
    return dict(zip(kept["example_id"], kept["prompt_ids"], strict=True))


def _generations(rows: datasets.Dataset) -> int:
    """How many are decoded: every shape that is timed, and the short list with its chain."""
    shapes = len(CHAINS) + len(TREES)
    return shapes * len(_prompts(rows, PROMPTS)) + 5 * len(_prompts(rows, TIMED_PROMPTS))


def _trace(
    rows: datasets.Dataset,
    pair: Pair,
    path: Path,
    methods: Sequence[MethodConfig],
    made_of: Mapping[str, str | None],
) -> TreeTrace:
    """The kept trace, or one that is made and kept now."""
    followed = {
        method.widths
        for method in methods
        if _followed(method, pair.sampling) == ("traversal", "iid")
        and nodes_of(k_configuration(method.widths)) <= MOST_FOLLOWED
    }
    known = read_trace(path, made_of)
    if known is not None and known.traversal.keys() >= followed:
        return known
    made = make_trace(
        rows,
        target=pair.target,
        draft=pair.draft,
        sampling=pair.sampling,
        seed=pair.seed,
        traversal=sorted(followed),
    )
    write_trace(path, made, made_of)
    return made


def _followed(method: MethodConfig, sampling: SamplingConfig) -> tuple[str, str] | None:
    """Verifier and siblings of a method that drafts a tree; None for others."""
    if method.decoder != "speculative" or method.drafter != "tree":
        return None
    return method.verifier, method.decoding(sampling).how


class _Judge:
    """Every candidate, by the trace and the times."""

    def __init__(self, trace: TreeTrace, times: RoundTimes) -> None:
        self._trace, self._times = trace, times
        self._inside = np.arange(trace.ratio.shape[1]) < trace.lengths[:, None]
        self._group = np.unique(trace.prompts, return_inverse=True)[1]
        self.chains = [
            self._chain(length, verifier)
            for verifier in ("token", "block")
            for length in CHAIN_LENGTHS
        ]
        self.configurations = [
            self._tree("k-configuration", k_configuration(widths))
            for widths in monotone_configurations(max(BUDGETS))
            if widths[0] > 1  # else it is a chain
        ]
        self.static_trees = [self._tree("static tree", tree) for tree in self._best_trees()]

    def mean(self, ranks: Reals) -> Reals:
        """(RANKS,) mean over positions."""
        return np.asarray(ranks[self._inside].mean(axis=0))

    def shown(self) -> tuple[list[Candidate], list[Candidate]]:
        """What a report shows, and the short list that is timed, the chain first."""
        by_time = sorted(self.configurations, key=lambda each: each.seconds_per_token)
        chain = self._fastest(self.chains)
        small, large = (
            self._fastest([each for each in by_time if low < each.paths <= high])
            for low, high in ((0, BUDGETS[0]), BUDGETS)
        )
        third = next(each for each in by_time if each is not small and each is not large)
        listed = [chain, small, large, third]
        listed.append(
            min(listed[1:], key=lambda each: each.seconds_per_token).model_copy(
                update={"verifier": "traversal"}
            )
        )
        most = [
            max(
                (each for each in by_time if each.paths <= budget),
                key=lambda each: each.tokens.value,
            )
            for budget in BUDGETS
        ]
        other = [each for each in self.chains if each.verifier != chain.verifier]
        static = [self._fastest(self.static_trees), self.static_trees[-1]]
        unique = {_key(each): each for each in (*listed, self._fastest(other), *most, *static)}
        return [self._with_interval(each) for each in unique.values()], [
            self._with_interval(each) for each in listed
        ]

    def frontier(self) -> dict[Family, list[tuple[int, float]]]:
        """The most tokens a round of each family, where more nodes give more."""
        token = [each for each in self.chains if each.verifier == "token"]
        return {
            "chain": _steps(token),
            "k-configuration": _steps(self.configurations),
            "static tree": _steps(self.static_trees),
        }

    def predictions(self, methods: Sequence[MethodConfig]) -> Iterator[Prediction]:
        """Of the methods that decide by a rule that the trace covers."""
        names = np.array(self._trace.names)
        for method in methods:
            survived = self._survival_of(method)
            if survived is None:
                continue
            for name in dict.fromkeys(self._trace.names):
                tokens = self._tokens(survived, names == name)
                yield Prediction(dataset=name, method=method.name, tokens=tokens)

    def _survival_of(self, method: MethodConfig) -> Reals | None:
        if method.decoder != "speculative":
            return None
        trace = self._trace
        if method.drafter == "chain":
            if method.stop.adaptive or method.verifier not in ("token", "block"):
                return None
            return trace.chain(method.stop.longest, block=method.verifier == "block")
        if method.drafter != "tree":
            return None
        if method.verifier == "traversal" and method.siblings in ("auto", "iid"):
            return trace.traversal.get(method.widths)
        ranks = {"rrs": trace.iid, "rrs_wor": trace.distinct}.get(method.verifier)
        if ranks is None or max(method.widths) > ranks.shape[-1]:
            return None
        return survival(k_configuration(method.widths), ranks)

    def _chain(self, length: int, verifier: str) -> Candidate:
        survived = self._trace.chain(length, block=verifier == "block")
        return self._candidate(
            "chain", k_configuration([1] * length), verifier, survived, self._times.chain(length)
        )

    def _tree(self, family: Family, tree: Tree) -> Candidate:
        survived = survival(tree, self._trace.distinct)
        return self._candidate(family, tree, TREE_VERIFIER, survived, self._times.tree(tree))

    def _candidate(
        self, family: Family, tree: Tree, verifier: str, survived: Reals, seconds: float
    ) -> Candidate:
        rounds = round_starts(survived, self._trace.lengths).sum()
        tokens = float(self._trace.lengths.sum() / rounds)
        return Candidate(
            family=family,
            children=child_counts(tree),
            verifier=verifier,
            nodes=nodes_of(tree),
            depth=depth_of(tree),
            tokens=Interval(tokens, tokens, tokens),
            seconds_per_token=seconds / tokens,
        )

    def _best_trees(self) -> Iterator[Tree]:
        """Of each number of nodes, the depth that promises the least time a token."""
        trace = self._trace
        chain = k_configuration([1] * DEEPEST)
        starts = round_starts(survival(chain, trace.distinct), trace.lengths)
        acceptance = positional_acceptance(trace.distinct, trace.lengths, starts)
        by_depth = [best_trees(acceptance[:depth], 32) for depth in range(1, DEEPEST + 1)]
        for nodes in range(4, 33):
            trees = [found[nodes].tree for found in by_depth]
            yield min(
                trees,
                key=lambda tree: self._times.tree(tree) / positional_tokens(tree, acceptance),
            )

    @staticmethod
    def _fastest(candidates: Sequence[Candidate]) -> Candidate:
        return min(candidates, key=lambda each: each.seconds_per_token)

    def _with_interval(self, candidate: Candidate) -> Candidate:
        if candidate.family == "chain":
            survived = self._trace.chain(candidate.depth, block=candidate.verifier == "block")
        else:
            survived = survival(_tree_of(candidate.children), self._trace.distinct)
        every = np.ones(len(self._trace.lengths), dtype=bool)
        return candidate.model_copy(update={"tokens": self._tokens(survived, every)})

    def _tokens(self, survived: Reals, chosen: np.ndarray) -> Interval:
        """Expected tokens a round on some rollouts, with its interval over prompts."""
        lengths = self._trace.lengths[chosen]
        rounds = round_starts(survived[:, chosen], lengths).sum(axis=1)
        _, group = np.unique(self._group[chosen], return_inverse=True)
        drawn = resamples(int(group.max()) + 1)
        emitted, taken = (drawn @ np.bincount(group, each) for each in (lengths, rounds))
        values = emitted / taken
        low, high = np.nanquantile(values[1:], (0.025, 0.975))
        return Interval(float(values[0]), float(low), float(high))


def _tree_of(children: Sequence[Sequence[int]]) -> Tree:
    """The tree whose `child_counts` these are."""
    level: list[Tree] = [()] * sum(children[-1])
    for counts in reversed(children):
        following = iter(level)
        level = [tuple(next(following) for _ in range(count)) for count in counts]
    return level[0]


def _steps(candidates: Sequence[Candidate]) -> list[tuple[int, float]]:
    steps: list[tuple[int, float]] = []
    for each in sorted(candidates, key=lambda each: (each.nodes, -each.tokens.value)):
        if not steps or each.tokens.value > steps[-1][1]:
            steps = [*steps, (each.nodes, each.tokens.value)]
    return steps


def _key(candidate: Candidate) -> str:
    return f"{candidate.family} {candidate.verifier} {candidate.children}"


def _clock(
    listed: Sequence[Candidate],
    prompts: Mapping[str, Sequence[int]],
    pair: Pair,
    report: Callable[[], object],
) -> dict[str, Clocked]:
    """Decode the short list in turn; the first of it is what the others are compared with."""
    configs = {
        _key(each): chain_config(each.depth, each.verifier, pair.sampling)
        if each.family == "chain"
        else tree_config(each.widths, each.verifier, pair.sampling)
        for each in listed
    }
    records: dict[str, list[PromptRecord]] = {name: [] for name in configs}
    made = decode_in_turn(
        configs,
        prompts,
        target=pair.target,
        draft=pair.draft,
        engine=pair.engine,
        tokens=pair.tokens,
        seed=pair.seed,
        report=report,
    )
    for name, prompt, done in made:
        records[name].append(
            record_prompt(prompt, done.rounds, seconds=done.seconds, finish=done.finish)
        )
    chain = _key(listed[0])
    return {name: _clocked(own, records[chain], name == chain) for name, own in records.items()}


def _clocked(own: list[PromptRecord], chain: list[PromptRecord], is_chain: bool) -> Clocked:
    metrics, base = compute_metrics(own), compute_metrics(chain)
    assert metrics.tokens_per_second is not None
    assert base.tokens_per_second is not None
    speed = None
    if not is_chain:
        ratio = metrics.tokens_per_second / base.tokens_per_second
        speed = Interval(ratio, *speed_ratio_interval(own, chain))
    return Clocked(
        prompts=metrics.prompts,
        tokens=Interval(metrics.block_efficiency, *metrics.intervals["block_efficiency"]),
        seconds_per_token=1.0 / metrics.tokens_per_second,
        speed=speed,
    )
