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
kind equally many, but for the first verifier, which takes more, and slow rows, which take fewer.
A row's tokens are those of the first verifier over all its places, times the ratio of the two over
the places that both took (a ratio estimate: what luck the few places had, both had). A slow row,
which could weight few places, takes the weights of the first verifier, whose rounds start nearly
where its own do. Time is this thread's on a processor: what else a machine does costs no places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import TypeAdapter
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.measuring.intervals import Interval, resamples
from eval.measuring.pooled import ALL_SETS
from eval.measuring.results import ENOUGH, VerifierRow
from eval.verifiers import VERIFIERS
from eval.verifiers.biased import opt_loss, uno_loss
from eval.verifiers.optimum import optimal_acceptance
from eval.verifiers.rule import Drawn, Verifier
from specdata.errors import ConfigError
from specdata.models import end_ids
from specdata.sampling import SamplingConfig, generator_for, numpy_generator_for, seed_for
from specdata.storage.files import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from eval.measuring.records import PromptRecord
    from eval.measuring.results import Results

Reals = NDArray[np.float64]
MOST_WEIGHT = 8.0
"""Where the references hardly ever end a round as v does, a weight would be a rare large one."""


@dataclass(frozen=True)
class Scored:
    """One round: a draft, the target's distributions, and how the reference ended it.

    Attributes:
        tree: the draft, N nodes; empty at the end of a budget.
        target: (N+1, V) the target's distributions.
        node: the last accepted node.
        token: the token after it.
        forwards: forwards of the draft.
    """

    tree: DraftTree
    target: Tensor
    node: int
    token: int
    forwards: int = 0

    @cached_property
    def compact(self) -> Scored:
        """The same round over fewer tokens, where the vocabulary is large.

        Tokens that are neither drafted nor among the `NAMED` likeliest of a node are added up there
        in `BINS` bins of nearly one p/q. Verifiers read sums of functions f(p, q) with f(cp, cq) =
        c f(p, q), so tokens of one p/q are as good as one token.
        """
        tree, p = self.tree, self.target
        if p.shape[-1] <= LARGE or not len(tree):
            return self
        q, rows = tree.distributions, tree.distribution_index.tolist()
        row_of = dict(zip(tree.parent_list, rows, strict=True))  # a node -> what it was followed by
        node_of = {row: node for node, row in reversed(row_of.items())}  # where it is met first
        likeliest = [x.topk(NAMED).indices for n, m in row_of.items() for x in (p[n], q[m])]
        named = torch.cat([tree.tokens, torch.tensor([self.token]), *likeliest])
        named = torch.unique(named)
        rest = torch.ones(p.shape[-1], dtype=torch.bool)
        rest[named] = False
        number = {token: place for place, token in enumerate(named.tolist())}
        bins = {}
        for row, node in node_of.items():
            ratio = (p[node, rest].log() - q[row, rest].log()).nan_to_num(0.0).clamp(-8.0, 8.0)
            bins[row] = ((ratio + 8.0) * (BINS - 1) / 16.0).round().long()
        anyhow = torch.zeros_like(bins[rows[0]])

        def fewer(values: Tensor, row: int | None) -> Tensor:
            binned = values.new_zeros(BINS).index_add_(0, bins.get(row, anyhow), values[rest])
            return torch.cat([values[named], binned])

        smaller = replace(
            tree,
            tokens=torch.tensor([number[token] for token in tree.token_list]),
            distributions=torch.stack([fewer(each, row) for row, each in enumerate(q)]),
        )
        scores = torch.stack([fewer(each, row_of.get(node)) for node, each in enumerate(p)])
        return replace(self, tree=smaller, target=scores, token=number[self.token])

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """The drafted tokens down to each node: N+1."""
        found: list[tuple[int, ...]] = [()]
        for parent, token in zip(self.tree.parent_list, self.tree.token_list, strict=True):
            found.append((*found[parent], token))
        return found


@dataclass(frozen=True, slots=True)
class Start:
    """A place where a round starts.

    Attributes:
        text: the number of its prompt.
        here: the round.
        before: the round that ended here; None for the first of a text.
    """

    text: int
    here: Scored
    before: Scored | None


