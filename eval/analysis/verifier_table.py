"""Every verifier on every kind of draft: the expected tokens of a call of the target.

A round that starts after a text draws a draft D. Verifier v ends it at node n with the token y
after it with probability P_v(n, y | D), which `Verifier.outcomes` enumerates, and so the call emits
e_v(D) = sum over n of P_v(n | D) (depth(n) + 1) tokens. No verifier is sampled: two that are given
the same drafts differ by what they do, not by luck.

Tokens a call are the mean of e_v over the places where rounds of v start, which are not all places:
after a rejection text goes on where the draft was wrong. (The mean over all positions of a text is
off by up to 8 % on random Markov pairs, and carrying P(n | D) along a text that was written without
D by up to 5 %, because what a round emits and where it ends depend on each other.) So places and
drafts are made together: held-out prompts are decoded, and each round is verified by one of a few
references, drawn at random. All of them are lossless, so the texts are the target's own. The draft
of each round is drawn once, from a seed, and scored by one forward. A place reached from the round
before, (D', n', y'), counts for v with the weight

    w = P_v(n', y' | D') / mean over references r of P_r(n', y' | D'),   at most `MOST_WEIGHT`,

the chance that a round of v, started where that one did, ends here: importance weights with a
memory of one round. For the first two calls of a text they are exact, but for that cap. Later what
remains is how the starts two rounds ago differ: on random Markov pairs below .1 % in the median
and .9 % at worst. The estimate is sum w e / sum w (self-normalised; consistent in the number of
texts), its interval a bootstrap over prompts.

Enumerating takes from a fraction of a millisecond to half a second. The places of a kind are put in
one random order, and each row takes the first of them, as many as the time allows: all rows of the
kind equally many, but for slow ones, which end when they have had their share of the time. Their
tokens are those of the first verifier over all its places, times the ratio of the two over the
places that both took (a ratio estimate: what luck the few places had, both had). Time is the
clock's: beside other programs a row takes fewer places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from eval.analysis.forms import FORMS, DraftForm
from eval.analysis.round_times import RoundSeconds
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping.recorded import Reals
from eval.drafts import DraftTree
from eval.measuring.experiment import Experiment
from eval.measuring.intervals import Interval, resamples
from eval.measuring.pooled import ALL_SETS
from eval.measuring.results import ENOUGH, Results, VerifierRow
from eval.verifiers import VERIFIERS
from eval.verifiers.optimum import optimal_acceptance
from eval.verifiers.rule import Drawn, Verifier, Walk
from eval.verifiers.selection.pairs import BUCKETS, group_masses, groups_by_ratio
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.sampling import SamplingConfig, generator_for, seed_for
from specdata.threads import using_threads

MOST_WEIGHT = 8.0
"""The largest weight; where references hardly ever end a round as v does, one would be huge."""
ENUMERATED_WHOLE, NAMED = 4096, 48
"""Tokens beyond which verifiers are enumerated over fewer: see `reduced`."""
BYTES = 1 << 30
"""Memory of the distributions of a kind, beyond which no more texts are made."""
TEXTS = 10
"""The texts of a kind take about as long as so many of its rows."""
TIMED = 12
"""Drafts on which a sampled verification is timed; slow ones, for a tenth of a second."""
OPTIMA = 48
"""Places at which the optimum is found: of distinct siblings it takes tens of milliseconds."""


@dataclass(frozen=True, eq=False, slots=True)
class Scored:
    """One round: a draft, the target's distributions, and how a reference ended it.

    Attributes:
        tree: the draft, N nodes; empty at the end of a budget.
        target: (N+1, V) the target's distributions.
        token: the token after the last accepted node.
        node: the last accepted node.
        paths: the drafted tokens down to each node: N+1.
        before: the round that ended where this one starts; None for the first of a text.
    """

    tree: DraftTree
    target: Tensor
    token: int
    node: int
    paths: Sequence[tuple[int, ...]]
    forwards: int = 0
    text: int = 0
    before: Scored | None = None


def reduced(tree: DraftTree, target: Tensor, token: int) -> tuple[DraftTree, Tensor, int]:
    """The same draft, scores (N+1, V) and next token over fewer tokens, if V is large.

    Tokens that are neither drafted nor among the `NAMED` likeliest of a node are added up there in
    groups of nearly one p/q. Verifiers read sums of functions f(p, q) with f(cp, cq) = c f(p, q),
    so tokens of one p/q are as good as one token.
    """
    if target.shape[-1] <= ENUMERATED_WHOLE or not len(tree):
        return tree, target, token
    p, q = target.double(), tree.distributions.double()
    row_of = dict(zip(tree.parent_list, tree.distribution_indices, strict=True))  # node -> q after
    likeliest = [x.topk(NAMED).indices for node, row in row_of.items() for x in (p[node], q[row])]
    named = torch.unique(torch.cat([tree.tokens, torch.tensor([token]), *likeliest]))
    count = len(named) + BUCKETS
    groups = {  # by the node where a row of q is met first
        row: groups_by_ratio(p[node].numpy(), q[row].numpy(), named.numpy())
        for node, row in reversed(row_of.items())
    }
    at_leaves = next(iter(groups.values()))  # where nothing was drafted, any will do

    def fewer(values: Tensor, row: int | None) -> Tensor:
        group = at_leaves if row is None else groups[row]
        return torch.from_numpy(group_masses(group, values.numpy(), count))

    smaller = replace(
        tree,
        tokens=torch.searchsorted(named, tree.tokens),
        distributions=torch.stack([fewer(each, row) for row, each in enumerate(q)]),
    )
    scores = torch.stack([fewer(each, row_of.get(node)) for node, each in enumerate(p)])
    return smaller, scores, int(torch.searchsorted(named, token))


@dataclass(frozen=True, slots=True)
class _Recorder(Verifier):
    """A verifier that has one of several, drawn at random, verify each round, and keeps the round.

    `rounds` holds by the `id` of a text's generator the rounds that drafted; `timed` gets the first
    few drafts over the whole vocabulary.
    """

    references: tuple[Verifier, ...] = ()
    rounds: dict[int, list[Scored]] = field(default_factory=dict)
    timed: list[tuple[DraftTree, Tensor]] = field(default_factory=list)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        """Sample one outcome of one reference."""
        which = torch.randint(
            len(self.references), (), generator=generator, device=generator.device
        )
        drawn = self.references[int(which)].draw(tree, target, generator)
        fields = ("tokens", "parents", "distributions", "distribution_index")
        tree, target = replace(tree, **{n: getattr(tree, n).cpu() for n in fields}), target.cpu()
        if len(tree) and len(self.timed) <= TIMED:
            self.timed.append((tree, target))
        paths: list[tuple[int, ...]] = [()]
        for parent, token in zip(tree.parent_list, tree.token_list, strict=True):
            paths.append((*paths[parent], token))
        scored = Scored(*reduced(tree, target, drawn.token), (drawn.nodes or [0])[-1], paths)
        self.rounds.setdefault(id(generator), []).append(scored)
        return replace(drawn, verifier=self)


def drafted(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompts: Sequence[Tensor],
    config: DecodeConfig,
    *,
    references: Sequence[Verifier] = (),
    seed: int = 0,
    max_new_tokens: int = 96,
    first_text: int = 0,
    timed: list[tuple[DraftTree, Tensor]] | None = None,
) -> list[Scored]:
    """The rounds of texts that the target continues, each with its draft and the scores of it.

    `references` are lossless verifiers that end the rounds, one drawn at each; without any,
    config's own. `first_text` is the number of the first text. `timed` gets the first few drafts
    with the target's distributions, whatever the vocabulary.
    """
    default = config.make_verifier()
    recorder = _Recorder(
        "mixture",
        default.rule,
        default.takes,
        references=tuple(references) or (default,),
        timed=[] if timed is None else timed,
    )
    generators = [generator_for(seed, "verifiers", str(index)) for index in range(len(prompts))]
    decoder = SpeculativeDecoder.from_config(target, draft, config, verifier=recorder)
    generations = decoder.generate_batch(
        prompts, max_new_tokens=max_new_tokens, generators=generators, size=len(prompts)
    )
    no_draft = DraftTree.chain(torch.empty(0, dtype=torch.long), torch.empty(0, 1))
    places: list[Scored] = []
    for text, (generator, generation) in enumerate(zip(generators, generations, strict=True)):
        rounds = iter(recorder.rounds.get(id(generator), []))
        before: Scored | None = None
        for record in generation.rounds:
            scored = Scored(no_draft, torch.empty(1, 1), 0, 0, [()])  # begins or ends a text
            if record.drafted:
                scored = replace(next(rounds), forwards=record.draft_forwards)
            before = replace(scored, text=first_text + text, before=before)
            places.append(before)
    return places


class Enumerated:
    """A verifier, and what it does with scored drafts, each of them enumerated once.

    Its residual does not persist over rounds. After one of the ids in `ends` nothing is emitted.

    Attributes:
        config: how it decodes.
        seconds: those that enumerating took.
        places: so many of the table's places were enumerated.
        microseconds: of one sampled verification.
    """

    def __init__(self, config: DecodeConfig, ends: frozenset[int]) -> None:
        self.config, self.verifier = config, config.make_verifier()
        self.seconds, self.places = 0.0, 0
        self.microseconds = 0.0
        self._ends = ends
        self._outcome: dict[Scored, tuple[float, float, float]] = {}

    def __call__(self, scored: Scored) -> tuple[float, float, float]:
        """The expected emitted and accepted tokens of a round, and the chance to end as it did."""
        if scored not in self._outcome:
            begun = time.perf_counter()
            self._outcome[scored] = self._enumerate(scored)
            self.seconds += time.perf_counter() - begun
        return self._outcome[scored]

    def _enumerate(self, scored: Scored) -> tuple[float, float, float]:
        if not len(scored.tree):
            return 1.0, 0.0, 1.0
        tree, target = scored.tree, scored.target
        emitted = accepted = chance = 0.0
        for weight, end in self.verifier.outcomes(tree, target):
            path = scored.paths[end.node]
            accepted += weight * len(path)
            emitted += weight * (len(path) + (not path or path[-1] not in self._ends))
            if path == scored.paths[scored.node]:  # siblings may hold one token twice
                chance += weight * float(end.distribution[scored.token])
        if tree.kind == "chain" and not isinstance(self.verifier.rule, Walk):
            # Whether x_i is kept depends on the tokens drawn after it. Over those, the chance is in
            # the mean that of a draft that ends with x_i, so their luck is integrated out.
            kept = []
            for length in range(1, 1 + len(tree)):
                fields = ("tokens", "parents", "distribution_index")
                start = replace(tree, **{name: getattr(tree, name)[:length] for name in fields})
                ends = self.verifier.outcomes(start, target[: length + 1])
                kept.append(sum(weight for weight, end in ends if end.node == length))
            accepted = sum(kept)
            emitted = 1.0 + accepted - kept[-1] * (tree.token_list[-1] in self._ends)
        return emitted, accepted, chance


@dataclass(frozen=True, slots=True)
class Expected:
    """One verifier at n places; every array is (n,).

    Of so many `texts`: which one a place is in, the chance (`weight`) that a round starts there,
    relative to the references', the `tokens` that a call emits there in expectation, and the
    `accepted` ones among them.
    """

    texts: int
    text: NDArray[np.int64]
    weight: Reals
    tokens: Reals
    accepted: Reals

    def mean(self, values: Reals) -> Reals:
        """Weighted mean of values (m,) at the first m places, resampled: (1 + RESAMPLES,)."""
        first, weights = slice(0, len(values)), resamples(self.texts)
        above, below = (
            weights @ np.bincount(self.text[first], each, self.texts)
            for each in (self.weight[first] * values, self.weight[first])
        )
        # A resample may have none of the texts in which places were taken.
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)

    def over(self, base: Expected) -> Reals:
        """Tokens a call over another's, at the places of both, resampled: (1 + RESAMPLES,)."""
        shared = min(len(self.text), len(base.text))
        return np.asarray(self.mean(self.tokens[:shared]) / base.mean(base.tokens[:shared]))


