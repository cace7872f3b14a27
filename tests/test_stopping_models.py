"""Rivals of a head that need no training: the margin's models, and a small network on numbers."""

from __future__ import annotations

import math
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from scipy.special import expit

from eval.analysis.traces import acceptance_traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import DraftedToken
from eval.drafting.stopping.logistic import Margin, MarginModels
from eval.drafting.stopping.numbers import SHAPES, Network, Numbers, fit_network
from eval.drafting.stopping.recorded import Reals, RecordedTokens
from eval.rounds import Round
from heads import AcceptanceHead, BaseHead
from heads.immediate import ImmediateHead
from heads.inputs import HeadInputs
from specdata.config import read_config
from specdata.errors import ConfigError
from tests.test_acceptance import labeller
from tests.tiny import END, tiny_llama


def recorded(margins: Reals) -> RecordedTokens:
    lengths = np.full(len(margins), margins.shape[1])
    return RecordedTokens(
        lengths=lengths, q=np.ones_like(margins), q_max=np.ones_like(margins), margin=margins
    )


def drawn(margin: float) -> DraftedToken:
    """A token of a distribution with that margin."""
    return DraftedToken(0, torch.tensor([margin, 0.0]).double().softmax(0), None)


def finished(drafted: int, accepted: int) -> Round:
    return Round(drafted, drafted, accepted, accepted + 1, drafted, 0.0, 0.0, 0.0)


def test_each_position_is_fitted_on_the_tokens_that_a_draft_reaches_there() -> None:
    """Rollouts alternate between an easy token and a hard one, after which a draft often ends."""
    chance = np.random.default_rng(0)
    margins = chance.exponential(2.0, (40, 50))
    easy = np.arange(50) % 2 == 0
    accept = np.where(easy, 1.0, expit(-1.0 + 0.5 * margins))
    first, second = Margin.fit(recorded(margins), accept)["coefficients"][:2]
    # At a margin of 2, half of the hard tokens are accepted. A draft starts at any token; its
    # second one is hard after each easy one, and easy after every second hard one.
    assert expit(first[0] + first[1] * 2.0) == pytest.approx((1.0 + 0.5) / 2, abs=0.04)
    assert expit(second[0] + second[1] * 2.0) == pytest.approx((0.5 + 0.5) / 1.5, abs=0.04)


def test_the_margin_learns_from_known_outcomes_at_their_own_position_only() -> None:
    rule = MarginModels(Margin(coefficients=((0.0, 0.5),) * 4, threshold=0.9))
    before = [model.accept(3.0) for model in rule.models]
    rule.begin()
    should_stop = rule.should_stop
    for _ in range(4):
        should_stop(drawn(3.0))
    rule.observe(finished(drafted=4, accepted=1))
    after = [model.accept(3.0) for model in rule.models]
    assert after[0] > before[0]  # accepted
    assert after[1] < before[1]  # the first that was not
    assert after[2:] == before[2:]  # censored


def test_the_network_learns_what_made_the_labels_and_is_the_same_each_time() -> None:
    chance = np.random.default_rng(0)
    numbers = chance.normal(size=(6000, 5)) * [1.0, 2.0, 9.0, 1.0, 4.0] + [
        -1.0,
        -1.0,
        9.0,
        1.0,
        -5.0,
    ]
    truth = expit(0.3 * numbers[:, 2] - 0.5 * (numbers[:, 3] - 1.0) ** 2 - 1.0)
    state = torch.get_rng_state()
    network = fit_network(numbers, truth)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    assert np.abs(network.accept(numbers) - truth).mean() < 0.02
    again = fit_network(numbers, truth)
    assert again.written() == network.written()
    kept = Network.read(network.written())
    assert np.abs(kept.accept(numbers) - network.accept(numbers)).max() < 0.02


def test_a_network_on_greedy_drafts_whose_numbers_are_all_alike_predicts_their_mean_label() -> None:
    numbers = np.tile([0.0, 0.0, 30.0, 0.0, math.log(1e-6)], (2000, 1))
    accepted = (np.arange(2000) % 10 < 7).astype(np.float64)
    kept = Network.read(fit_network(numbers, accepted).written())
    assert kept.accept(numbers[0]) == pytest.approx(0.7, abs=0.02)


