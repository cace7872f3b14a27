"""The oracle of SpecDec++ Theorem 4.1, and replay of recorded acceptance."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from eval.analysis.oracle import (
    DraftLength,
    ReplayCounts,
    constant_length,
    dinkelbach,
    oracle,
    replay,
    until_product_below,
    until_value_below,
)
from eval.decoder import DecodeConfig, SpeculativeDecoder
from tests.tiny import tiny_llama

TRACES = [bits for n in range(1, 7) for bits in itertools.product([False, True], repeat=n)]


def every_rule(accepted: tuple[bool, ...], position: int = 0) -> list[ReplayCounts]:
    """What every choice of lengths, in every round, would do."""
    if position == len(accepted):
        return [ReplayCounts()]
    results = []
    for drafted in range(len(accepted) - position):
        kept = 0
        while kept < drafted and accepted[position + kept]:
            kept += 1
        first = ReplayCounts(kept + 1, 1, drafted, drafted - kept)
        results += [first + rest for rest in every_rule(accepted, position + kept + 1)]
    return results


def test_the_oracle_takes_the_least_time_of_all_rules_on_every_short_trace() -> None:
    for accepted in TRACES:
        best = replay(accepted, oracle(accepted))
        rules = every_rule(accepted)
        assert best in rules
        assert best.n_target == min(rule.n_target for rule in rules)
        for draft in (0.01, 0.3, 1.0):
            least = min(rule.seconds_per_token(draft, 1.0) for rule in rules)
            assert best.seconds_per_token(draft, 1.0) == pytest.approx(least, abs=1e-12)


def test_the_oracle_discards_nothing_and_needs_one_forward_more_than_disagreements() -> None:
    for accepted in TRACES:
        best = replay(accepted, oracle(accepted))
        # The last token comes from the target anyway, so a disagreement there costs nothing more.
        assert (best.n_discarded, best.n_target) == (0, accepted[:-1].count(False) + 1)


def test_every_replay_keeps_the_identity_of_counts() -> None:
    chance = random.Random(0)
    for _ in range(300):
        accepted = [chance.random() < 0.7 for _ in range(chance.randint(1, 40))]
        values = [chance.random() for _ in accepted]
        for rule in (
            constant_length(4),
            oracle(accepted),
            until_product_below(values, 0.3, limit=6, lag=1),
            until_value_below(values, 0.4, limit=20),
        ):
            counts = replay(accepted, rule)
            assert counts.tokens == len(accepted)
            assert counts.n_draft + counts.n_target == counts.tokens + counts.n_discarded
            seconds = counts.seconds_per_token(0.2, 1.0) * counts.tokens
            # SpecDec++: T = t_d N + t_d N_discarded + (t_t - t_d) N_target.
            split = 0.2 * (counts.tokens + counts.n_discarded) + 0.8 * counts.n_target
            assert seconds == pytest.approx(split)


def test_a_replay_of_greedy_decoding_counts_what_the_decoder_counts() -> None:
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
        accepted = (proposed == text).tolist()
        for length in (1, 3, 5):
            decoder = SpeculativeDecoder.from_config(
                target, draft, DecodeConfig(length=length, temperature=0.0)
            )
            out = decoder.generate(prompt, max_new_tokens=20, generator=torch.Generator())
            drafted = sum(record.drafted for record in out.rounds)
            kept = sum(record.accepted for record in out.rounds)
            expected = ReplayCounts(20, len(out.rounds), drafted, drafted - kept)
            assert replay(accepted, constant_length(length)) == expected
            compared += drafted - kept > 0 < kept
    assert compared > 0


def test_rules_stop_where_they_say() -> None:
    estimates = [0.9, 0.8, 0.5, 0.9]
    assert until_product_below(estimates, 0.7, limit=20)(0, 4) == 3  # .72 goes on, .36 does not
    assert until_product_below(estimates, 0.7, limit=20, lag=1)(0, 4) == 4
    assert until_product_below(estimates, 0.7, limit=20, lag=1, newest=[0.5] * 4)(0, 4) == 1
    assert until_product_below(estimates, 0.7, limit=2)(0, 4) == 2
    assert until_value_below(estimates, 0.6, limit=20)(0, 4) == 3
    assert until_value_below(estimates, 0.1, limit=20)(1, 2) == 2
    with pytest.raises(ValueError, match="may draft 0 to 1 tokens"):
        replay([True, True], lambda position, most: most + 1)


def test_dinkelbachs_loop_ends_with_the_time_per_token_of_its_own_counts() -> None:
    chance = random.Random(1)
    values = [[chance.choice([0.95, 0.4]) for _ in range(60)] for _ in range(50)]
    traces = [[chance.random() < value for value in row] for row in values]

    def rule(number: int, seconds: float) -> DraftLength:
        return until_product_below(values[number], 0.1 / (seconds * 0.84), limit=25)

    counts, seconds = dinkelbach(traces, rule, draft_seconds=0.1, target_seconds=1.0)
    assert seconds == counts.seconds_per_token(0.1, 1.0)
    lengths = [
        sum((replay(row, constant_length(k)) for row in traces), ReplayCounts()).seconds_per_token(
            0.1, 1.0
        )
        for k in range(1, 12)
    ]
    ideal = sum((replay(row, oracle(row)) for row in traces), ReplayCounts())
    assert ideal.seconds_per_token(0.1, 1.0) < seconds < min(lengths)
