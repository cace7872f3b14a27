"""A certificate of exactness: is what a pair decodes distributed as the target alone, and how sure?

Three independent answers for each way of decoding:

* **enumerated**: at positions of this pair's own texts its verifier is followed through every draft
  and every random choice, over the eight likeliest tokens and one bucket for the rest, two tokens
  deep; how far is the distribution of the next three tokens from the target's?
* **sampled**: a two-sample test of texts that it decoded against texts of plain sampling;
* **greedy**: its greedy texts against transformers' `generate`, differences judged tie or bug.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2
from torch import Tensor

from eval.analysis.ties import compare_sequences
from eval.decode_config import DecodeConfig
from eval.decoder import SpeculativeDecoder
from eval.drafts import DraftTree
from eval.measuring.environment import Environment
from eval.measuring.experiment import Artefacts
from eval.measuring.methods import PLAIN, EvalConfig, MethodConfig
from eval.measuring.records import Strict
from eval.runtime.model import CachedModel
from eval.runtime.sequence import CachedSequence
from eval.verifiers.rule import Rng, Verifier, outcomes
from heads.probe import OtherSamplingWarning
from specdata.errors import ManifestError
from specdata.probability import SamplingConfig
from specdata.sampling import generator_for

LIKELIEST = 8
"""Tokens with an outcome of their own where a verifier is enumerated; all others share one."""
DEPTH = 2
"""Drafted tokens on a path there, and `WIDTH` candidates for the first where there may be more."""
WIDTH = 2
MOST_DRAFTS = 20_000
"""Drafts that are followed for one verifier: it takes fewer positions if each has many."""
DEVIATION = 1e-9
"""Total variation that rounding in float64 explains."""
LEVEL, POWER = 1e-3, 0.9
"""A sound decoder fails the two-sample test once in 1 / LEVEL times; power is stated for POWER."""
POSITIONS, GREEDY_TEXTS, BATCH = 4, 8, 16
"""Positions that are enumerated, texts that are compared, sequences decoded at a time."""
BINS = 4
"""Quarters that each of two neighbouring tokens falls into, by how much the draft prefers it."""

Prefix = tuple[int, ...]
Laws = Sequence[Tensor]
"""Distributions of the next outcome after 0, 1, ... outcomes: (S,), (S, S), ... for S outcomes."""


class Enumerated(Strict):
    """What enumeration found.

    Attributes:
        drafts: form of the drafts, `DraftTree.kind`.
        positions: how many positions of the pair's texts.
        outcomes: tokens told apart, the bucket included.
        total_variation: between the next `DEPTH` + 1 tokens and the target's, at the worst one.
    """

    drafts: str
    positions: int
    outcomes: int
    total_variation: float


class Sampled(Strict):
    """What the two-sample test found (`two_sample_test`).

    Attributes:
        statistic: chi-square of the two counts of cells.
        freedom: its degrees of freedom.
        samples: pairs of tokens, decoded and plain.
        p_value: chance of a statistic as large if both follow one distribution.
        visible_bias: total variation of the cells that would have been seen with power `POWER`.
    """

    statistic: float
    freedom: int
    samples: tuple[int, int]
    p_value: float
    visible_bias: float


class Greedy(Strict):
    """Greedy texts against transformers' own, as `eval.analysis.ties` judges them."""

    texts: int
    identical: int
    ties: int
    bugs: int


class Certified(Strict):
    """One way of decoding; `sampled` is None at temperature 0, where only greedy texts differ."""

    method: str
    verifier: str
    drafter: str
    stop: str
    lossless: bool
    enumerated: Enumerated
    sampled: Sampled | None
    greedy: Greedy | None

    @property
    def is_exact(self) -> bool:
        """True if nothing speaks against it."""
        return (
            self.enumerated.total_variation <= DEVIATION
            and (self.sampled is None or self.sampled.p_value >= LEVEL)
            and (self.greedy is None or self.greedy.bugs == 0)
        )