@dataclass(frozen=True, slots=True)
class _Recorder(Verifier):
    """Has each round verified by one of several verifiers, drawn at random, and keeps it.

    Args:
        references: the verifiers.
        kept: generator of a text, by its `id` -> of each of its rounds, whether it is kept.
        rounds: the same -> its rounds; None for one that was not kept.
    """

    references: tuple[Verifier, ...] = ()
    kept: dict[int, Sequence[bool]] = field(default_factory=dict)
    rounds: dict[int, list[Scored | None]] = field(default_factory=dict)

    def draw(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Drawn:
        """Sample one outcome of one reference."""
        which = torch.randint(
            len(self.references), (), generator=generator, device=generator.device
        )
        drawn = self.references[int(which)].draw(tree, target, generator)
        rounds = self.rounds.setdefault(id(generator), [])
        scored = None
        if self.kept[id(generator)][len(rounds)]:
            fields = ("tokens", "parents", "distributions", "distribution_index")
            moved = {name: getattr(tree, name).cpu() for name in fields}
            node = drawn.nodes[-1] if drawn.nodes else 0
            scored = Scored(replace(tree, **moved), target.cpu(), node, drawn.token)
        rounds.append(scored)
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
    keep: float = 1.0,
    size: int = 8,
) -> list[Start]:
    """The rounds of texts that the target continues, each with its draft and the scores of it.

    Args:
        target: the target.
        draft: the draft.
        prompts: each (T,) int64.
        config: what to draft, and the sampling.
        references: lossless verifiers that end the rounds, one drawn at each; none: config's own.
        seed: of everything that is drawn.
        max_new_tokens: of each text.
        keep: the share of rounds that are returned, drawn at random: a draft of N nodes holds up to
            2 N + 1 distributions, 0.2 MB each at V = 49,152.
        size: texts decoded at a time.

    Raises:
        ConfigError: if the models cannot decode so.
    """
    own = config.make_verifier()
    recorder = _Recorder("mixture", own.rule, own.takes, references=tuple(references) or (own,))
    generators = [generator_for(seed, "verifiers", str(index)) for index in range(len(prompts))]
    shown = {}
    for index, generator in enumerate(generators):
        chosen = numpy_generator_for(seed, "verifiers", index).random(max_new_tokens + 1) < keep
        shown[id(generator)] = chosen
        # A round that is returned, and the one before it.
        recorder.kept[id(generator)] = (chosen[:-1] | chosen[1:]).tolist()
    decoder = SpeculativeDecoder.from_config(target, draft, config, verifier=recorder)
    generations = decoder.generate_batch(
        prompts, max_new_tokens=max_new_tokens, generators=generators, size=size
    )
    nothing = Scored(
        DraftTree.chain(torch.empty(0, dtype=torch.long), torch.empty(0, 1)),
        torch.empty(1, 1),
        0,
        0,
    )
    starts = []
    for index, (generator, generation) in enumerate(zip(generators, generations, strict=True)):
        rounds = iter(recorder.rounds.get(id(generator), []))
        before: Scored | None = None
        number = 0  # of the rounds that drafted; those without a draft begin or end a text
        for record in generation.rounds:
            here = next(rounds) if record.drafted else nothing
            if here is not None:
                here = replace(here, forwards=record.draft_forwards)
                if shown[id(generator)][number]:
                    starts.append(Start(index, here, before))
            before = here
            number += record.drafted > 0
    return starts


class Enumerated:
    """What a verifier does with scored drafts, each of them enumerated once.

    Args:
        verifier: its residual does not persist over rounds.
        ends: token ids that end a text, after which nothing is emitted.
    """

    def __init__(self, verifier: Verifier, ends: frozenset[int]) -> None:
        self.verifier = verifier
        self._ends = ends
        self._known: dict[int, tuple[Scored, tuple[float, float, float]]] = {}

    def __call__(self, scored: Scored) -> tuple[float, float, float]:
        """Of a round: expected emitted tokens, accepted ones, and the chance to end as it did."""
        if id(scored) not in self._known:  # kept with what it is of, so that the id stays its own
            self._known[id(scored)] = scored, self._enumerate(scored)
        return self._known[id(scored)][1]

    def _enumerate(self, scored: Scored) -> tuple[float, float, float]:
        if not len(scored.tree):
            return 1.0, 0.0, 1.0
        emitted = accepted = chance = 0.0
        few = scored.compact
        for weight, end in self.verifier.outcomes(few.tree, few.target):
            path = scored.paths[end.node]
            accepted += weight * len(path)
            emitted += weight * (len(path) + (not path or path[-1] not in self._ends))
            if path == scored.paths[scored.node]:  # siblings may hold one token twice
                chance += weight * float(end.distribution[few.token])
        return emitted, accepted, chance


