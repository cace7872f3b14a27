"""A certificate of exactness: is what a pair decodes distributed as the target alone, and how sure?

Two independent answers for each way of decoding:

* **sampled**: texts that it decoded are tested against the target's distribution;
* **greedy**: its greedy texts against transformers' `generate`, differences judged tie or bug.

Both judge texts, whoever generated them: a decoder, a served engine, or a Python function. That
verifiers themselves are exact is enumerated for every pair of distributions in the tests.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from scipy.special import chndtrinc
from scipy.stats import chi2, chisquare, norm
from torch import Tensor
from transformers import PreTrainedModel

from eval.analysis.ties import greedy_differences
from eval.decode_config import Method
from eval.decoder import SpeculativeDecoder
from eval.measuring.experiment import Experiment
from eval.measuring.methods import EvalConfig
from eval.measuring.records import Strict
from heads.probe import OtherSamplingWarning
from specdata.models import positions
from specdata.rollouts.backend import Request
from specdata.sampling import SamplingConfig, generator_for
from specdata.storage.files import write_json
from specdata.texts import TextBatch, pair_columns, text_length

LEVEL, POWER = 1e-4, 0.9
"""Sound sampling fails its test once in 1 / LEVEL times; power is stated for POWER."""
GREEDY_TEXTS, BATCH = 4, 16
"""Texts that are compared, and sequences that are decoded at a time."""
ALONE = "the target alone"
NOT_OURS = {
    "plain": ALONE,
    **dict.fromkeys(("generate", "assisted"), "transformers' own loop"),
    "server": "an engine, of which certify --server asks",
}
"""Why methods of other decoders are not certified."""
BINS = 4
"""Quarters that each of two neighbouring tokens falls into, by how much the draft prefers it."""


class Judged(Strict):
    """The judgement of a target on texts that something else generated in its place.

    Attributes:
        texts: greedy texts; those that are neither tied nor bugs are `generate`'s.
        differences: where they differ, and why it is one or the other.
        samples: pairs of neighbouring tokens of sampled texts; 0 where the sampler is greedy.
        p_value: chance of cells as uneven (`count_cells`) if the texts follow the target.
        visible_bias: total variation of the cells that would have been seen with power `POWER`.
    """

    texts: int = 0
    ties: int = 0
    bugs: int = 0
    differences: list[str] = Field(default_factory=list)
    samples: int = 0
    p_value: float = 1.0
    visible_bias: float = 1.0

    @property
    def is_exact(self) -> bool:
        """True if nothing speaks against it."""
        return not self.bugs and self.p_value >= LEVEL

    @property
    def same(self) -> int:
        """Greedy texts that are identical to the target's."""
        return self.texts - self.ties - self.bugs

    @property
    def greedy(self) -> str:
        """The finding of greedy texts."""
        return f"{self.same} of {self.texts} greedy texts are the target's, {self.ties} tied"

    @property
    def sampled(self) -> str:
        """The finding of sampled texts."""
        return (
            f"sampled texts follow the target's distribution with p {self.p_value:.2g} "
            f"({2 * self.samples:,} tokens: a bias of {self.visible_bias:.2g} would have been seen "
            f"with power {POWER:g})"
        )

    def __str__(self) -> str:
        finding = "Lossless" if self.is_exact else "NOT LOSSLESS"
        finding += f": {self.greedy}" + f", {self.bugs} wrong" * bool(self.bugs)
        return finding + f"; {self.sampled}" * bool(self.samples) + "."


class Certified(Judged):
    """The findings of one way of decoding."""

    method: str
    verifier: str
    drafts: str
    lossless: bool


