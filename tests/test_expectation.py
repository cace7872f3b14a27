"""Expected counts of recorded rollouts under a rule, and the oracle of SpecDec++ Theorem 4.1."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.analysis.traces import Traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import StoppingRule, recorded_lengths
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import (
    Lengths,
    RecordedHead,
    RecordedTokens,
    pad,
)
from eval.drafting.stopping.thresholds import Confidence, Cumulative, Fixed, Head
from recipes.papers.replay import Counts, Times, dinkelbach, expected_counts, oracle_counts
from tests.tiny import tiny_llama

OUTCOMES = [bits for n in range(1, 7) for bits in itertools.product([False, True], repeat=n)]
Plain = tuple[int, int, int, int]  # tokens, n_target, n_draft, n_discarded


def traces(accept: Sequence[Sequence[float]]) -> Traces:
    """Rollouts of which nothing but the acceptance is known."""
    padded = pad(accept)
    lengths = np.array([len(row) for row in accept], dtype=np.int64)
    return Traces(RecordedTokens(lengths=lengths, q=padded, q_max=padded), padded)


def drafted(recorded: Traces, rule: StoppingRule) -> Lengths:
    lengths = recorded_lengths(rule, recorded.tokens)
    assert lengths is not None
    return lengths


def counts_of(counts: Counts, row: int = 0) -> tuple[float, ...]:
    return tuple(
        float(values[row])
        for values in (counts.tokens, counts.n_target, counts.n_draft, counts.n_discarded)
    )


def decoded(accepted: Sequence[bool], lengths: Sequence[int]) -> Plain:
    """Round after round, with these outcomes: what the expectation is an expectation of."""
    position = n_target = n_draft = n_discarded = 0
    while position < len(accepted):
        drafted = lengths[position]
        kept = 0
        while kept < drafted and accepted[position + kept]:
            kept += 1
        n_target, n_draft = n_target + 1, n_draft + drafted
        n_discarded += drafted - kept
        position += kept + 1
    return position, n_target, n_draft, n_discarded


def every_rule(n: int) -> Iterator[list[int]]:
    """Every choice of lengths at n positions; a round leaves the last token to the target."""
    for lengths in itertools.product(*(range(n - position) for position in range(n))):
        yield list(lengths)


def test_expected_counts_are_the_mean_over_all_outcomes() -> None:
    chance = random.Random(0)
    rows = [[chance.random() for _ in range(n)] for n in (1, 3, 6, 5)]
    recorded = traces(rows)
    estimates = np.array([[chance.random() for _ in range(6)] for _ in rows])
    head = RecordedHead(np.log(estimates / (1.0 - estimates)), lag=1)
    tokens = replace(recorded.tokens, q=estimates, q_max=estimates, head=head)
    read = Traces(tokens, recorded.accept)
    rules = [
        np.zeros_like(tokens.most()),
        drafted(read, Fixed(length=2)),
        drafted(read, Confidence(threshold=0.5, limit=3)),
        drafted(read, Cumulative(threshold=0.3, limit=4)),
        drafted(read, Head(threshold=0.7, limit=4)),
        drafted(read, Cost(draft_seconds=0.2, token_seconds=1.0, mean_acceptance=1.0, limit=5)),
    ]
    assert len({rule.tobytes() for rule in rules}) == len(rules)
    for lengths in rules:
        counts = expected_counts(recorded, lengths)
        for row, accept in enumerate(rows):
            mean = np.zeros(4)
            for outcome in itertools.product([False, True], repeat=len(accept)):
                weight = math.prod(
                    a if yes else 1.0 - a for a, yes in zip(accept, outcome, strict=True)
                )
                mean += weight * np.array(decoded(outcome, lengths[row].tolist()))
            assert counts_of(counts, row) == pytest.approx(tuple(mean), abs=1e-12)


def test_the_oracle_takes_the_least_time_of_all_rules_on_every_short_trace() -> None:
    for accepted in OUTCOMES:
        best = counts_of(oracle_counts(traces([[float(yes) for yes in accepted]])))
        rules = {decoded(accepted, lengths) for lengths in every_rule(len(accepted))}
        assert best in rules
        assert best[1] == min(rule[1] for rule in rules)
        # The last token comes from the target anyway, so a rejection there costs nothing more.
        assert (best[3], best[1]) == (0, accepted[:-1].count(False) + 1)
        for draft in (0.01, 0.3, 1.0):
            least = min(draft * rule[2] + rule[1] for rule in rules)
            assert draft * best[2] + best[1] == pytest.approx(least, abs=1e-12)


def test_the_oracles_expectation_is_the_mean_over_all_outcomes() -> None:
    accept = [0.9, 0.3, 0.5, 0.8, 0.2]
    mean = np.zeros(4)
    for outcome in itertools.product([0.0, 1.0], repeat=len(accept)):
        weight = math.prod(a if yes else 1.0 - a for a, yes in zip(accept, outcome, strict=True))
        mean += weight * np.array(counts_of(oracle_counts(traces([outcome]))))
    assert counts_of(oracle_counts(traces([accept]))) == pytest.approx(tuple(mean), abs=1e-12)


def test_counts_keep_their_identity_and_time_splits_as_in_the_paper() -> None:
    chance = random.Random(0)
    rows = [[chance.random() for _ in range(chance.randint(1, 40))] for _ in range(60)]
    recorded = traces(rows)
    for counts in (
        oracle_counts(recorded),
        expected_counts(recorded, drafted(recorded, Fixed(length=4))),
        expected_counts(recorded, drafted(recorded, Cumulative(threshold=0.3, limit=6))),
        expected_counts(recorded, drafted(recorded, Confidence(threshold=0.4))),
    ):
        assert counts.tokens.tolist() == [len(row) for row in rows]
        drawn = counts.n_draft + counts.n_target
        np.testing.assert_allclose(drawn, counts.tokens + counts.n_discarded, atol=1e-9)
        # SpecDec++: T = t_d N + t_d N_discarded + (t_t - t_d) N_target.
        split = 0.2 * (counts.tokens + counts.n_discarded) + 0.8 * counts.n_target
        np.testing.assert_allclose(counts.seconds(Times(0.2, 1.0)), split, atol=1e-9)
        per_token = split.sum() / counts.tokens.sum()
        assert counts.seconds_per_token(Times(0.2, 1.0)) == pytest.approx(per_token)


def test_the_counts_of_greedy_decoding_are_what_the_decoder_counts() -> None:
    target, draft = tiny_llama(2, vocab=6, layers=2), tiny_llama(3, vocab=6)
    target.generation_config.eos_token_id = None
    target.config.eos_token_id = None
    compared = 0
    for start in range(2, 6):
        prompt = torch.tensor([start, 3])
        plain = SpeculativeDecoder.from_config(target, None, DecodeConfig(temperature=0.0))
        text = plain.generate(prompt, max_new_tokens=20, generator=torch.Generator()).tokens
        ids = torch.cat([prompt, text])
        with torch.no_grad():
            proposed = draft(input_ids=ids[None, :-1]).logits[0, 1:].argmax(dim=-1)
        recorded = traces([(proposed == text).double().tolist()])
        for length in (1, 3, 5):
            decoder = SpeculativeDecoder.from_config(
                target, draft, DecodeConfig(length=length, temperature=0.0)
            )
            out = decoder.generate(prompt, max_new_tokens=20, generator=torch.Generator())
            drawn = sum(record.drafted for record in out.rounds)
            kept = sum(record.accepted for record in out.rounds)
            counts = expected_counts(recorded, drafted(recorded, Fixed(length=length)))
            assert counts_of(counts) == (20, len(out.rounds), drawn, drawn - kept)
            compared += drawn - kept > 0 < kept
    assert compared > 0


def test_lengths_end_where_they_say() -> None:
    estimates = np.array([[0.9, 0.8, 0.5, 0.9, 0.9]])
    late = RecordedHead(np.log(estimates / (1.0 - estimates)), lag=1)
    tokens = replace(traces(estimates.tolist()).tokens, head=late)
    read = Traces(tokens, estimates)
    # .72 goes on, .36 does not
    for rule, first in (
        (Cumulative(threshold=0.7), 3),
        (Cumulative(threshold=0.7, limit=2), 2),
        (Head(threshold=0.3), 4),  # one token late
        (Confidence(threshold=0.6), 3),
    ):
        assert drafted(read, rule)[0, 0] == first
    # The newest token is judged by its largest probability until the head has an estimate.
    doubtful = replace(read, tokens=replace(tokens, q_max=np.full((1, 5), 0.5)))
    costs = {"draft_seconds": 0.7, "token_seconds": 1.0, "mean_acceptance": 1.0}
    assert drafted(doubtful, Cost(**costs))[0, 0] == 1  # type: ignore[arg-type]
    assert drafted(read, Confidence(threshold=0.1, limit=2)).tolist() == [[2, 2, 2, 1, 0]]


def test_dinkelbachs_loop_ends_with_the_time_per_token_of_its_own_counts() -> None:
    chance = random.Random(1)
    recorded = traces([[chance.choice([0.95, 0.4]) for _ in range(60)] for _ in range(50)])
    times = Times(draft_seconds=0.1, target_seconds=1.0)

    def lengths(seconds: float) -> Lengths:
        least = 0.1 / (seconds * recorded.mean_accept())
        return drafted(recorded, Cumulative(threshold=least, limit=25))

    counts, seconds = dinkelbach(recorded, lengths, times)
    assert seconds == counts.seconds_per_token(times)
    fixed = [
        expected_counts(recorded, drafted(recorded, Fixed(length=k))).seconds_per_token(times)
        for k in range(1, 12)
    ]
    assert oracle_counts(recorded).seconds_per_token(times) < seconds < min(fixed)