@dataclass(frozen=True, slots=True)
class Expected:
    """One verifier at n places; every array is (n,).

    Attributes:
        texts: how many texts there are.
        text: the number of the text that a place is in.
        weight: the chance that a round starts there, relative to the references'.
        tokens: that a call emits there in expectation.
        accepted: drafted tokens among them.
    """

    texts: int
    text: NDArray[np.int64]
    weight: Reals
    tokens: Reals
    accepted: Reals

    def of_texts(self, texts: Sequence[int]) -> Expected:
        """Those of some texts, which are numbered anew."""
        number = {text: new for new, text in enumerate(texts)}
        inside = np.array([text in number for text in self.text], dtype=bool)
        renamed = np.array([number[text] for text in self.text[inside].tolist()], dtype=np.int64)
        columns = (each[inside] for each in (self.weight, self.tokens, self.accepted))
        return Expected(len(texts), renamed, *columns)

    def mean(self, values: Reals) -> Reals:
        """Weighted mean of values (m,) at the first m places, resampled: (1 + RESAMPLES,)."""
        first, weights = slice(0, len(values)), resamples(self.texts)
        above, below = (
            weights @ np.bincount(self.text[first], each, self.texts)
            for each in (self.weight[first] * values, self.weight[first])
        )
        # A resample may have none of the texts in which places were taken.
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)

    def over(self, other: Expected) -> Reals:
        """Tokens a call over another's, at the places of both, resampled: (1 + RESAMPLES,)."""
        both = min(len(self.text), len(other.text))
        above, below = (each.mean(each.tokens[:both]) for each in (self, other))
        return np.asarray(above / below)


def expected(
    own: Enumerated,
    references: Sequence[Enumerated],
    places: Sequence[Start],
    started: Enumerated | None = None,
) -> Expected:
    """Enumerate a verifier at places.

    Args:
        own: the verifier.
        references: those that `drafted` was given.
        places: of a kind of draft that it takes.
        started: whose rounds start there; None: its own.
    """
    rows: list[tuple[float, ...]] = []
    started = started or own
    for place in places:
        here, weight = own(place.here), 1.0
        if place.before is not None:
            met = sum(reference(place.before)[2] for reference in references) / len(references)
            weight = min(MOST_WEIGHT, started(place.before)[2] / met) if met > 0 else 1.0
        rows.append((place.text, weight, *here[:2]))
    text, *others = list(zip(*rows, strict=True)) or [()] * 4
    return Expected(
        1 + max(text, default=0),
        np.array(text, dtype=np.int64),
        *(np.array(column, dtype=np.float64) for column in others),
    )


