"""A shared verification budget: lossless for all sequences jointly, and spent where it pays."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import DraftedToken, UpcomingToken
from eval.drafting.stopping.estimates import Estimates, SurvivalEstimate
from eval.drafting.stopping.survival import Survival
from eval.rounds import Round
from eval.runtime.budget import Bid, CostTable, SharedBudget
from eval.verifiers import VERIFIERS
from heads import BaseHead
from specdata.errors import ConfigError
from tests.chi_square import LEVEL, p_value
from tests.families import tiny
from tests.oracles import (
    Prefix,
    TabularModel,
    chain_draft,
    joint_distribution,
    output_distribution,
    random_model,
    total_variation,
)
from tests.test_stopping import head, immediate_head
from tests.tiny import joint_distribution as joint_of_model
from tests.tiny import tiny_llama

LIMIT = 2
TABLES = [(1.0, 0.2), (1.1, 0.1), (0.2, 0.5), (0.2, 0.9)]
"""A drafting step that pays for two sequences but not for one, and dear tokens."""
Drafts = tuple[Prefix, ...]


def costs(column: float, draft: float = 0.2) -> CostTable:
    """A forward takes 4 and 1 a sequence, and `column` for each of its drafted tokens."""
    sizes, tokens = (1, 2, 4), (1, 2, 4)
    return CostTable(
        sizes,
        tokens,
        tuple(tuple(4.0 + n + column * n * (w - 1) for w in tokens) for n in sizes),
        tuple(draft * (1 + n) for n in sizes),
    )


# --- losslessness, by enumeration ---------------------------------------------------------------


def estimates(qs: Sequence[TabularModel], drafts: Drafts, *, upcoming: bool) -> list[float]:
    """The survival of each sequence's draft; `upcoming`: with the token that comes next.

    A drafted token counts by its own q, as a head would know it; the next one by the largest.
    """
    survivals = []
    for q, tokens in zip(qs, drafts, strict=True):
        chances = [float(q[tokens[:place]][token]) for place, token in enumerate(tokens)]
        survivals.append(math.prod(chances) * (float(q[tokens].max()) if upcoming else 1.0))
    return survivals


def admitted(budget: SharedBudget, bids: dict[int, Bid], drafts: Drafts) -> list[int]:
    """The sequences whose bids are admitted, beside those that are done."""
    scored = [len(tokens) + 1 for number, tokens in enumerate(drafts) if number not in bids]
    answers = budget.admit(list(bids.values()), scored)
    return [number for number, answer in zip(bids, answers, strict=True) if answer]


def drafts_of_both(
    qs: Sequence[TabularModel], budget: SharedBudget, *, peeking: bool
) -> Iterator[tuple[float, Drafts]]:
    """Every pair of drafts with its probability, as sequences that bid side by side draw them.

    Args:
        qs: the drafts' models, of sequences 0 and 1.
        budget: decides on the bids.
        peeking: decide once the tokens are drawn, by their own q, and drop those not admitted.
    """
    states: list[tuple[float, Drafts, tuple[int, ...]]] = [(1.0, ((), ()), (0, 1))]
    while states:
        weight, drafts, going = states.pop()
        going = tuple(number for number in going if len(drafts[number]) < LIMIT)
        before = estimates(qs, drafts, upcoming=False)
        bids = {n: Bid(before[n], len(drafts[n]), known=False) for n in going}
        asked = admitted(budget, bids, drafts) if bids else []
        chances = estimates(qs, drafts, upcoming=True)
        bids = {n: Bid(chances[n], len(drafts[n]), known=True) for n in asked}
        drawing = asked if peeking else (admitted(budget, bids, drafts) if bids else [])
        if not drawing:
            yield weight, drafts
            continue
        rows = [qs[n][drafts[n]] for n in drawing]
        for tokens in itertools.product(*(range(len(row)) for row in rows)):
            chance = math.prod(float(row[t]) for row, t in zip(rows, tokens, strict=True))
            drawn = dict(zip(drawing, tokens, strict=True))
            kept = list(drawing)
            if peeking:
                bids = {
                    n: Bid(before[n] * float(qs[n][drafts[n]][t]), len(drafts[n]), known=True)
                    for n, t in drawn.items()
                }
                kept = admitted(budget, bids, drafts)
            longer = tuple((*d, drawn[n]) if n in kept else d for n, d in enumerate(drafts))
            states.append((weight * chance, longer, tuple(kept)))


def joint_output(
    verifier: str,
    ps: Sequence[TabularModel],
    qs: Sequence[TabularModel],
    budget: SharedBudget,
    *,
    peeking: bool = False,
) -> tuple[Tensor, dict[Prefix, set[int]]]:
    """The joint distribution of what both sequences emit, and the lengths of the second's drafts.

    The lengths are by the tokens of the second's longest draft that began with the same tokens.
    """
    made = VERIFIERS[verifier].make()
    joint: Tensor = torch.zeros(())
    lengths: dict[Prefix, set[int]] = {}
    known: dict[tuple[int, Prefix], Tensor] = {}
    for weight, drafts in drafts_of_both(qs, budget, peeking=peeking):
        outputs = []
        for number, tokens in enumerate(drafts):
            if (number, tokens) not in known:
                p, q = ps[number], qs[number]
                draft = [(1.0, chain_draft(tokens, q))]
                known[number, tokens] = (
                    output_distribution(made, draft, p, LIMIT + 1, q)
                    if tokens
                    else joint_distribution(p, (), LIMIT + 1)
                ).flatten()
            outputs.append(known[number, tokens])
        joint = joint + weight * torch.outer(*outputs)
        for length in range(len(drafts[1]) + 1):
            lengths.setdefault(drafts[1][:length], set()).add(len(drafts[1]))
    return joint, lengths


def models(seed: int) -> tuple[list[TabularModel], list[TabularModel]]:
    ps = [random_model(2, LIMIT + 1, seed + n, zeros=0.2) for n in range(2)]
    return ps, [random_model(2, LIMIT + 1, seed + 10 + n) for n in range(2)]


@pytest.mark.parametrize("verifier", ["token", "block", "traversal"])
@pytest.mark.parametrize("seed", range(4))
def test_two_sequences_that_share_a_budget_have_the_targets_joint_distribution(
    verifier: str, seed: int
) -> None:
    ps, qs = models(100 * seed)
    plain = torch.outer(*(joint_distribution(p, (), LIMIT + 1).flatten() for p in ps))
    for draft, column in TABLES:
        joint, _ = joint_output(verifier, ps, qs, SharedBudget(costs(column, draft)))
        assert total_variation(joint, plain) < 1e-12


def test_a_draft_is_longer_or_shorter_for_what_the_other_sequence_drafted() -> None:
    """Otherwise the tests of the joint distribution would say nothing of sharing."""
    shared = []
    for seed, (draft, column) in itertools.product(range(4), TABLES):
        budget = SharedBudget(costs(column, draft))
        _, lengths = joint_output("token", *models(100 * seed), budget)
        whole = {tokens: ends for tokens, ends in lengths.items() if len(tokens) == 1}
        shared.append(any(len(ends) > 1 for ends in whole.values()))
    assert sum(shared) > 4


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_admitting_tokens_by_what_was_drawn_is_biased(verifier: str) -> None:
    """The harness sees the mistake: to draw, to look, and to drop."""
    far = 0.0
    for seed in range(4):
        ps, qs = models(100 * seed)
        plain = torch.outer(*(joint_distribution(p, (), LIMIT + 1).flatten() for p in ps))
        joint, _ = joint_output(verifier, ps, qs, SharedBudget(costs(0.5)), peeking=True)
        assert float(joint.sum()) == pytest.approx(1.0)
        far = max(far, total_variation(joint, plain))
    assert far > 0.01


# --- the decoder --------------------------------------------------------------------------------

SHARED = {
    "logit": DecodeConfig(stop="logit", budget="shared", calibration=(0.5, 0.8)),
    "cost, specdec++": DecodeConfig(verifier="block", stop="cost", budget="shared"),
    "cost, immediate": DecodeConfig(stop="cost", budget="shared"),
}


def head_of(name: str) -> BaseHead:
    return immediate_head() if "immediate" in name else head()


@pytest.mark.parametrize("name", SHARED)
def test_neighbours_in_a_batch_are_independent_and_each_is_plain_sampling(name: str) -> None:
    """Over several rounds of the real decoder; fails by chance once in 1e6."""
    target, prompts, length = tiny_llama(0), ([2, 3], [3]), 2
    decoder = SpeculativeDecoder.from_config(
        target, tiny_llama(1), SHARED[name], head_of(name), costs=costs(0.6)
    )
    pairs = 400
    seeds = [torch.Generator().manual_seed(seed) for seed in range(2 * pairs)]
    asked = [torch.tensor(prompt) for _ in range(pairs) for prompt in prompts]
    outs = decoder.generate_batch(asked, max_new_tokens=length, generators=seeds, size=4)
    texts = [tuple(out.tokens.tolist()) for out in outs]
    first, second = (joint_of_model(target, p, length, SHARED[name].sampling) for p in prompts)
    product = {(a, b): x * y for a, x in first.items() for b, y in second.items()}
    assert p_value(Counter(zip(texts[::2], texts[1::2], strict=True)), product) > LEVEL
    assert len({record.drafted for out in outs for record in out.rounds}) > 1


def decode(decoder: SpeculativeDecoder, first: int = 0) -> list[tuple[list[int], list[int]]]:
    prompts = [torch.tensor(ids) for ids in ([2], [3, 4, 5], [7, 8, 9, 10], [5, 6], [1, 1])]
    seeds = [torch.Generator().manual_seed(first + number) for number in range(len(prompts))]
    outs = decoder.generate_batch(prompts, max_new_tokens=24, generators=seeds, size=3)
    return [(out.tokens.tolist(), [record.drafted for record in out.rounds]) for out in outs]


@pytest.mark.parametrize("name", SHARED)
def test_generators_and_costs_decide_everything_whatever_was_decoded_before(name: str) -> None:
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)
    decoder = SpeculativeDecoder.from_config(
        target, draft, SHARED[name], head_of(name).double(), costs=costs(0.4)
    )
    first = decode(decoder)
    decode(decoder, first=100)
    assert decode(decoder) == first
    assert len({n for _, drafted in first for n in drafted}) > 2, "the budget must do something"


def test_no_drawn_token_is_dropped_and_at_most_one_forward_of_a_round_draws_none() -> None:
    target, draft = tiny_llama(2, vocab=40, layers=2), tiny_llama(1, vocab=40)
    config = SHARED["logit"].replace(limit=3)
    decoder = SpeculativeDecoder.from_config(target, draft, config, costs=costs(0.4))
    prompt = torch.tensor([2, 5])
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        out = decoder.generate(prompt, max_new_tokens=15, generator=generator)
        assert sum(record.emitted for record in out.rounds) == len(out.tokens) <= 15
        for record in out.rounds:
            assert record.draft_forwards - record.drafted in (0, 1)
            assert record.drafted <= 3


def test_costs_are_measured_once_and_again_for_a_larger_batch() -> None:
    target, draft = tiny_llama(2, vocab=40), tiny_llama(1, vocab=40)
    short = SHARED["logit"].replace(limit=3)
    decoder = SpeculativeDecoder.from_config(target, draft, short)
    assert decoder.measure_costs(1).sequences == (1,)
    assert all(tokens for tokens, _ in decode(decoder))  # three at a time
    table = decoder.costs
    assert table is not None
    assert (table.sequences, table.tokens) == ((1, 2, 3), (1, 2, 3))
    decode(decoder)
    assert decoder.costs is table
    assert min(map(min, table.target)) > 0 < min(table.draft)
    again = CostTable(**asdict(table))
    other = SpeculativeDecoder.from_config(target, draft, SHARED["logit"], costs=again)
    assert decode(other) == decode(
        SpeculativeDecoder.from_config(target, draft, SHARED["logit"], costs=table)
    )
    with pytest.raises(ConfigError, match="shared"):
        SpeculativeDecoder.from_config(target, draft, DecodeConfig()).measure_costs(2)


def test_costs_are_measured_within_the_positions_that_both_models_have() -> None:
    target, draft = tiny("gpt2", 2, n_positions=96), tiny("gpt2", 1, n_positions=80)
    table = SpeculativeDecoder.from_config(target, draft, SHARED["logit"]).measure_costs(1)
    assert table.tokens[:2] == (1, 2)


@pytest.mark.parametrize("stop", ["fixed", "confidence", "entropy"])
def test_a_rule_that_estimates_no_survival_cannot_share_a_budget(stop: str) -> None:
    with pytest.raises(ConfigError, match=r"does not estimate: choose from .*logit"):
        DecodeConfig(stop=stop, budget="shared")


# --- estimates ----------------------------------------------------------------------------------


def test_a_heads_estimates_are_its_survival_with_the_logistic_model_for_what_it_cannot_judge() -> (
    None
):
    for made, asks_before in ((immediate_head(), True), (head(), False)):
        estimate, alone = Estimates((0.3, 0.9), made).start(), Survival(made)
        draw = torch.Generator().manual_seed(3)
        for _ in range(2):  # rounds
            estimate.begin()
            alone.begin()
            survival = 1.0
            for place in range(4):
                row = torch.rand(7, generator=draw).softmax(-1)
                state, embedding = torch.randn(2, 16, generator=draw) / 8
                upcoming = UpcomingToken(row, state, place)
                newest = float(torch.sigmoid(0.3 + 0.9 * torch.logit(row.max())))
                before = alone.before(upcoming) if asks_before else survival * newest
                assert estimate.before(upcoming) == pytest.approx(before, rel=1e-5)
                drafted = DraftedToken(place, row, state, embedding, place)
                survival = estimate.after(drafted)
                assert survival == pytest.approx(alone.after(drafted, newest), rel=1e-5)


def test_all_slots_learn_from_what_one_of_them_saw() -> None:
    shared = Estimates((0.0, 1.0))
    one, other = shared.start(), shared.start()
    row = torch.tensor([0.8, 0.2])

    def judged(estimate: SurvivalEstimate) -> float:
        estimate.begin()
        return estimate.before(UpcomingToken(row, None))

    first = judged(other)
    for _ in range(50):
        judged(one)
        one.observe(Round(1, 1, 0, 1, 1, 0.0, 0.0, 0.0))
    assert judged(other) < 0.5 < first == pytest.approx(0.8)
    shared.restart()
    assert judged(other) == first


# --- what is admitted ---------------------------------------------------------------------------


def test_the_likeliest_bids_are_admitted_and_only_as_many_as_pay() -> None:
    bids = [Bid(chance, 1, known=True) for chance in (0.2, 0.9, 0.5, 0.7)]
    # Plain decoding of 4 sequences takes 4 + 4 for 4 tokens: 2 a token.
    for column, expected in ((0.1, 4), (0.5, 3), (1.2, 2), (1.5, 1), (1.9, 0)):
        answers = SharedBudget(costs(column)).admit(bids, [])
        assert sum(answers) == expected
        ranked = sorted(zip(bids, answers, strict=True), key=lambda pair: -pair[0].survival)
        assert [answer for _, answer in ranked] == [True] * expected + [False] * (4 - expected)


def test_a_drafting_step_is_paid_for_together() -> None:
    """One sequence alone does not pay for a step that takes as long for all."""
    table = costs(column=0.1, draft=0.5)  # a step takes .5 + .5 n
    budget = SharedBudget(table)
    bid = Bid(0.6, 1, known=False)
    assert budget.admit([bid], [2, 2, 2]) == [False]
    assert budget.admit([bid] * 4, []) == [True] * 4


def test_where_forwards_are_padded_a_token_costs_a_column_and_the_next_ones_nothing() -> None:
    bids = [Bid(0.4, 1, known=True)] * 2
    table = costs(column=0.6)
    assert SharedBudget(table).admit(bids, [1, 1]) == [True, True]
    # Two tokens of 2 * .4 do not pay for a column of four.
    assert SharedBudget(table, packed=False).admit(bids, [1, 1]) == [False, False]
    # Beside a longer draft the column is there already.
    assert SharedBudget(table, packed=False).admit(bids, [1, 3]) == [True, True]


def test_the_faster_decoding_is_the_less_a_token_is_worth() -> None:
    budget = SharedBudget(costs(0.5))
    budget.ran(target=False, tokens=[1, 1])
    for _ in range(200):
        for _ in range(2):
            budget.emitted(emitted=4, drafted=3, accepted=3)
        budget.ran(target=True, tokens=[4, 4])
    # 9 seconds for 8 tokens, of plain decoding 3 seconds a token; after 200 rounds.
    assert budget.share_of_plain == pytest.approx((4 + 2 + 3) / 8 / 3, rel=0.02)
    assert budget.mean_acceptance > 0.99
    budget.restart()
    assert budget.share_of_plain == 1.0
    assert budget.mean_acceptance == pytest.approx(0.8)


# --- the table ----------------------------------------------------------------------------------


def test_a_table_gives_its_entries_and_is_linear_between_and_beyond_them() -> None:
    table = costs(column=0.7, draft=0.3)
    for n, tokens in ((1, 1), (2, 6), (3, 7.5), (4, 16), (8, 40)):
        expected = 4 + n + 0.7 * (tokens - n)
        assert table.target_seconds(n, tokens) == pytest.approx(expected)
        assert table.draft_seconds(n) == pytest.approx(0.3 * (1 + n))
    assert table.draft_seconds(0) == 0.0


def test_measured_times_that_fall_are_smoothed_and_never_taken_as_they_are() -> None:
    times = np.array([[1.0, 3.0, 2.0, 4.0], [2.0, 2.0, 1.0, 8.0]])
    table = CostTable.smoothed((1, 2), (1, 2, 4, 8), times, np.array([0.2, 0.1]))
    smooth = np.array(table.target)
    assert (np.diff(smooth, axis=0) >= 0).all()
    assert (np.diff(smooth, axis=1) >= 0).all()
    assert table.draft == pytest.approx((0.15, 0.15))
    assert smooth[0] == pytest.approx([1.0, (2.5 + 5 / 3) / 2, (2.5 + 5 / 3) / 2, 4.0])
    with pytest.raises(ValueError, match="must not fall"):
        CostTable((1, 2), (1, 2), ((2.0, 1.0), (2.0, 3.0)), (0.1, 0.1))
    with pytest.raises(ValueError, match="ascend from 1"):
        CostTable((2, 4), (1, 2), ((1.0, 2.0), (1.0, 2.0)), (0.1, 0.1))
    with pytest.raises(ValueError, match="as many times"):
        CostTable((1, 2), (1, 2), ((1.0, 2.0),), (0.1, 0.1))
