"""Examine the head that a target brings along (MTP): is it trained, and how must it be fed?

The target writes some texts, and along them the head is read as engines feed it: either half first,
states before or after either last norm, and each embedding at position 0. Texts are exact however a
head is fed; only acceptance tells which way it was trained for. Ways differ where a bootstrap over
the texts says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from distill.drafts import round_places
from distill.drafts.mtp import read_head
from distill.published import Finding
from eval.measuring.intervals import Floats, Interval, prompts_needed, resamples
from recipes.doctor import written_texts
from specdata.drafts.mtp import FEEDING, VERSIONS, Convention
from specdata.drafts.state_store import StateStore
from specdata.expected_tokens import log_ratios
from specdata.lm_head import find_lm_head
from specdata.models import load_model, load_tokenizer
from specdata.probability import overlap, probabilities
from specdata.sampling import SamplingConfig
from specdata.target_heads import TargetHead
from specdata.target_states import target_taps
from specdata.texts import ModelSource, TextBatch, TextRow, text_columns, tokens_at_once

K = 3
"""Tokens of a round."""
ROW = "{:<16}  {:<14}  {:<14}  {:<19}  {:<13}  {:<17}  {:<17}  {:<17}  {}"


@dataclass(frozen=True, slots=True)
class Rounds:
    """What becomes of rounds that begin at each token of R texts.

    Attributes:
        reached: (R, K) sums of the probabilities that all before the k-th token are accepted.
        accepted: (R, K) sums of those that it is accepted, too.
        guessed: (R, 2) sums of the first token's acceptance, were it drawn from all tokens evenly,
            or by their frequencies in the texts.
    """

    reached: Floats
    accepted: Floats
    guessed: Floats

    @property
    def tokens(self) -> Floats:
        """(R,) tokens of all rounds of a text."""
        sums: Floats = self.reached[:, 0] + self.accepted.sum(axis=1)
        return sums


def _ratio(above: Floats, below: Floats) -> Interval:
    """Of sums a text (R,)."""
    drawn = resamples(len(above))
    with np.errstate(invalid="ignore"):  # a token that no round of a resample reaches
        return Interval.of((drawn @ above) / (drawn @ below))


@dataclass(frozen=True, slots=True)
class Ways:
    """A head along texts of its target, and what it gave in each way that it was fed."""

    source: ModelSource
    head: TargetHead
    rows: list[TextRow]
    tried: dict[Convention, Rounds] = field(default_factory=dict)

    def try_all(self) -> Convention:
        """Feed it in each way that may be right or that an engine takes; returns the best."""
        engines = self.head.family.engines
        for turned in product((False, True), repeat=3):
            keys = ("state_first", "normed_target", "normed_own")
            self.rounds(replace(engines["vllm"], **dict(zip(keys, turned, strict=True))))
        for _ in range(2):  # a better embedding at position 0 has neighbours of its own
            for each in self.neighbours():
                self.rounds(each)
        for each in engines.values():
            self.rounds(each)
        return self.best

    @property
    def best(self) -> Convention:
        """The way with most tokens per target call."""
        return max(self.tried, key=lambda way: np.nan_to_num(self.tried[way].tokens.sum()))

    def neighbours(self) -> list[Convention]:
        """The ways that differ from the best in one of `FEEDING`."""
        best, kept = self.best, replace(self.best, zero_first=False, reads_first=False)
        others = [
            replace(best, state_first=not best.state_first),
            replace(best, normed_target=not best.normed_target),
            replace(best, normed_own=not best.normed_own),
            *(kept, replace(kept, zero_first=True), replace(kept, reads_first=True)),
        ]
        if any(each.rotates_halves for each in self.head.family.engines.values()):
            others.append(replace(best, rotates_halves=not best.rotates_halves))
        return [each for each in others if each.words != best.words]

    def over_best(self, way: Convention) -> Interval:
        """Tokens per target call over those of the best way, text by text."""
        return _ratio(self.rounds(way).tokens, self.rounds(self.best).tokens)

    def rounds(self, way: Convention) -> Rounds:
        """Rounds of the head, fed in one way."""
        way = replace(way, normed_own=way.normed_own or not way.last_norm)
        if way not in self.tried:
            self.tried[way] = self._read(way)
        return self.tried[way]

    def _read(self, way: Convention) -> Rounds:
        source, target = self.source, self.source.head.model
        draft = read_head(target, self.head, way, source.store)
        head, sampling, vocabulary = find_lm_head(draft), source.sampling, source.vocabulary
        written = torch.tensor([token for row in self.rows for token in row["completion_ids"]])
        counts = torch.bincount(written, minlength=vocabulary).to(target.device)
        frequencies = counts / len(written)
        guesses = [torch.full_like(frequencies, 1 / vocabulary), frequencies]

        def read(batch: TextBatch) -> Callable[[slice], dict[str, Tensor]]:
            read_p = source.distributions_of(batch, self.rows)
            ids, asked = batch.input_ids[:, :-1], batch.is_predicted
            taps, tokens = target_taps(draft, [], ids), batch.tokens
            states = [
                place.states[asked] for place in round_places(head, ids, K, taps=taps, begins=asked)
            ]

            def read_chunk(chunk: slice) -> dict[str, Tensor]:
                qs = [probabilities(head.logits(each[chunk]), sampling) for each in states]
                p, of_text, _ = read_p(chunk, qs[0])
                ratios = [log_ratios(of_text, q.gather(-1, tokens[chunk, None])) for q in qs]
                return {
                    "stays": torch.cat(ratios, dim=-1).clamp(max=0.0).exp().double(),
                    "accepted": torch.stack([overlap(p, q) for q in qs], dim=-1).double(),
                    "guessed": torch.stack([overlap(p, q) for q in guesses], dim=-1).double(),
                }

            return read_chunk

        columns = text_columns(
            self.rows,
            read,
            vocabulary=vocabulary,
            tokens_at_once=tokens_at_once(source.head),
            device=target.device,
        )
        reached, accepted = np.zeros((2, len(columns), K))
        for row, each in enumerate(columns):
            before = torch.ones(len(each["stays"]), dtype=torch.float64)
            for place in range(min(K, len(before))):  # at each start with so many tokens behind it
                reached[row, place] = before.sum()
                accepted[row, place] = before @ each["accepted"][place:, place]
                before = (before * each["stays"][place:, place])[:-1]
        guessed = torch.stack([each["guessed"].sum(dim=0) for each in columns]).numpy()
        return Rounds(reached, accepted, guessed)


def examine_head(
    head: TargetHead, prompts: str | None, count: int, max_new_tokens: int, sampling: SamplingConfig
) -> Iterator[Finding]:
    """Findings about the head in a target's folder, one after the other; see `doctor.examine`."""
    target_name = str(head.folder)
    layers = "1 layer" if head.count == 1 else f"{head.count} layers, of which the first is read"
    yield Finding("ok", "head", f"of {head.model_type}, {layers}, {len(head.of_head)} tensors")
    target, tokenizer = load_model(target_name), load_tokenizer(target_name)
    rows = written_texts(target, tokenizer, prompts, count, max_new_tokens, sampling).to_list()
    ways = Ways(ModelSource(find_lm_head(target), sampling, StateStore()), head, rows)
    best = ways.try_all()
    yield Finding("ok", "acceptance", _table(ways))
    found = ways.rounds(best)
    first, guessed = found.accepted[:, 0].sum(), found.guessed.sum(axis=0).max()
    if not first > guessed:  # NaN, too
        accepted, of_guess = (each / found.reached[:, 0].sum() for each in (first, guessed))
        text = "not trained, or for none of these ways: the share of its first tokens that is "
        text += f"accepted is {accepted:.3f}, and {of_guess:.3f} without any model, by the "
        text += "frequencies of the texts' tokens"
        yield Finding("problem", "head", text)
        return
    yield from _of_best(ways, best)
    for engine, fed in head.family.engines.items():
        yield _of_engine(ways, best, f"{engine} {VERSIONS[engine]}", fed)