Draws = dict[str, Any]
CHAIN = ("token", "block", "naive")
SEVERAL = ("rrs", "traversal", "naive")
APART = ("rrs_wor", "traversal", "naive")
KINDS: Mapping[str, tuple[Draws, tuple[str, ...]]] = {
    "chain of 4": ({"length": 4}, CHAIN),
    "chain of 8": ({"length": 8}, CHAIN),
    "2 paths of 4": ({"drafter": "paths", "paths": 2, "length": 4}, SEVERAL),
    "4 paths of 4": ({"drafter": "paths", "paths": 4, "length": 4}, SEVERAL),
    "4 siblings": ({"drafter": "tree", "widths": (4,)}, SEVERAL),
    "4 siblings, distinct": ({"drafter": "tree", "widths": (4,), "siblings": "distinct"}, APART),
    "4 siblings, greedy": (
        {"drafter": "tree", "widths": (4,), "siblings": "greedy"},
        ("greedy_draft", "naive"),
    ),
    "tree 2x2x1": ({"drafter": "tree", "widths": (2, 2, 1)}, SEVERAL),
    "tree 2x2x1, distinct": (
        {"drafter": "tree", "widths": (2, 2, 1), "siblings": "distinct"},
        APART,
    ),
    "tree 4x2x2": ({"drafter": "tree", "widths": (4, 2, 2)}, SEVERAL),
    "tree 4x2x2, distinct": (
        {"drafter": "tree", "widths": (4, 2, 2), "siblings": "distinct"},
        APART,
    ),
    "tree 4x2x2, greedy": (
        {"drafter": "tree", "widths": (4, 2, 2), "siblings": "greedy"},
        ("greedy_draft", "naive"),
    ),
    "dynamic tree": ({"drafter": "dynamic_tree", "nodes": 8, "depth": 4, "gain": 0.5}, ("naive",)),
}
"""Kind of draft -> how it is drawn, and the references that end its rounds; the others of the kind
are compared with the first."""
PARAMETERS: Mapping[str, Sequence[dict[str, Any]]] = {
    "importance": (
        {"solver": "truncated", "s": 5},
        {"solver": "truncated", "s": 5, "alphabet": 40},
        {"solver": "lp", "alphabet": 40},
        {"solver": "luce"},
    ),
    "multipath_block": ({"solver": "truncated", "s": 5}, {"solver": "luce"}),
    "biased_uno": ({"epsilon": 0.02}, {"epsilon": 0.1}),
    "biased_opt": ({"epsilon": 0.02}, {"epsilon": 0.1}),
}
"""The useful settings of verifiers that have some. With one candidate, on a chain, the first is
like all others."""
SMALL = ("2 paths of 4", "4 siblings")
"""Kinds on which a linear program is solved: tens of milliseconds a node."""
LEAST = 4
"""Places that a row takes whatever the time; `ENOUGH` while the table has time at all."""
TEXTS = 10
"""The texts of a kind take about as long as so many of its rows."""
TIMED = 12
"""Places at which a sampled verification is timed; at slow ones, for a tenth of a second."""
LARGE, NAMED, BINS = 4096, 48, 256
"""Beyond so many tokens, verifiers are enumerated over fewer: see `Scored.compact`."""
BYTES = 1 << 30
"""Distributions that are held of one kind."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, fitted to decodings one prompt at a time; Eq. 5.1 of SpecDec++ with a node's cost.

    Attributes:
        plain: of a token of the target alone.
        round: of a round, a token verification included.
        forward: of a draft's forward.
        node: of a drafted node more in the target's forward.
    """

    plain: float
    round: float
    forward: float
    node: float

    @classmethod
    def of(
        cls,
        plain: Sequence[PromptRecord],
        chains: Sequence[PromptRecord],
        branching: Sequence[PromptRecord],
    ) -> Mapping[bool, Times]:
        """Fitted to generations: whether a draft branches -> times; empty if none were timed.

        A target's forward costs by its nodes whatever they are; drafting, and what a round takes
        besides models, cost more where a draft branches. What was not decoded has the other's.
        """
        drafting = (*chains, *branching)
        if not plain or not drafting or not all(r.seconds for r in (*plain, *drafting)):
            return {}
        from scipy.optimize import nnls

        counts = np.array([[r.rounds, r.n_draft] for r in drafting], dtype=np.float64)
        per_round, node = nnls(counts, np.array([r.target_seconds for r in drafting]))[0]
        times = {}
        for branches, records in ((False, chains or branching), (True, branching or chains)):
            total = {
                name: sum(getattr(r, name) for r in records)
                for name in ("rounds", "draft_forwards", "draft_seconds", "overhead_seconds")
            }
            times[branches] = cls(
                plain=sum(r.seconds for r in plain) / sum(r.tokens for r in plain),
                round=per_round + total["overhead_seconds"] / total["rounds"],
                forward=total["draft_seconds"] / max(1, total["draft_forwards"]),
                node=float(node),
            )
        return times

    def speedup(self, tokens: float, forwards: float, nodes: float, extra: float) -> float:
        """Over the target alone, of rounds of these counts; `extra` is of the verification."""
        return (
            tokens * self.plain / (self.round + forwards * self.forward + nodes * self.node + extra)
        )


