"""Stopping rules: lossless, within their limits, and the cost rule near the exact optimum."""

import random

import pytest
import torch
from pydantic_core import PydanticUndefined

from eval.decode_config import Method
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import STOPPING_RULES, DraftedToken, StoppingRule
from eval.drafting.stopping.cost import Cost, CostEstimates, gain
from eval.drafting.stopping.logistic import Logit
from eval.drafting.stopping.thresholds import Confidence, Cumulative, Entropy
from eval.measuring.records import check_identity, record_prompt
from eval.rounds import Round
from specdata.config import read_config
from tests.support.decoder import head
from tests.support.optimal_stopping import AcceptanceChain, best_length, optimum, seconds_per_token
from tests.support.tiny import tiny_llama

COSTS = {"draft_seconds": 0.3, "token_seconds": 1.0}


@pytest.mark.parametrize("stop", STOPPING_RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_rule_drops_a_drawn_token_or_passes_its_limit_or_the_budget(
    stop: str, temperature: float
) -> None:
    config = DecodeConfig(
        stop=stop,  # type: ignore[arg-type]
        length=3,
        limit=3,
        threshold=0.2 if stop in ("confidence", "cumulative") else 0.8,
        temperature=temperature,
    )
    decoder = SpeculativeDecoder.from_config(
        tiny_llama(0, vocab=40), tiny_llama(1, vocab=40), config, head()
    )
    for seed in range(8):
        out = decoder.generate(
            torch.tensor([2, 5]), max_new_tokens=13, generator=torch.Generator().manual_seed(seed)
        )
        room = 13
        for turn in out.rounds:
            # A token is drawn from each forward of the draft: more forwards would be a drop.
            assert turn.draft_forwards == turn.drafted <= min(config.stop.longest, room - 1)
            room -= turn.emitted
        record = record_prompt("a", out.rounds, seconds=out.seconds, finish=out.finish)
        check_identity(record)


def test_with_given_costs_a_seed_decides_everything_whatever_was_decoded_before() -> None:
    config = DecodeConfig(stop="cost", temperature=1.5, **COSTS)  # type: ignore[arg-type]
    target, draft = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    decoder = SpeculativeDecoder.from_config(target, draft, config)

    def decode(seed: int) -> tuple[list[int], list[int]]:
        generator = torch.Generator().manual_seed(seed)
        out = decoder.generate(torch.tensor([2, 3]), max_new_tokens=40, generator=generator)
        return out.tokens.tolist(), [turn.drafted for turn in out.rounds]

    first = decode(1)
    others = [decode(seed) for seed in range(2, 8)]
    assert decode(1) == first
    assert len({n for _, drafted in others for n in drafted}) > 1, "the rule must do something"


def distribution(accept: float) -> torch.Tensor:
    """Some distribution whose largest probability is `accept`."""
    places = int(1 / accept)
    rest = 1 - accept * places
    return torch.tensor([accept] * places + [rest], dtype=torch.float64)


def test_a_certain_token_stops_nothing_even_at_the_strictest_threshold() -> None:
    """A value that is the threshold itself is not beyond it."""
    for rule in (
        Confidence(threshold=1.0).start(None),
        Entropy(threshold=0.0).start(None),
        Cumulative(threshold=1.0).start(None),
        Logit(threshold=0.5).start(None),
        CostEstimates(Cost(draft_seconds=0.1, token_seconds=1.0)),
    ):
        rule.begin()
        assert not any(rule.should_stop(DraftedToken(1, torch.eye(4)[1], None)) for _ in range(100))


@pytest.mark.parametrize("rule", [Cumulative(threshold=0.5), Logit(threshold=0.5)], ids=repr)
def test_rules_of_a_whole_draft_multiply_what_they_read_of_its_tokens(rule: StoppingRule) -> None:
    active = rule.start(None)
    for _ in range(2):  # a second round starts afresh
        active.begin()
        ends = [active.should_stop(DraftedToken(0, distribution(0.6), None)) for _ in range(2)]
        assert ends == [False, True]


GOLDENS = [
    ((0.95, 0.4), (0.8, 0.2), 0.1, 0.332117),
    ((0.99, 0.3), (0.7, 0.3), 0.2092, 0.478066),
    ((0.9, 0.5, 0.1), (0.5, 0.3, 0.2), 0.05, 0.473976),
]


@pytest.mark.parametrize("golden", GOLDENS)
def test_dinkelbachs_loop_over_the_cost_rule_reaches_the_optimum_in_five_steps(
    golden: tuple[tuple[float, ...], tuple[float, ...], float, float],
) -> None:
    accept, weights, draft, least = golden
    chain, price = AcceptanceChain.iid(accept, weights, draft), 1.0
    mean = sum(a * w for a, w in zip(accept, weights, strict=True))
    for _ in range(5):

        def pays(_n: int, alive: float, _d: float, _a: float, price: float = price) -> bool:
            saved = gain(alive, mean_acceptance=mean, token_seconds=price, draft_seconds=draft)
            return saved > 0.0

        price = seconds_per_token(chain, pays)
    assert price == pytest.approx(least, abs=1e-6)
    assert price == pytest.approx(optimum(chain))


def test_the_measured_cost_rule_lies_between_the_optimum_and_the_best_fixed_length() -> None:
    """It starts without knowing costs, mean acceptance or calibration, and reads times only."""
    accept, weights, draft, least = GOLDENS[1]
    chance = random.Random(0)
    rule = CostEstimates(Cost(calibration=(1.0, 0.5)))
    seconds, emitted = 0.0, 0
    records, known = list[Round](), list[bool]()
    for turn in range(6000):
        rule.begin()
        stop, seen = rule.should_stop, list[float]()
        while len(seen) < 25:
            seen.append(chance.choices(accept, weights)[0])
            if stop(DraftedToken(0, distribution(seen[-1]), None)):
                break
        outcomes = [chance.random() < a for a in seen]
        accepted = outcomes.index(False) if False in outcomes else len(outcomes)
        drafting = draft * len(seen)
        records.append(
            Round(
                drafted=len(seen),
                depth=len(seen),
                accepted=accepted,
                emitted=accepted + 1,
                draft_forwards=len(seen),
                draft_seconds=drafting + (5.0 if turn % 40 == 0 else 0.0),  # a prefill
                target_seconds=1.0,
                overhead_seconds=0.0,
            )
        )
        known += outcomes[: accepted + 1]
        rule.observe(records[-1])
        if len(records) % 64 == 0:  # when it measures: the last 128 rounds, without the prefills
            last = records[-128:]
            took = len(last) + draft * sum(each.drafted for each in last)
            assert rule.token_seconds == pytest.approx(took / sum(each.emitted for each in last))
            assert rule.draft_seconds == pytest.approx(draft)
            of_drafted = (20 * 0.8 + sum(known[-512:])) / (20 + len(known[-512:]))
            assert rule.mean_acceptance == pytest.approx(of_drafted)
        if turn >= 200:
            seconds, emitted = seconds + drafting + 1.0, emitted + accepted + 1
    fixed = best_length(AcceptanceChain.iid(accept, weights, draft))
    # One hundredth for the noise of 6000 rounds.
    assert least * 0.99 < seconds / emitted < least * 1.03 < fixed


def test_a_drafted_tokens_cost_is_what_rounds_take_longer_or_its_share_of_a_forward() -> None:
    """Where longer drafts seem to take no longer: half of its forward."""
    longer, shared, floored = (CostEstimates(Cost()) for _ in range(3))
    for turn in range(64):
        k = 1 + turn % 5
        for rule in (longer, shared, floored):
            rule.begin()
        floored.observe(Round(k, k, 0, 1, k, 0.4 * k, 5.0 - 0.4 * k, 0.1))
        longer.observe(Round(k, k, 0, 1, k, 0.4 * k, 5.0 + 0.3 * k, 0.1))
        shared.observe(Round(4, 4, 1, 2, 1, 0.4, 1.0, 0.0))  # four tokens of one forward
    assert longer.draft_seconds == pytest.approx(0.7)
    assert shared.draft_seconds == pytest.approx(0.1)
    assert floored.draft_seconds == pytest.approx(0.2)


@pytest.mark.parametrize("rule", STOPPING_RULES.values(), ids=lambda rule: rule.name)
def test_a_rule_describes_its_parameters_which_no_other_setting_is_called(
    rule: type[StoppingRule],
) -> None:
    assert STOPPING_RULES[rule.name] is rule
    settings = {*DecodeConfig.model_fields, *Method.model_fields}
    assert not settings & set(rule.model_fields)
    for name, field in rule.model_fields.items():
        assert field.description, name
        assert field.default is not PydanticUndefined, name
    made = read_config(Method, {"name": "a", "stop": rule.name})
    assert made.stop == rule()
    assert DecodeConfig(stop=rule()) == DecodeConfig(stop=rule.name)


def test_one_call_may_name_the_parameters_of_several_rules() -> None:
    """As a loop over rules does; what the chosen rule does not have is ignored."""
    given = {"length": 7, "threshold": 0.25, "limit": 5}
    for name, rule in STOPPING_RULES.items():
        config = DecodeConfig(stop=name, temperature=0.5, **given)  # type: ignore[arg-type]
        defaults = rule().reported()
        mine = {key: value for key, value in given.items() if key in rule.model_fields}
        assert config.stop.reported() == {**defaults, **mine}
    assert DecodeConfig(stop=Logit(threshold=0.2)).replace(limit=3).stop == Logit(
        threshold=0.2, limit=3
    )