def expected(
    verifier: Enumerated,
    references: Sequence[Enumerated],
    places: Sequence[Scored],
    texts: Collection[int],
) -> Expected:
    """Enumerate a verifier at those places that are in some texts, given by their numbers.

    The places are of a kind of draft that it takes; `references` are those that `drafted` was
    given.
    """
    number, rows = {text: index for index, text in enumerate(texts)}, []
    for place in places:
        if place.text not in number:
            continue
        tokens, accepted, _ = verifier(place)
        weight = 1.0
        if place.before is not None:
            chance = sum(reference(place.before)[2] for reference in references) / len(references)
            weight = min(MOST_WEIGHT, verifier(place.before)[2] / chance) if chance > 0 else 1.0
        rows.append((number[place.text], weight, tokens, accepted))
    text, *others = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Expected(len(number), text.astype(np.int64), *others)


@dataclass(frozen=True, slots=True)
class TableInputs:
    """The models, prompts and times that a table is made of.

    Attributes:
        prompts: the name of its prompt set and the tokens (T,) of each.
        times: what speeds are predicted from, by whether a draft branches; empty: none are.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: Sequence[tuple[str, Tensor]]
    sampling: SamplingConfig
    times: Mapping[bool, RoundSeconds] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 96


def verifier_table(
    measured: TableInputs,
    *,
    seconds: float,
    report: Callable[[str], object] = lambda text: None,
) -> list[VerifierRow]:
    """Every verifier on every kind of draft, of all prompt sets together and of each.

    It may take so many `seconds`; of each kind one batch of texts is made all the same, and
    `ENOUGH` places a row. `report` is called with each kind when it is begun, and with why one was
    left out.
    """
    shares = {name: TEXTS + len(kind.rows()) for name, kind in FORMS.items()}
    table: list[VerifierRow] = []
    for name, kind in FORMS.items():
        report(name)
        try:
            table += verifier_rows(kind, measured, seconds * shares[name] / sum(shares.values()))
        except ConfigError as error:
            report(f"{name}: left out: {error}")
    return sorted(table, key=lambda row: row.dataset != ALL_SETS)


def table_of(
    experiment: Experiment, results: Results, report: Callable[[str], object]
) -> list[VerifierRow]:
    """The table of an evaluation's models and prompts, if it asks for one and anything drafts."""
    config = experiment.config
    if not config.verifier_seconds or not any(run.method.uses_draft for run in results.runs):
        return []
    of_draft = [run for run in results.runs if not run.method.mtp]
    plain, chains, branching = (
        [record for run in runs for record in run.generations]
        for runs in (
            [run for run in of_draft if run.method.decoder == "plain"],
            [run for run in of_draft if run.method.is_chain and run.method.fixed_length],
            [run for run in of_draft if run.method.branches],
        )
    )
    sets = results.datasets()
    measured = TableInputs(
        experiment.models.target,
        experiment.models.draft,
        [
            (each.dataset, torch.tensor(each.ids))
            for each in experiment.prompts
            if each.dataset in sets
        ],
        experiment.sampling,
        RoundSeconds.of(plain, chains, branching),
        experiment.seed,
        config.max_new_tokens,
    )
    with using_threads(int(results.environment.hardware["threads"] or 0)):
        return verifier_table(measured, seconds=config.verifier_seconds, report=report)