def rows_of(kind: str, sampling: SamplingConfig) -> list[tuple[str, dict[str, Any]]]:
    """Verifiers with their parameters that take a kind, its references first."""
    settings, references = KINDS[kind]
    form = DecodeConfig(verifier=references[0], **settings, **asdict(sampling)).kind
    rows: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in references]
    for name, spec in VERIFIERS.items():
        if name in references or form not in spec.takes or spec.residual_persists:
            continue
        given = PARAMETERS.get(name, [{}])
        several = spec.branching and form == "chain"
        given = given[:1] if several else given
        rows += [(name, each) for each in given if each.get("solver") != "lp" or kind in SMALL]
    return rows


@dataclass(frozen=True, slots=True)
class Measured:
    """What a table is of.

    Attributes:
        target: the target.
        draft: the draft.
        prompts: the name of its prompt set and the tokens (T,) of each.
        sampling: of both models.
        times: what speeds are predicted from, by whether a draft branches; empty: none are.
        decoded: methods that were decoded, by name.
        seed: of everything drawn.
        max_new_tokens: of each text.
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: Sequence[tuple[str, Tensor]]
    sampling: SamplingConfig
    times: Mapping[bool, Times] = field(default_factory=dict)
    decoded: Mapping[str, DecodeConfig] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 96


def verifier_table(
    measured: Measured,
    *,
    seconds: float,
    folder: Path,
    report: Callable[[str], object] = lambda said: None,
) -> list[VerifierRow]:
    """Every verifier on every kind of draft, of all prompt sets together and of each.

    Args:
        measured: the pair, its prompts and its times.
        seconds: on a processor, that it may take; of each kind one batch of texts is made all the
            same, and `LEAST` places a row.
        folder: keeps the rows of each kind as soon as they are made; kinds that are there are read.
        report: called with each kind when it is begun, and with why one was left out.
    """
    share = {kind: TEXTS + len(rows_of(kind, measured.sampling)) for kind in KINDS}
    stored = TypeAdapter(list[VerifierRow])
    rows: list[VerifierRow] = []
    todo = [kind for kind in KINDS if not (folder / f"{kind}.json").is_file()]
    left = seconds * sum(share[kind] for kind in todo) / sum(share.values())
    for kind in KINDS:
        path = folder / f"{kind}.json"
        if kind in todo:
            report(kind)
            begun = time.thread_time()
            try:
                own = left * share[kind] / sum(share[each] for each in todo)
                found = verifier_rows(kind, measured, own)
            except ConfigError as error:
                report(f"{kind}: left out: {error}")
                found = []
            write_json(path, stored.dump_python(found, mode="json"))
            left = max(0.0, left - (time.thread_time() - begun))
            todo.remove(kind)
        rows += stored.validate_json(path.read_bytes())
    return sorted(rows, key=lambda row: row.dataset != ALL_SETS)


def verifier_rows(kind: str, measured: Measured, seconds: float) -> list[VerifierRow]:
    """The rows of one kind of draft, in about so many seconds.

    Raises:
        ConfigError: if the models cannot draft so.
    """
    begun = time.thread_time()
    settings, names = KINDS[kind]
    sampling = asdict(measured.sampling)
    config = DecodeConfig(verifier=names[0], **settings, **sampling)
    ends, rows = end_ids(measured.target), rows_of(kind, measured.sampling)
    own = [Enumerated(VERIFIERS[name].make(**given), ends) for name, given in rows]
    references = own[: len(names)]
    places, texts = _places(kind, config, measured, references, seconds / 2)

    micros = [_microseconds(each.verifier, places) for each in own]
    until = begun + max(seconds, 1.25 * (time.thread_time() - begun))
    table = _enumerated(own, references, places, until, ENOUGH if seconds > 0 else LEAST)
    optimum = _optimum(places, config, seconds / len(own)) if len(config.widths) == 1 else []
    forwards = float(np.mean([place.here.forwards for place in places]))
    nodes = float(np.mean([len(place.here.tree) for place in places]))

    made = []
    sets = list(dict.fromkeys(texts))
    for dataset in ([ALL_SETS] if len(sets) > 1 else []) + sets:
        inside = [index for index, each in enumerate(texts) if dataset in (ALL_SETS, each)]
        parts = [each.of_texts(inside) for each in table]
        best = [a for a, place in zip(optimum, places, strict=False) if place.text in inside]
        first = parts[0]
        whole, over = first.mean(first.tokens), [part.over(first) for part in parts]
        of_block = [float(over[i][0]) for i, (name, _) in enumerate(rows) if name == "block"]
        block = next((each for each in of_block if each > 0), None)
        for index, ((name, given), part) in enumerate(zip(rows, parts, strict=True)):
            if np.isnan(whole[0] * over[index][0]):
                continue  # no place of this set was taken, or none where its rounds start
            # A ratio over few places may be off, but no call emits less than one token.
            tokens = Interval.of(np.maximum(1.0, whole * over[index]))
            ceiling: float | None = None
            share: float | None = None
            if block is not None:
                ceiling, share = float(whole[0] * block), float(over[index][0] / block)
            elif best:
                alike = slice(0, min(len(best), len(part.text)))
                most = float(part.mean(np.array(best[alike]))[0])
                share = float(part.mean(part.accepted[alike])[0]) / most if most > 0 else None
                ceiling = 1.0 + float(first.mean(np.array(best[: len(first.text)]))[0])
            # Where no place of a set has a weight, its means are of nothing.
            ceiling = None if ceiling is None or np.isnan(ceiling) else ceiling
            share = None if share is None or np.isnan(share) else share
            speedup = bias = None
            if measured.times:
                extra = 1e-6 * (micros[index] - micros[0])
                times = measured.times[config.drafter != "chain"]
                speedup = times.speedup(tokens.value, forwards, nodes, extra)
            if not VERIFIERS[name].lossless:
                bias = _bias(own[index], given["epsilon"], places)
            alone = DecodeConfig(verifier=name, verifier_args=given, **settings, **sampling)
            made.append(
                VerifierRow(
                    dataset=dataset,
                    verifier=name,
                    parameters=given,
                    draft_kind=kind,
                    lossless=VERIFIERS[name].lossless,
                    expected_tokens=tokens,
                    gain=Interval.of(over[index] - 1.0) if index else None,
                    positions=len(part.text),
                    ceiling=ceiling,
                    share_of_ceiling=share,
                    bias=bias,
                    microseconds=micros[index],
                    speedup=speedup,
                    decoded=next(
                        (m for m, each in measured.decoded.items() if each == alone), None
                    ),
                )
            )
    return made


def _enumerated(
    own: Sequence[Enumerated],
    references: Sequence[Enumerated],
    places: Sequence[Start],
    until: float,
    least: int,
) -> list[Expected]:
    """The first verifier at places, then the usual ones together, then each slow one.

    A group has its part of what time is left, the first verifier as much as three.
    """
    left, cost = until - time.thread_time(), []
    for each in own:
        begun = time.thread_time()
        for place in places[:LEAST]:
            each(place.here)
        cost.append((time.thread_time() - begun) / LEAST)
    most = max(0.0, left) / (2 * least * len(own))  # with the round before each place
    slow = sorted((i for i in range(1, len(own)) if cost[i] > most), key=cost.__getitem__)
    usual = [index for index in range(1, len(own)) if index not in slow]
    table: dict[int, Expected] = {}
    for group in filter(None, ([0], usual, *([index] for index in slow))):
        shares = 3 if group == [0] else len(group)
        begun = time.thread_time()
        end = begun + (until - begun) * shares / (len(own) - len(table) + shares - len(group))
        started = references[0] if group[0] in slow else None
        taken = 0
        floor = 4 * least if group == [0] else least
        while not taken or (taken < len(places) and (taken < floor or time.thread_time() < end)):
            taken += max(LEAST, taken // 8)
            for index in group:  # each place is enumerated once: what was taken is known
                table[index] = expected(own[index], references, places[:taken], started)
    return [table[index] for index in range(len(own))]


def _places(
    kind: str,
    config: DecodeConfig,
    measured: Measured,
    references: Sequence[Enumerated],
    seconds: float,
) -> tuple[list[Start], list[str]]:
    """Places in a random order, and the prompt set of each text, for about so many seconds."""
    begun = time.thread_time()
    prompts = measured.prompts
    sets = list(dict.fromkeys(dataset for dataset, _ in prompts))
    of_set = [[each for each in prompts if each[0] == name] for name in sets]
    waiting = [each for turn in zip_longest(*of_set) for each in turn if each is not None]
    size = max(4, 2 * len(sets))
    nodes = {
        "chain": config.stop.longest,
        "paths": config.paths * config.stop.longest,
        "tree": int(np.cumprod(config.widths).sum()) if config.widths else 0,
        "dynamic_tree": config.nodes,
    }[config.drafter]
    row = 4 * measured.target.config.get_text_config().vocab_size  # bytes
    of_batch = size * measured.max_new_tokens * row * (2 * nodes + 1)  # at most
    places: list[Start] = []
    texts: list[str] = []
    spent = 0.0
    while waiting and (not texts or spent * (1 + size / len(texts)) < seconds):
        batch, waiting = waiting[:size], waiting[size:]
        found = drafted(
            measured.target,
            measured.draft,
            [ids for _, ids in batch],
            config,
            references=[each.verifier for each in references],
            seed=seed_for(measured.seed, "verifiers", kind, len(texts)),
            max_new_tokens=measured.max_new_tokens,
            keep=min(1.0, BYTES / of_batch),
            size=size,
        )
        places += [replace(place, text=len(texts) + place.text) for place in found]
        texts += [dataset for dataset, _ in batch]
        spent = time.thread_time() - begun
    mixed = np.random.default_rng(measured.seed).permutation(len(places))
    return [places[index] for index in mixed], texts


def decoded_only(results: Results) -> list[VerifierRow]:
    """Rows of verifiers whose residual outlives a round, which decoding alone measures."""
    return [
        VerifierRow(
            dataset=run.dataset,
            verifier=run.method.verifier,
            parameters={},
            draft_kind=f"chain of {run.method.deepest}",
            lossless=run.method.lossless,
            expected_tokens=Interval(run.block_efficiency, *run.intervals["block_efficiency"]),
            gain=None,
            positions=run.rounds,
            ceiling=None,
            share_of_ceiling=None,
            bias=None,
            microseconds=None,
            speedup=run.speedup,
            decoded=run.name,
        )
        for run in results.runs
        if run.method.uses_draft and VERIFIERS[run.method.verifier].residual_persists
    ]


def _microseconds(verifier: Verifier, places: Sequence[Start]) -> float:
    """Median time of one sampled verification, over drafts that it has not met."""
    generator, seconds = torch.Generator().manual_seed(0), []
    for place in [place for place in places if len(place.here.tree)][: TIMED + 1]:
        begun = time.perf_counter()
        verifier.draw(place.here.tree, place.here.target, generator)
        seconds.append(time.perf_counter() - begun)
        if len(seconds) > 2 and sum(seconds) > 0.1:
            break
    return 1e6 * float(np.median(seconds[1:] or seconds or [0.0]))  # the first warms up


def _optimum(places: Sequence[Start], config: DecodeConfig, seconds: float) -> list[float]:
    """Best acceptance of siblings at the first places, as many as the time allows."""
    if config.how not in ("iid", "distinct"):
        return []
    begun = time.thread_time()
    found: list[float] = []
    how: Literal["iid", "distinct"] = "iid" if config.how == "iid" else "distinct"
    for place in places:
        if len(found) >= LEAST and time.thread_time() - begun > seconds:
            break
        tree, p = place.here.compact.tree, place.here.compact.target[0]
        best = optimal_acceptance(p, tree.distributions[0], len(tree), how) if len(tree) else 0.0
        found.append(best)
    return found


def _bias(own: Enumerated, epsilon: float, places: Sequence[Start]) -> float:
    """Total variation of an emitted token's distribution from p, on average over tokens of chains.

    A token after a whole accepted chain is drawn from p itself.
    """
    loss = {"biased_uno": uno_loss, "biased_opt": opt_loss}[own.verifier.name]
    away = tokens = 0.0
    for scored in [place.here for place in places if len(place.here.tree)][:TIMED]:
        tree, target = scored.compact.tree, scored.compact.target
        lost = [loss(p, q, epsilon) for p, q in zip(target[:-1], tree.distributions, strict=True)]
        tokens += own(scored)[0]
        for weight, end in own.verifier.outcomes(tree, target):
            away += weight * sum(lost[: end.node + 1])
    return away / tokens if tokens else 0.0
