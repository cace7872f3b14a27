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
one random order, and each row takes the first of them, as many as its share of the time allows:
a row on fewer places is a random part of the same sample, and any two rows are compared on the
places that both took.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafts import DraftTree
from eval.measuring.intervals import resamples
from eval.verifiers.rule import Drawn, Verifier
from specdata.sampling import generator_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        chosen = np.random.default_rng([seed, index]).random(max_new_tokens + 1) < keep
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
        for number, record in enumerate(generation.rounds):
            here = next(rounds) if record.drafted else nothing
            if here is not None:
                here = replace(here, forwards=record.draft_forwards)
                if shown[id(generator)][number]:
                    starts.append(Start(index, here, before))
            before = here
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
        for weight, end in self.verifier.outcomes(scored.tree, scored.target):
            path = scored.paths[end.node]
            accepted += weight * len(path)
            emitted += weight * (len(path) + (not path or path[-1] not in self._ends))
            if path == scored.paths[scored.node]:  # siblings may hold one token twice
                chance += weight * float(end.distribution[scored.token])
        return emitted, accepted, chance


@dataclass(frozen=True, slots=True)
class Expected:
    """One verifier at n places; every array is (n,).

    Attributes:
        text: the number of the text that a place is in.
        weight: the chance that a round starts there, relative to the references'.
        tokens: that a call emits there in expectation.
        accepted: drafted tokens among them.
    """

    text: NDArray[np.int64]
    weight: Reals
    tokens: Reals
    accepted: Reals

    def mean(self, values: Reals, texts: int) -> Reals:
        """Weighted mean of values (m,) at the first m places, resampled: (1 + RESAMPLES,)."""
        first = slice(0, len(values))
        weights = resamples(texts)
        above, below = (
            weights @ np.bincount(self.text[first], each, texts)
            for each in (self.weight[first] * values, self.weight[first])
        )
        # A resample may have none of the texts in which places were taken.
        return np.divide(above, below, out=np.full_like(above, np.nan), where=below > 0)


def expected(
    own: Enumerated,
    references: Sequence[Enumerated],
    starts: Sequence[Start],
    *,
    seconds: float = float("inf"),
    least: int = 1,
) -> Expected:
    """Enumerate a verifier at places, in their order, for as long as the time allows.

    Args:
        own: the verifier.
        references: those that `drafted` was given.
        starts: places of a kind of draft that it takes.
        seconds: no place is begun after so long.
        least: places that are taken all the same.
    """
    begun = time.perf_counter()
    rows: list[tuple[float, ...]] = []
    for place in starts:
        if len(rows) >= least and time.perf_counter() - begun > seconds:
            break
        weight = 1.0
        if place.before is not None:
            met = sum(reference(place.before)[2] for reference in references) / len(references)
            weight = min(MOST_WEIGHT, own(place.before)[2] / met) if met > 0 else 1.0
        rows.append((place.text, weight, *own(place.here)[:2]))
    columns = list(zip(*rows, strict=True)) or [()] * 4
    text, *others = columns
    return Expected(np.array(text, dtype=np.int64), *(np.array(c, dtype=float) for c in others))