def sentence(methods: Sequence[Certified], left_out: Mapping[str, str] | None = None) -> str:
    """The finding, for a card; `left_out` has methods that are not certified, and why."""
    sentences = []
    if exact := [each for each in methods if each.lossless and each.is_exact]:
        names = dict.fromkeys(f"{each.verifier} ({each.drafts})" for each in exact)
        texts, ties = sum(each.texts for each in exact), sum(each.ties for each in exact)
        sentences.append(
            f"Exact: {', '.join(names)}. Decoded texts follow the target's distribution (least p "
            f"{min(each.p_value for each in exact):.2g} of {len(exact)}; a bias of "
            f"{max(each.visible_bias for each in exact):.2g} would have been seen with power "
            f"{POWER:g}); {texts - ties} of {texts} greedy texts are identical, {ties} tied"
        )
    sentences += [
        f"{'NOT EXACT' if each.lossless else 'Biased'}: {each.method} (sampled texts follow the "
        f"target's distribution with p {each.p_value:.2g}, {each.bugs} of {each.texts} greedy "
        "texts wrong)"
        for each in methods
        if each not in exact
    ]
    for reason in dict.fromkeys((left_out or {}).values()):
        others = ", ".join(name for name, why in (left_out or {}).items() if why == reason)
        if reason != ALONE:  # there is nothing to say of it
            sentences.append(f"Not certified: {others} ({reason})")
    return ". ".join(sentences) + "."


# --- sampling -----------------------------------------------------------------------------------