class Certificate(Strict):
    """The whole file."""

    schema_version: Literal[1] = 1
    target: str
    draft: str
    sampling: dict[str, float]
    environment: Environment
    methods: list[Certified]

    @property
    def is_kept(self) -> bool:
        """True if every way of decoding that is said to be lossless is exact."""
        return all(each.is_exact for each in self.methods if each.lossless)

    @property
    def sentence(self) -> str:
        """The finding, for a card."""
        exact = [each for each in self.methods if each.lossless and each.is_exact]
        said = []
        if exact:
            found = (f"{each.verifier} ({each.enumerated.drafts})" for each in exact)
            names = ", ".join(dict.fromkeys(found))
            worst = max(each.enumerated.total_variation for each in exact)
            said.append(
                f"Exact: {names}. Followed through every draft at positions of this pair, outputs "
                f"are the target's to {worst:.0e}"
            )
            if tests := [each.sampled for each in exact if each.sampled]:
                said[-1] += (
                    f"; decoded texts do not differ from plain sampling's (least p "
                    f"{min(test.p_value for test in tests):.2g} of {len(tests)}; a bias of "
                    f"{max(test.visible_bias for test in tests):.2g} would have been seen with "
                    f"power {POWER:g})"
                )
            if greedy := [each.greedy for each in exact if each.greedy]:
                texts, ties = sum(g.texts for g in greedy), sum(g.ties for g in greedy)
                said[-1] += f"; {texts - ties} of {texts} greedy texts are identical, {ties} tied"
        for each in self.methods:
            if each in exact:
                continue
            seen = f"total variation {each.enumerated.total_variation:.3g} over {DEPTH + 1} tokens"
            if each.sampled:
                seen += f", p {each.sampled.p_value:.2g} against plain sampling"
            if each.greedy:
                seen += f", {each.greedy.bugs} of {each.greedy.texts} greedy texts wrong"
            said.append(f"{'NOT EXACT' if each.lossless else 'Biased'}: {each.method} ({seen})")
        return ". ".join(said) + "."

    @classmethod
    def read(cls, path: Path) -> Certificate | None:
        """The certificate in a file; None if there is none. Raises ManifestError if damaged."""
        if not path.exists():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValueError as error:
            raise ManifestError(f"{path} is damaged: remove it, and certify again") from error


# --- enumeration --------------------------------------------------------------------------------


@torch.inference_mode()
def position(
    target: CachedSequence, draft: CachedSequence, context: Sequence[int], likeliest: int
) -> tuple[Laws, list[Laws]]:
    """Read both models after a context and after everything that may be drafted there.

    After every sequence of outcomes, 0 to `likeliest` - 1 are the tokens that both models together
    find likeliest there, and the last is all others, continued as the likeliest of them.

    Args:
        target: an empty sequence of the target.
        draft: an empty sequence of the draft.
        context: at least two token ids.
        likeliest: tokens with an outcome of their own.

    Returns:
        The target's `DEPTH` + 1 laws; those of the draft, and of a warmer one for paths that are
        drawn from different laws.
    """
    warm = draft.sampling
    warm = SamplingConfig(1.5 * warm.temperature, warm.top_k, warm.top_p)
    tokens: list[int] = []
    parents: list[int] = []
    laws: tuple[list[Tensor], ...] = ([], [], [])
    for sequence in (target, draft):
        sequence.model.run(sequence.append(list(context[:-1]), 1))
    for depth in range(DEPTH + 1):
        size = (likeliest + 1) ** depth
        logits = []
        for sequence in (target, draft):
            tree = sequence.append_tree(tokens, parents, [context[-1]], unrolled=bool(tokens))
            logits.append(sequence.model.run(tree)[-size:].double())
            sequence.crop(len(context) - 1)
        rows = (
            target.distribution(logits[0]),
            draft.distribution(logits[1]).cpu(),
            draft.distribution(logits[1], warm).cpu(),
        )
        p, q = rows[0].cpu(), rows[1]
        shown = (p + q).topk(likeliest + 1, dim=-1).indices  # (size, S)
        for law, row in zip(laws, (p, *rows[1:]), strict=True):
            own = row.gather(-1, shown[:, :-1])
            rest = row.scatter(-1, shown[:, :-1], 0.0).sum(-1, keepdim=True)
            shares = torch.cat([own, rest], dim=-1)
            shares /= shares.sum(-1, keepdim=True)
            law.append(shares.view((likeliest + 1,) * (depth + 1)))
        first = len(tokens) - size + 1 if depth else 0
        parents += [first + node for node in range(size) for _ in range(likeliest + 1)]
        tokens += shown.flatten().tolist()
    for sequence in (target, draft):
        sequence.reset()
    return laws[0], list(laws[1:])