def verifier_rows(kind: DraftForm, measured: TableInputs, seconds: float) -> list[VerifierRow]:
    """The rows of one kind of draft, in about so many seconds."""
    begun, ends = time.perf_counter(), end_ids(measured.target.generation_config)
    rows = [
        Enumerated(kind.config(measured.sampling, name, **parameters), ends)
        for name, parameters in kind.rows()
    ]
    references, config = rows[: len(kind.references)], rows[0].config
    timed: list[tuple[DraftTree, Tensor]] = []
    places, texts = _places(kind, config, measured, references, seconds / 2, timed)
    for row in rows:
        row.microseconds = _microseconds(row.verifier, timed)
    until = begun + max(seconds, 1.25 * (time.perf_counter() - begun))
    _enumerate(rows, references, places, until)
    optima = _optima(config, places)
    if config.drafter == "chain":
        block = next(row for row in rows if row.config.verifier == "block")
        optima = [block(place)[1] for place in places[: block.places]]
    forwards = float(np.mean([place.forwards for place in places]))
    nodes = float(np.mean([len(place.tree) for place in places]))

    table = []
    sets = list(dict.fromkeys(texts))
    for dataset in ([ALL_SETS] if len(sets) > 1 else []) + sets:
        inside = [index for index, each in enumerate(texts) if dataset in (ALL_SETS, each)]
        best = np.array(
            [a for a, place in zip(optima, places, strict=False) if place.text in inside]
        )
        first: Expected | None = None
        for row in rows:
            part = expected(row, references, places[: row.places], inside)
            is_first, first = first is None, first or part
            over = part.over(first)
            tokens = first.mean(first.tokens) * over
            if np.isnan(tokens[0]):
                continue  # no place of this set was taken, or none where its rounds start
            # A ratio over few places may be off, but no call emits less than one token.
            emitted = Interval.of(np.maximum(1.0, tokens))
            known = slice(0, min(len(best), len(part.text)))
            most = part.mean(best[known])[0]
            # Where no place of a set has a weight, its means are of nothing.
            share = float(part.mean(part.accepted[known])[0] / most) if most > 0 else None
            ceiling = 1.0 + (emitted.value - 1.0) / share if share else None
            speedup = None
            if measured.times:
                extra = 1e-6 * (row.microseconds - rows[0].microseconds)
                times = measured.times[config.drafter != "chain"]
                speedup = times.speedup(emitted.value, forwards, nodes, extra)
            table.append(
                VerifierRow(
                    dataset=dataset,
                    verifier=row.config.verifier,
                    parameters=row.config.verifier_args,
                    draft_kind=kind.name,
                    lossless=VERIFIERS[row.config.verifier].lossless,
                    expected_tokens=emitted,
                    gain=None if is_first else Interval.of(over - 1.0),
                    positions=len(part.text),
                    ceiling=ceiling,
                    share_of_ceiling=share,
                    microseconds=row.microseconds,
                    speedup=speedup,
                )
            )
    return table