def count_cells(
    pair: Sequence[PreTrainedModel],
    texts: Sequence[tuple[Tensor, Tensor]],
    sampling: SamplingConfig,
    generator: torch.Generator,
) -> NDArray[np.int64]:
    """Count into which of `BINS` x `BINS` cells neighbouring tokens of texts fell, text after text.

    A token's place is its randomised rank in the target's distribution given all before it, tokens
    ordered by q/p: a verifier that accepts too much moves it up. Under plain sampling places are
    independent and uniform whatever the target (Rosenblatt's transformation), so cells are equally
    likely and pairs of tokens independent samples. Texts are prompts (T,) with what was decoded
    after them (n,); the generator breaks ties. Where the draft is the target, as an engine's may
    not be known, or has too few positions, tokens are ordered by p alone. Returns (BINS^2,).
    """
    rows = [{"prompt_ids": each[0].tolist(), "completion_ids": each[1].tolist()} for each in texts]
    ties = [torch.rand(len(new), generator=generator, dtype=torch.float64) for _, new in texts]

    def place(p: Tensor, q: Tensor, batch: TextBatch, chunk: slice) -> dict[str, Tensor]:
        ratio = torch.where(p > 0, -p if alone else q / p, torch.inf)
        of_text = ratio.gather(-1, batch.tokens[chunk, None])
        below, equal = (p * (ratio < of_text)).sum(-1), (p * (ratio == of_text)).sum(-1)
        tie = torch.cat([ties[members[each]] for each in batch.examples])[chunk].to(p.device)
        return {"place": below + equal * tie}

    quarters = []
    most = 0 if pair[0] is pair[1] else positions(pair[1].config)
    for alone in (False, True):
        members = [n for n, row in enumerate(rows) if (text_length(row) > most) == alone]
        models = (pair[0], pair[0]) if alone else pair
        for columns in pair_columns(models, [rows[n] for n in members], sampling, place):
            quarters.append((BINS * columns["place"]).long().clamp(max=BINS - 1).numpy())
    # One after the other: pairs within texts would miss the last token of every other text.
    line = np.concatenate(quarters)
    pairs = line[: len(line) // 2 * 2].reshape(-1, 2)
    return np.bincount(pairs @ np.array([BINS, 1]), minlength=BINS**2)


def uniformity(counts: NDArray[np.int64]) -> tuple[float, float]:
    """Test that cells (BINS^2,) are equally likely; the p-value, and the bias that it would see.

    The p-value is twice the lesser of two: of Pearson's chi-square, and of the mean quarter, which
    shows sooner than 16 cells do that most faults move all tokens one way. A bias that moves the
    cells by a total variation of d has a noncentrality of at least 4 d^2 n, by Cauchy-Schwarz,
    however it is spread; returned is the d that is seen at `LEVEL` with power `POWER`.
    """
    freedom, count = len(counts) - 1, max(1, int(counts.sum()))
    seen = chndtrinc(chi2.isf(LEVEL / 2, freedom), freedom, 1 - POWER)
    square = counts.reshape(BINS, BINS)
    moved = float((square.sum(0) + square.sum(1)) @ (np.arange(BINS) - (BINS - 1) / 2))
    deviation = moved / math.sqrt(2 * count * (BINS**2 - 1) / 12)
    p_values = (float(chisquare(counts).pvalue), 2 * float(norm.sf(abs(deviation))))
    return min(1.0, 2 * min(p_values)), min(1.0, math.sqrt(seen / (4 * count)))


def judge_sampled(
    pair: Sequence[PreTrainedModel],
    texts: Sequence[tuple[Tensor, Tensor]],
    sampling: SamplingConfig,
    *key: str,
    seed: int = 0,
    greedy: Judged | None = None,
) -> Judged:
    """Judge sampled texts, prompts (T,) each with its new tokens (n,), and add it to `greedy`.

    The draft is the pair's second model if it is known, else the target again: what is done wrong
    moves tokens that the draft prefers, so the test sees smaller faults with it.
    """
    ties = generator_for(seed, "certificate", "cells", *key)
    counts = count_cells(pair, texts, sampling, ties)
    p_value, visible = uniformity(counts)
    found = {"samples": int(counts.sum()), "p_value": p_value, "visible_bias": visible}
    return (greedy or Judged()).model_copy(update=found)


def judge_greedy(
    target: PreTrainedModel,
    prompts: Sequence[Tensor],
    decode: Callable[[Tensor], Tensor],
    max_new_tokens: int,
) -> Judged:
    """Judge greedy texts: `decode` gives the new tokens (n,) after a prompt (T,)."""
    found = greedy_differences(target, prompts, decode, max_new_tokens=max_new_tokens)
    verdicts = [each.verdict for each in found.values()]
    return Judged(
        texts=len(prompts),
        ties=verdicts.count("tie"),
        bugs=verdicts.count("bug"),
        differences=[f"prompt {number}: {each}" for number, each in found.items()],
    )


def greedily(decoder: SpeculativeDecoder, max_new_tokens: int) -> Callable[[Tensor], Tensor]:
    """Return the function from a prompt (T,) to a greedy decoder's new tokens (n,)."""
    return lambda prompt: (
        decoder.generate(prompt, max_new_tokens=max_new_tokens, generator=torch.Generator()).tokens
    )


# --- the certificate ----------------------------------------------------------------------------


def ways(config: EvalConfig, sampling: SamplingConfig) -> list[Method]:
    """Return the first method of each form of draft, verifier and stopping rule.

    Lookups between drafts, the target's own head as the draft, and an acceptance head that a rule
    asks make a form of their own.
    """
    return list(_by_form(config, sampling).values())


def left_out(config: EvalConfig, sampling: SamplingConfig) -> dict[str, str]:
    """Name the methods of an evaluation that `ways` has not, and say why."""
    firsts, reasons = _by_form(config, sampling), {}
    for method in config.methods:
        if method.decoder == "speculative":
            first = firsts[_form(method, sampling)].name
            if method.name != first:
                reasons[method.name] = f"decoded as {first} but for lengths and thresholds"
        else:
            reasons[method.name] = NOT_OURS[method.decoder]
    return reasons


def _by_form(config: EvalConfig, sampling: SamplingConfig) -> dict[tuple[object, ...], Method]:
    methods: dict[tuple[object, ...], Method] = {}
    for method in config.methods:
        if method.decoder == "speculative":
            methods.setdefault(_form(method, sampling), method)
    return methods


def _form(method: Method, sampling: SamplingConfig) -> tuple[object, ...]:
    kind = method.decoding(sampling).kind
    verifier = (method.verifier, str(method.verifier_args))
    rule = (method.stop.name, method.stop.reads_head)
    return (method.drafter, method.mtp, kind, method.lookup > 0, *verifier, *rule)


def certify(
    experiment: Experiment,
    parts: Path,
    *,
    texts: int,
    max_new_tokens: int,
    report: Callable[[int], object] = lambda done: None,
) -> list[Certified]:
    """Certify the `ways` of decoding of an evaluation, of which nothing is measured or stored.

    `parts` keeps what was found of each; what is there is read. Of each method there are so many
    sampled `texts`, prompts taken in turn; `report` is called with 1 when one is done.
    """
    sampling, prompts = experiment.sampling, [torch.tensor(each.ids) for each in experiment.prompts]
    target = experiment.models.target

    def sampled(method: Method) -> list[tuple[Tensor, Tensor]]:
        decoder = experiment.decoder(method)
        # Of all sets: prompts come set by set.
        drawn_from = [prompts[number * len(prompts) // texts] for number in range(texts)]
        each = [generator_for(experiment.seed, "certificate", method.name, n) for n in range(texts)]
        if method.stop.measured:  # it needs times, which batches have not
            outs = [
                decoder.generate(prompt, max_new_tokens=max_new_tokens, generator=generator)
                for prompt, generator in zip(drawn_from, each, strict=True)
            ]
        else:
            outs = decoder.generate_batch(
                drawn_from, max_new_tokens=max_new_tokens, generators=each, size=BATCH
            )
        return [(prompt, out.tokens.cpu()) for prompt, out in zip(drawn_from, outs, strict=True)]

    def certified(method: Method) -> Certified:
        config = method.decoding(sampling)
        more = " and lookups" * bool(method.lookup) + ", of the target's own head" * method.mtp
        with warnings.catch_warnings():  # greedy texts need no calibrated head
            warnings.simplefilter("ignore", OtherSamplingWarning)
            greedy = replace(experiment, sampling=SamplingConfig(0.0)).decoder(method)
        compared = prompts[:: -(-len(prompts) // GREEDY_TEXTS)]
        judged = judge_sampled(
            (target, experiment.models.draft_of(method)),
            sampled(method),
            sampling,
            method.name,
            seed=experiment.seed,
            greedy=judge_greedy(target, compared, greedily(greedy, max_new_tokens), max_new_tokens),
        )
        return Certified(
            method=method.name,
            verifier=method.verifier,
            drafts="lookup" if method.drafter == "lookup" else config.kind + more,
            lossless=config.make_verifier().lossless,
            **dict(judged),
        )

    certified_methods = []
    for number, method in enumerate(ways(experiment.config, sampling)):
        part = parts / f"{number}.json"
        if not part.exists():
            write_json(part, certified(method).model_dump(mode="json"))
        certified_methods.append(Certified.model_validate_json(part.read_bytes()))
        report(1)
    return certified_methods


def certify_server(
    answers: Callable[[Sequence[Request], SamplingConfig], list[list[int]]],
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    prompts: Sequence[Tensor],
    sampling: SamplingConfig,
    *,
    texts: int,
    max_new_tokens: int,
    seed: int,
) -> Judged:
    """Certify an engine that is asked for completions: the new ids of requests, in their order.

    All prompts, each (T,), are completed greedily, and so many other `texts` are sampled, prompts
    taken in turn. The draft is given if it is a model and known.
    """
    requests = [Request(each.tolist(), ("greedy", n)) for n, each in enumerate(prompts)]
    answered = iter(answers(requests, SamplingConfig(0.0)))
    greedy = judge_greedy(target, prompts, lambda _: torch.tensor(next(answered)), max_new_tokens)
    if sampling.temperature == 0:
        return greedy
    in_turn = [prompts[number % len(prompts)] for number in range(texts)]
    requests = [Request(each.tolist(), ("sampled", n)) for n, each in enumerate(in_turn)]
    new = [torch.tensor(each) for each in answers(requests, sampling)]
    sampled, models = [*zip(in_turn, new, strict=True)], (target, draft or target)
    return judge_sampled(models, sampled, sampling, seed=seed, greedy=greedy)