def output_deviation(verifier: Verifier, p: Laws, qs: Sequence[Laws], kind: str) -> float:
    """Total variation between what follows a position under a verifier and under the target.

    One round emits up to `DEPTH` + 1 tokens; where it emits fewer, plain sampling adds the rest.

    Args:
        verifier: the acceptance rule.
        p: the target's laws there, as of `position`.
        qs: the drafts'.
        kind: the drafts' `DraftTree.kind`: a chain of `DEPTH` tokens, or `WIDTH` paths of as many,
            or a tree with `WIDTH` candidates and one after each.
    """
    following = [p[1].unsqueeze(-1) * p[2], p[2], torch.ones_like(p[2])]
    joint = torch.zeros_like(p[2])
    for weight, (tree, prefixes) in outcomes(lambda rng: _drawn(qs, kind, rng)):
        rows = torch.stack([p[len(prefix)][prefix] for prefix in prefixes])
        for chance, end in verifier.outcomes(tree, rows):
            prefix, mass = prefixes[end.node], weight * chance
            if verifier.residual_persists:
                for token, share in enumerate(end.distribution.tolist()):
                    if share > 0:
                        after = verifier.after(tree, rows, end, token)
                        for chosen, sequence in _continued(after, (*prefix, token), p, qs[0]):
                            joint[sequence] += mass * share * chosen
                continue
            rest = following[len(prefix)][prefix]
            first = end.distribution.view(-1, *[1] * (rest.dim() - 1))
            joint[prefix] += mass * first * rest
    law = p[0].view(-1, 1, 1) * following[0]
    return 0.5 * float((joint - law).abs().sum())


def _continued(
    verifier: Verifier, sequence: Prefix, p: Laws, q: Laws
) -> Iterator[tuple[float, Prefix]]:
    """Every continuation to `DEPTH` + 1 tokens by rounds without a draft, with its probability."""
    if len(sequence) > DEPTH:
        yield 1.0, sequence
        return
    row, tail = p[len(sequence)][sequence], q[len(sequence)][sequence]
    empty = torch.zeros(0, dtype=torch.long)
    tree = DraftTree.chain(empty, torch.zeros(0, len(row), dtype=row.dtype), tail)
    for chance, end in verifier.outcomes(tree, row.unsqueeze(0)):
        for token, share in enumerate(end.distribution.tolist()):
            if share > 0:
                after = verifier.after(tree, row.unsqueeze(0), end, token)
                for weight, whole in _continued(after, (*sequence, token), p, q):
                    yield chance * share * weight, whole


def _drawn(qs: Sequence[Laws], kind: str, rng: Rng) -> tuple[DraftTree, list[Prefix]]:
    """Draw a draft through `rng`: the draft, and the outcomes that lead to each node."""
    shape, _, how = kind.partition(", ")
    prefixes: list[Prefix] = [()]
    parents: list[int] = []
    drawn_from: list[tuple[int, Prefix]] = []
    level = [(0, 0)]  # nodes to continue, and by which of `qs`
    for width in (1 if shape == "chain" else WIDTH, *[1] * (DEPTH - 1)):
        grown = []
        for node, path in level:
            prefix = prefixes[node]
            paths = range(width) if how == "independent" and not node else [path] * width
            weights = [qs[law][len(prefix)][prefix].tolist() for law in paths]
            for law, token in zip(paths, _siblings(weights, how, rng), strict=False):
                prefixes.append((*prefix, token))
                parents.append(node)
                drawn_from.append((law, prefix))
                grown.append((len(parents), law))
        level = grown
    rows = list(dict.fromkeys(drawn_from))
    tree = DraftTree(
        torch.tensor([prefix[-1] for prefix in prefixes[1:]]),
        torch.tensor(parents),
        torch.stack([qs[law][len(prefix)][prefix] for law, prefix in rows]),
        torch.tensor([rows.index(row) for row in drawn_from]),
        "chain" if shape == "chain" else "paths" if shape == "paths" else "tree",
        {"distinct": "distinct", "greedy": "greedy", "chosen": "chosen"}.get(how, "iid"),  # type: ignore[arg-type]
    )
    return tree.checked(), prefixes


def _siblings(weights: list[list[float]], how: str, rng: Rng) -> list[int]:
    """Candidates for one position, one for each of `weights`, fewer where tokens run out."""
    if how not in ("distinct", "greedy", "chosen"):
        return [rng.categorical(row) for row in weights]
    left, tokens = list(weights[0]), []
    for number in range(len(weights)):
        if not any(left):
            break
        drawn = how == "distinct" or (how == "greedy" and number == len(weights) - 1)
        token = rng.categorical(left) if drawn else max(range(len(left)), key=left.__getitem__)
        left[token] = 0.0
        tokens.append(token)
    return tokens