def _enumerate(
    rows: Sequence[Enumerated],
    references: Sequence[Enumerated],
    places: Sequence[Scored],
    until: float,
) -> None:
    """Enumerate all verifiers at one place after the other.

    One that has had its share of the time goes no further; references do, for weights need them.
    """
    share, going = max(0.0, until - time.perf_counter()) / len(rows), list(rows)
    for index, place in enumerate(places):
        if index >= ENOUGH:
            going = [row for row in going if row in references or row.seconds < share]
            if time.perf_counter() > until:
                break
        for row in going:
            row(place)
            if place.before is not None:
                row(place.before)
            row.places = index + 1


def _places(
    kind: DraftForm,
    config: DecodeConfig,
    measured: TableInputs,
    references: Sequence[Enumerated],
    seconds: float,
    timed: list[tuple[DraftTree, Tensor]],
) -> tuple[list[Scored], list[str]]:
    """Places in a random order, and the prompt set of each text, for about so many seconds."""
    begun = time.perf_counter()
    prompts = measured.prompts
    sets = list(dict.fromkeys(dataset for dataset, _ in prompts))
    of_set = [[each for each in prompts if each[0] == name] for name in sets]
    waiting = [each for turn in zip_longest(*of_set) for each in turn if each is not None]
    size = max(4, 2 * len(sets))
    places: list[Scored] = []
    texts: list[str] = []
    spent = 0.0
    while waiting and (not texts or spent * (1 + size / len(texts)) < seconds):
        batch, waiting = waiting[:size], waiting[size:]
        places += drafted(
            measured.target,
            measured.draft,
            [ids for _, ids in batch],
            config,
            references=[each.verifier for each in references],
            seed=seed_for(measured.seed, "verifiers", kind.name, len(texts)),
            max_new_tokens=measured.max_new_tokens,
            first_text=len(texts),
            timed=timed,
        )
        texts += [dataset for dataset, _ in batch]
        spent = time.perf_counter() - begun
        if sum(each.target.nbytes + each.tree.distributions.nbytes for each in places) > BYTES:
            break
    mixed = np.random.default_rng(measured.seed).permutation(len(places))
    return [places[index] for index in mixed], texts


def _microseconds(verifier: Verifier, drafts: Sequence[tuple[DraftTree, Tensor]]) -> float:
    """Median time of one sampled verification, over drafts that it has not met."""
    generator, seconds = torch.Generator().manual_seed(0), []
    for tree, target in drafts:
        begun = time.perf_counter()
        verifier.draw(tree, target, generator)
        seconds.append(time.perf_counter() - begun)
        if len(seconds) > 2 and sum(seconds) > 0.1:
            break
    return 1e6 * float(np.median(seconds[1:] or seconds or [0.0]))  # the first warms up


def _optima(config: DecodeConfig, places: Sequence[Scored]) -> list[float]:
    """Best acceptance of siblings at the first places; of other drafts it is not known."""
    if len(config.widths) != 1 or config.how not in ("iid", "distinct") or config.chooses:
        return []
    how: Literal["iid", "distinct"] = "iid" if config.how == "iid" else "distinct"
    return [
        optimal_acceptance(place.target[0], place.tree.distributions[0], len(place.tree), how)
        if len(place.tree)
        else 0.0
        for place in places[:OPTIMA]
    ]
