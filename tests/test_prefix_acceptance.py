"""A head's outputs as prefix acceptance of the draft under way, and the cost rule that learns."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from eval.drafting.stopping import DraftedToken, UpcomingToken
from eval.drafting.stopping.cost import Cost, CostEstimates
from eval.drafting.stopping.logistic import sigmoid
from eval.drafting.stopping.prefix_acceptance import PrefixAcceptance
from eval.rounds import Round
from heads import AcceptanceHead, BaseHead
from heads.immediate import ImmediateHead
from heads.inputs import DecisionPoint, HeadInputs

WIDTH = 8
READS = ("hidden_before", "embedding", "hidden", "log_q", "position")


def immediate(*decision_points: str) -> ImmediateHead:
    torch.manual_seed(4)
    head = ImmediateHead(
        hidden_size=WIDTH, width=8, depth=1, reads=READS, decision_points=decision_points
    ).eval()
    torch.nn.init.normal_(head.output.weight)
    return head


def tokens(count: int) -> list[DraftedToken]:
    generator = torch.Generator().manual_seed(1)
    q = torch.rand(count, 5, generator=generator).softmax(dim=-1)
    states = torch.randn(count, WIDTH, generator=generator)
    embeddings = torch.randn(5, WIDTH, generator=generator)
    return [
        DraftedToken(place % 5, q[place], states[place], embeddings.__getitem__, place, 7 + place)
        for place in range(count)
    ]


def upcoming(token: DraftedToken) -> UpcomingToken:
    known = token.state, token.embed, token.position, token.since_rejection
    return UpcomingToken(token.distribution, *known)


@torch.inference_mode()
def estimates(head: ImmediateHead, drafted: list[DraftedToken]) -> dict[DecisionPoint, list[float]]:
    """The head's answer for each token at each decision point, the features put together here."""
    made: dict[DecisionPoint, list[float]] = {point: [] for point in DecisionPoint}
    for place, token in enumerate(drafted):
        assert token.state is not None
        features: dict[str, Tensor] = {
            "hidden_before": token.state,
            "position": torch.tensor(float(place)),
        }
        for point in DecisionPoint:
            if point is DecisionPoint.DRAWN:
                embedding = token.embed(torch.tensor(token.token))
                assert embedding is not None
                q = token.distribution[token.token]
                features |= {"embedding": embedding, "log_q": q.log()}
            if point is DecisionPoint.CONSUMED:
                after = drafted[place + 1].state if place + 1 < len(drafted) else None
                if after is None:
                    continue
                features |= {"hidden": after}
            if point not in head.decision_points:
                continue
            logit = head.logits(HeadInputs(dict(features), point))
            made[point].append(sigmoid(float(logit)))
    return made


@pytest.mark.parametrize("asks", [False, True])
def test_older_tokens_count_as_consumed_and_the_newest_as_drawn(asks: bool) -> None:
    head, drafted = immediate("before", "drawn", "consumed"), tokens(5)
    known = estimates(head, drafted)
    prefix_acceptance = PrefixAcceptance(head)
    for _ in range(2):  # a second round starts afresh
        prefix_acceptance.begin()
        older = 1.0
        for place, token in enumerate(drafted):
            if place and asks:
                consumed = older * known[DecisionPoint.CONSUMED][place - 1]
                before = consumed * known[DecisionPoint.BEFORE][place]
                assert prefix_acceptance.before(upcoming(token)) == pytest.approx(before)
            older *= known[DecisionPoint.CONSUMED][place - 1] if place else 1.0
            expected = older * known[DecisionPoint.DRAWN][place]
            assert prefix_acceptance.after(token) == pytest.approx(expected)