def enumerate_verifier(
    config: DecodeConfig,
    target: CachedModel,
    draft: CachedModel,
    contexts: Sequence[Sequence[int]],
    likeliest: int = LIKELIEST,
) -> Enumerated:
    """Follow a way of decoding through every draft at some positions.

    Args:
        config: the way of decoding.
        target: the target.
        draft: the run's draft.
        contexts: token ids before each position, at least two.
        likeliest: tokens with an outcome of their own.
    """
    verifier, kind = config.make_verifier(), config.kind
    likeliest = min(likeliest, target.model.config.get_text_config().vocab_size - 1)
    nodes = DEPTH if kind == "chain" else WIDTH * DEPTH
    drafts = 1 if kind.endswith("chosen") else (likeliest + 1) ** nodes
    contexts = contexts[: max(1, MOST_DRAFTS // drafts)]
    worst = 0.0
    for context in contexts:
        own = target.sequence(0, config.sampling)
        p, qs = position(own, draft.sequence(0, config.sampling), context, likeliest)
        worst = max(worst, output_deviation(verifier, p, qs, kind))
    return Enumerated(
        drafts=kind, positions=len(contexts), outcomes=likeliest + 1, total_variation=worst
    )


# --- sampling -----------------------------------------------------------------------------------


@torch.inference_mode()
def count_cells(
    target: CachedModel,
    draft: CachedModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    sampling: SamplingConfig,
    generator: torch.Generator,
) -> NDArray[np.float64]:
    """How often neighbouring tokens of some texts fell into each of `BINS` x `BINS` cells.

    A token's place is its randomised rank in the target's distribution given all before it, tokens
    ordered by q/p: a verifier that accepts too much moves it up. Under plain sampling places are
    independent and uniform whatever the target (Rosenblatt's transformation), so cells are equally
    likely and pairs of tokens independent samples.

    Args:
        target: the target.
        draft: the draft.
        texts: a prompt's token ids, and those that were decoded after it.
        sampling: the distribution of both models.
        generator: breaks ties.

    Returns:
        (BINS^2,) counts.
    """
    counts = np.zeros(BINS**2)
    for prompt, new in texts:
        rows = []
        for model in (target, draft):
            sequence = model.sequence(0, sampling)
            logits = model.run(sequence.append([*prompt, *new[:-1]], len(new)))
            rows.append(sequence.distribution(logits).double().cpu())
            sequence.reset()
        p, q = rows
        ratio = torch.where(p > 0, q / p, torch.inf)
        own = ratio.gather(-1, torch.tensor(new).unsqueeze(-1))
        below = (p * (ratio < own)).sum(-1)
        equal = (p * (ratio == own)).sum(-1)
        place = below + equal * torch.rand(len(new), generator=generator, dtype=torch.float64)
        quarter = (BINS * place).long().clamp(max=BINS - 1)[: len(new) // 2 * 2].view(-1, 2)
        cells = (quarter[:, 0] * BINS + quarter[:, 1]).numpy()
        counts += np.bincount(cells, minlength=BINS**2)
    return counts


def two_sample_test(decoded: NDArray[np.float64], plain: NDArray[np.float64]) -> Sampled:
    """Pearson's chi-square test that two counts of cells are of one distribution.

    A bias that moves the distribution of the equally likely cells by a total variation of d has a
    noncentrality of at least 4 d^2 n m / (n + m), by Cauchy-Schwarz, however it is spread.

    Args:
        decoded: counts of n samples.
        plain: counts of m samples.
    """
    n, m = decoded.sum(), plain.sum()
    both = decoded + plain
    used = both > 0
    terms = (decoded * math.sqrt(m / n) - plain * math.sqrt(n / m))[used] ** 2 / both[used]
    freedom = len(both) - 1
    bound = chi2.isf(LEVEL, freedom)
    seen = brentq(lambda moved: ncx2.sf(bound, freedom, moved) - POWER, 1e-3, 1e4)
    return Sampled(
        statistic=float(terms.sum()),
        freedom=freedom,
        samples=(int(n), int(m)),
        p_value=float(chi2.sf(terms.sum(), freedom)),
        visible_bias=min(1.0, math.sqrt(seen * (n + m) / (4 * n * m))),
    )


# --- the certificate ----------------------------------------------------------------------------


def ways(config: EvalConfig, sampling: SamplingConfig) -> list[MethodConfig]:
    """Of an evaluation's methods the first of each form of draft, verifier and stopping rule."""
    found: dict[tuple[str, ...], MethodConfig] = {}
    for method in config.methods:
        if method.decoder == "speculative":
            kind = method.decoding(sampling).kind
            key = (method.drafter, kind, method.verifier, str(method.verifier_args))
            found.setdefault((*key, method.stop.name), method)
    return list(found.values())


def certify(
    models: Artefacts,
    methods: Sequence[MethodConfig],
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    environment: Environment,
    *,
    texts: int,
    max_new_tokens: int,
    seed: int,
    report: Callable[[int], object] = lambda done: None,
) -> Certificate:
    """Certify ways of decoding.

    Args:
        models: the pair, loaded.
        methods: ways of decoding, with a decoder of ours.
        prompts: token ids of real prompts.
        sampling: the distribution of both models.
        environment: where this is.
        texts: sampled texts of each method, and of plain decoding, prompts taken in turn.
        max_new_tokens: longest text.
        seed: of all draws.
        report: called with 1 when plain decoding or a method is done.
    """
    vocabulary = models.target.config.get_text_config().vocab_size
    target, draft = (CachedModel(each, vocabulary) for each in (models.target, models.draft))
    # Of all sets: prompts come set by set.
    chosen = [list(prompts[number * len(prompts) // texts]) for number in range(texts)]

    def decoder(method: MethodConfig | None, law: SamplingConfig) -> SpeculativeDecoder:
        if method is None:
            plain = DecodeConfig(**asdict(law))
            return SpeculativeDecoder.from_config(models.target, None, plain)
        drafts = [models.draft, *(models.path_drafts[name] for name in method.drafts[1:])]
        head = models.head if method.stop.reads_head else None
        with warnings.catch_warnings():  # greedy texts need no calibrated head
            warnings.simplefilter("ignore", OtherSamplingWarning)
            return SpeculativeDecoder.from_config(models.target, drafts, method.decoding(law), head)

    def sampled(method: MethodConfig | None) -> list[tuple[list[int], list[int]]]:
        name = method.name if method else PLAIN
        generators = [generator_for(seed, "certificate", name, number) for number in range(texts)]
        made = decoder(method, sampling)
        ids = [torch.tensor(prompt) for prompt in chosen]
        if method is not None and method.stop.measured:  # it needs times, which batches have not
            outs = [
                made.generate(prompt, max_new_tokens=max_new_tokens, generator=generator)
                for prompt, generator in zip(ids, generators, strict=True)
            ]
        else:
            outs = made.generate_batch(
                ids, max_new_tokens=max_new_tokens, generators=generators, size=BATCH
            )
        new = [out.tokens.tolist() for out in outs]
        return list(zip(chosen, new, strict=True))

    def cells(name: str, made: Sequence[tuple[list[int], list[int]]]) -> NDArray[np.float64]:
        ties = generator_for(seed, "certificate", "cells", name)
        return count_cells(target, draft, made, sampling, ties)

    def greedy(method: MethodConfig) -> Greedy:
        made = decoder(method, SamplingConfig(0.0))

        def decode(prompt: Tensor) -> Tensor:
            unused = torch.Generator()
            return made.generate(prompt, max_new_tokens=max_new_tokens, generator=unused).tokens

        (compared,) = compare_sequences(
            models.target,
            [torch.tensor(prompt) for prompt in prompts[:: -(-len(prompts) // GREEDY_TEXTS)]],
            {method.name: decode},
            max_new_tokens=max_new_tokens,
        )
        return Greedy(
            texts=compared.texts,
            identical=compared.texts - len(compared.differences),
            ties=compared.count("tie"),
            bugs=compared.count("bug"),
        )

    plain = sampled(None)
    expected = cells(PLAIN, plain)
    report(1)
    # In the middle of texts of different prompts.
    spread = plain[:: -(-texts // POSITIONS)]
    contexts = [[*prompt, *new[: len(new) // 2]] for prompt, new in spread]
    contexts = [context for context in contexts if len(context) > 1]
    certified = []
    for method in methods:
        config = method.decoding(sampling)
        lossless = config.make_verifier().lossless
        certified.append(
            Certified(
                method=method.name,
                verifier=method.verifier,
                drafter=method.drafter,
                stop=method.stop.name,
                lossless=lossless,
                enumerated=enumerate_verifier(config, target, draft, contexts),
                sampled=two_sample_test(cells(method.name, sampled(method)), expected)
                if sampling.temperature
                else None,
                greedy=greedy(method) if lossless else None,
            )
        )
        report(1)
    return Certificate(
        target=str(models.names["target"]),
        draft=str(models.names["draft"]),
        sampling=asdict(sampling),
        environment=environment,
        methods=certified,
    )