def test_a_network_is_kept_as_text_and_other_text_is_refused() -> None:
    chance = np.random.default_rng(0)
    network = Network(tuple(chance.normal(size=shape) for shape in SHAPES))
    text = network.written()
    assert len(text) < 1100
    assert Network.read(text).written() == text
    for bad in ("", "!!", text[:-8], "AAAA"):
        with pytest.raises(ConfigError, match="385 finite half-precision numbers"):
            read_config(Numbers, {"network": bad})


def test_the_network_reads_the_same_numbers_in_decoding_and_replay() -> None:
    chance = np.random.default_rng(2)
    network = Network(tuple(chance.normal(size=shape) for shape in SHAPES))
    rule = Numbers(threshold=0.6, network=network.written(), limit=5)
    distributions = torch.tensor(chance.dirichlet([0.4] * 6, 24))
    tokens = [DraftedToken(int(q.multinomial(1)), q, None) for q in distributions]
    features = [
        HeadInputs.from_drawn(("margin", "entropy", "log_mass_above"), token) for token in tokens
    ]
    margin, entropy, above = (
        np.array([[float(each[name]) for each in features]])
        for name in ("margin", "entropy", "log_mass_above")
    )
    lengths = rule.recorded_lengths(
        RecordedTokens(
            lengths=np.array([24]),
            q=np.array([[float(t.distribution[t.token]) for t in tokens]]),
            q_max=np.array([[float(t.distribution.max()) for t in tokens]]),
            margin=margin,
            entropy=entropy,
            # Recorded without what heads add to keep the logarithm finite.
            log_mass_above=np.log((np.exp(above) - 1e-6).clip(1e-13)),
        )
    )
    assert lengths is not None
    active = rule.start(None)
    for position in range(24):
        active.begin()
        should_stop, count = active.should_stop, 0
        for token in tokens[position : min(23, position + 5)]:
            count += 1
            if should_stop(token):
                break
        assert lengths[0, position] == count
    assert len(set(lengths[0].tolist())) > 2


COSTS = {"stop": "cost", "draft_seconds": 0.1, "token_seconds": 1.0}


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("specdec++", {"stop": "head", "threshold": 0.5}),
        ("specdec++", {"stop": "head", "threshold": 0.9}),
        ("specdec++", COSTS),
        ("immediate", {"stop": "head", "threshold": 0.5}),
        ("immediate", COSTS),
    ],
    ids=str,
)
def test_greedy_decoding_drafts_as_far_as_replay_of_what_it_decoded(
    kind: str, parameters: dict[str, Any]
) -> None:
    """One convention: a threshold meets the head's raw output in both, costs the unbiased one."""
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(0, vocab=12).float()
    noise = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():  # some tokens are rejected, most are not
        draft.lm_head.weight += 0.25 * noise
    torch.manual_seed(5)
    reads = ("hidden_before", "embedding", "hidden")
    head: BaseHead = (
        AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0)
        if kind == "specdec++"
        else ImmediateHead(hidden_size=16, width=16, depth=1, reads=reads)
    ).eval()
    torch.nn.init.normal_(head.output.weight, std=1.5)
    config = DecodeConfig(temperature=0.0, **parameters)
    decoder = SpeculativeDecoder.from_config(target, draft, config, head)
    compared = set[int]()
    for prompt in ([2, 5, 3], [4, 4], [7, 6, 8], [9, 2]):
        generator = torch.Generator().manual_seed(0)
        out = decoder.generate(torch.tensor(prompt), max_new_tokens=30, generator=generator)
        row = {"example_id": "a", "dataset": "d", "split": "test", "sample": 0, "turn": 0}
        row |= {"finish": "length", "prompt_ids": prompt, "completion_ids": out.tokens.tolist()}
        labels = datasets.Dataset.from_list(labeller(target, draft, config.sampling)([row]))  # type: ignore[arg-type, list-item]
        traces = acceptance_traces(labels, draft=draft, sampling=config.sampling, head=head)
        lengths = config.stop.recorded_lengths(traces.tokens)
        assert lengths is not None
        position = 0
        for turn in out.rounds[:-1]:  # the last is cut by the budget, or by an end token
            last = position + turn.drafted - 1
            if turn.accepted >= turn.drafted - 1 and labels[0]["draft_ids"][last] != END:
                assert lengths[0, position] == turn.drafted
                compared.add(turn.drafted)
            else:  # an end token ends a draft; behind a rejected token it goes its own way
                assert lengths[0, position] > turn.accepted
            position += turn.emitted
    assert len(compared) > 1