def _table(ways: Ways) -> str:
    """Every way that was tried, the best first."""
    lines = [
        f"along {len(ways.rows)} texts that the target wrote, of each token of a round where those "
        "before it are accepted",
        ROW.format(*FEEDING, "1st token", "2nd", "3rd", f"tokens per target call, K = {K}"),
    ]
    for way in sorted(ways.tried, key=lambda way: -ways.tried[way].tokens.sum()):
        each = ways.tried[way]
        places = (_ratio(each.accepted[:, k], each.reached[:, k]).within(2) for k in range(K))
        tokens = _ratio(each.tokens, each.reached[:, 0]).within(2)
        lines.append(ROW.format(*way.words, *places, tokens).replace("nan", "-"))
    return "\n  ".join(lines)


def _of_best(ways: Ways, best: Convention) -> Iterator[Finding]:
    """The way that the head was trained for, as far as the texts tell it."""
    words = "; ".join(map(" ".join, zip(FEEDING, best.words, strict=True)))
    yield Finding("ok", "trained for", words)
    for way in ways.neighbours():
        ratio = ways.over_best(way)
        if not ratio.high < 1:
            text = f"{_differing(best, way)} is not told apart on {len(ways.rows)} texts: "
            text += f"{ratio.within(3)} times the tokens per target call; "
            if ratio.exists:
                text += "norms with even weights, and position 0 of long texts, make no difference"
            else:
                text += f"give more prompts (--count, at least {prompts_needed(1)})"
            yield Finding("warning", "trained for", text)


def _of_engine(ways: Ways, best: Convention, engine: str, fed: Convention) -> Finding:
    """What an engine loses that feeds the head otherwise."""
    if fed == best:
        return Finding("ok", engine, "feeds it so")
    ratio, otherwise = ways.over_best(fed), f"feeds it with {_differing(best, fed)}"
    if not ratio.high < 1:
        text = f"{otherwise}: {ratio.within(3)} times the tokens per target call, not told apart"
        return Finding("ok", engine, text)
    lost = Interval(1 - ratio.value, 1 - ratio.high, 1 - ratio.low)
    text = f"{otherwise}, and loses {lost} of the tokens per target call at K = {K}"
    return Finding("warning", engine, text)


def _differing(best: Convention, way: Convention) -> str:
    """Where a way differs from the best."""
    pairs = zip(FEEDING, best.words, way.words, strict=True)
    return "; ".join(f"{name} {said}" for name, right, said in pairs if said != right)