@pytest.mark.parametrize("late", [(), ("consumed",)])
def test_a_token_that_is_judged_before_it_is_drawn_counts_so_until_more_is_known(
    late: tuple[str, ...],
) -> None:
    head, drafted = immediate("before", *late), tokens(4)
    known, prefix_acceptance, older = estimates(head, drafted), PrefixAcceptance(head), 1.0
    final = known[DecisionPoint.CONSUMED if late else DecisionPoint.BEFORE]
    for place, token in enumerate(drafted):
        older *= final[place - 1] if place else 1.0
        expected = older * known[DecisionPoint.BEFORE][place]
        assert prefix_acceptance.before(upcoming(token)) == pytest.approx(expected)
        assert prefix_acceptance.after(token) == pytest.approx(expected)


def test_specdecs_head_is_one_token_late_and_its_bias_is_undone_only_if_asked() -> None:
    torch.manual_seed(2)
    head, drafted = AcceptanceHead(hidden_size=WIDTH, depth=1, rejection_weight=6.0), tokens(4)
    for calibrated in (False, True):
        prefix_acceptance, product = PrefixAcceptance(head, calibrated=calibrated), 1.0
        for place, token in enumerate(drafted):
            if place:
                raw = float(torch.sigmoid(head(token.state).detach()))
                product *= 6 * raw / (1 - raw + 6 * raw) if calibrated else raw
            assert prefix_acceptance.after(token, newest=0.5) == pytest.approx(product * 0.5)


def rounds_of(
    prefix_acceptance: PrefixAcceptance, head: BaseHead, shift: float, count: int
) -> None:
    """Decode with a head whose logits are `shift` too high."""
    chance, drafted = random.Random(0), tokens(6)
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        prefix_acceptance.begin()
        # Other states in each round, the same head.
        length = chance.randint(1, 6)
        noise = 2.0 * torch.randn(6, WIDTH, generator=generator)
        turn = [
            DraftedToken(t.token, t.distribution, state, t.embed, t.position)
            for t, state in zip(drafted[:length], noise, strict=False)
        ]
        accepted, alive = 0, True
        for token in turn:
            prefix_acceptance.after(token)
            inputs = HeadInputs.from_drawn(head.reads, token)
            with torch.inference_mode():
                alive = alive and chance.random() < sigmoid(float(head.logits(inputs)) - shift)
            accepted += alive
        prefix_acceptance.observe(
            Round(length, length, accepted, accepted + 1, length, 0.0, 0.0, 0.0)
        )


def test_a_head_that_is_sure_of_too_much_is_recalibrated_by_what_is_accepted() -> None:
    for refit in (True, False):
        head = immediate("drawn")
        prefix_acceptance = PrefixAcceptance(head, refit=refit)
        rounds_of(prefix_acceptance, head, shift=1.5, count=500)
        model = prefix_acceptance.models[DecisionPoint.DRAWN]
        if refit:
            assert model.intercept == pytest.approx(-1.5, abs=0.3)
            assert model.slope == pytest.approx(1.0, abs=0.3)
        else:
            assert model.coefficients == (0.0, 1.0)


def test_with_both_forwards_times_given_lambda_follows_from_counts_and_no_clock() -> None:
    """The times that rounds report are not read: here they are absurd."""
    rule = CostEstimates(Cost(draft_seconds=0.2, target_seconds=1.0))
    for turn in range(64):
        k = 1 + turn % 4
        rule.begin()
        rule.observe(Round(k, k, k - 1, k, k, 1e9, 1e9, 1e9))
    # Four rounds draft 1 + 2 + 3 + 4 tokens and emit as many.
    assert rule.token_seconds == pytest.approx((4 * 1.0 + 10 * 0.2) / 10)
    assert rule.draft_seconds == 0.2
    assert rule.mean_acceptance == pytest.approx((20 * 0.8 + 0) / 20, abs=0.4)


def test_what_the_target_takes_longer_for_a_token_is_measured_for_the_question_before() -> None:
    head = immediate("before", "drawn")
    rule = CostEstimates(Cost(before_drawing=True), head)
    for turn in range(64):
        k = 1 + turn % 5
        rule.begin()
        rule.observe(Round(k, k, 0, 1, k, 0.4 * k, 5.0 + 0.3 * k, 0.1))
    assert rule.draft_seconds == pytest.approx(0.7)
    assert rule.verify_seconds == pytest.approx(0.3)
