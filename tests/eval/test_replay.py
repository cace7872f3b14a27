"""Stopping rules along recorded rollouts: as the decoder drafts, and against the oracle."""

from dataclasses import replace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.papers.replay import Times, expected_counts, oracle_counts, recorded_lengths
from benchmarks.papers.traces import Traces, acceptance_traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from eval.drafting.stopping import STOPPING_RULES, DraftedToken, StoppingRule
from eval.drafting.stopping.cost import Cost
from eval.drafting.stopping.recorded import RecordedHead, RecordedTokens
from eval.drafting.stopping.thresholds import Fixed, HeadThreshold
from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from specdata.probability import SamplingConfig, probabilities
from tests.support.acceptance import labeller, rollout
from tests.support.tiny import END, tiny_llama

SAMPLING = SamplingConfig(temperature=0.8)


@pytest.fixture(scope="module")
def labels() -> datasets.Dataset:
    """Labels of twelve rollouts."""
    target, draft = tiny_llama(0, vocab=12).float(), tiny_llama(1, vocab=12).float()
    texts = torch.randint(2, 12, (12, 14), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [rollout(n, ids[3:], prompt=tuple(ids[:3])) for n, ids in enumerate(texts)]
    return datasets.Dataset.from_list(labeller(target, draft, SAMPLING)(rows))  # type: ignore[arg-type]


HEAD = {"hidden_size": 16, "depth": 1, "rejection_weight": 6.0}


def made_head() -> AcceptanceHead:
    torch.manual_seed(1)
    head = AcceptanceHead(**HEAD).eval()  # type: ignore[arg-type]
    torch.nn.init.normal_(head.output.weight, std=2.0)
    return head


def drafted_tokens(draft: PreTrainedModel, row: dict[str, Any]) -> list[DraftedToken]:
    """Each Y_i as a rule meets it: its distribution, and the state after the token before it.

    That state has consumed Y_(i-1) after X_<(i-1), as in the labels. The last one describes no
    token, and holds the state after Y_n.
    """
    made, state = [], torch.zeros(16)
    for position, token in enumerate(row["draft_ids"]):
        known = [*row["prompt_ids"], *row["completion_ids"][:position]]
        with torch.no_grad():
            logits = draft(input_ids=torch.tensor([known])).logits[0, -1]
            made.append(DraftedToken(token, probabilities(logits, SAMPLING), state))
            ids = torch.tensor([[*known, token]])
            state = draft.base_model(input_ids=ids).last_hidden_state[0, -1]
    return made


COSTS = {"draft_seconds": 0.2, "token_seconds": 1.0, "mean_acceptance": 0.7}
RULES: list[StoppingRule] = [
    *(rule() for rule in STOPPING_RULES.values() if not rule().measured),
    *(rule.model_validate(each) for rule in STOPPING_RULES.values() for each in rule.examples),
    Cost(**COSTS),  # type: ignore[arg-type]
    Cost(draft_seconds=0.1, token_seconds=1.0, head=False, limit=5),
]


@pytest.fixture(scope="module")
def recorded(labels: datasets.Dataset) -> tuple[Traces, AcceptanceHead, list[list[DraftedToken]]]:
    """Traces of all rollouts with a head, and each rollout's tokens as a rule meets them."""
    draft, head = tiny_llama(1, vocab=12).float(), made_head()
    traces = acceptance_traces(labels, draft=draft, sampling=SAMPLING, head=head)
    for own, row in zip(traces.accept, labels, strict=True):
        assert own[: len(row["accept_prob"])].tolist() == row["accept_prob"]
    return traces, head, [drafted_tokens(draft, row) for row in labels]


def longest_drafts(rule: StoppingRule, head: BaseHead, tokens: list[DraftedToken]) -> list[int]:
    """The number of tokens that a rule itself drafts from each position of a rollout."""
    lengths = []
    for position in range(n := len(tokens)):
        active = rule.start(head)
        active.begin()
        drafted = 0
        for token in tokens[position : min(n - 1, position + active.longest)]:
            drafted += 1
            if active.should_stop(token):
                break
        lengths.append(drafted)
    return lengths


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_drafts_as_far_along_recorded_numbers_as_along_distributions_and_states(
    rule: StoppingRule, recorded: tuple[Traces, AcceptanceHead, list[list[DraftedToken]]]
) -> None:
    """From every position of every rollout, so a new rule is tested without a line here."""
    traces, head, tokens = recorded
    lengths = recorded_lengths(rule, traces.tokens)
    for number, own in enumerate(tokens):
        assert lengths[number, : len(own)].tolist() == longest_drafts(rule, head, own), number


GIVEN = {"stop": "cost", "draft_seconds": 0.1, "token_seconds": 1.0}


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        ("specdec++", {"stop": "head", "threshold": 0.5}),
        ("specdec++", {"stop": "head", "threshold": 0.9}),
        ("specdec++", GIVEN),
        ("immediate", {"stop": "head", "threshold": 0.5}),
        ("immediate", GIVEN),
        ("confidence", {"stop": "head", "threshold": 0.5}),
        ("confidence", GIVEN),
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
    made: dict[str, BaseHead] = {
        "specdec++": AcceptanceHead(hidden_size=16, depth=1, rejection_weight=6.0),
        "immediate": ImmediateHead(hidden_size=16, width=16, depth=1),
        "confidence": ConfidenceHead(hidden_size=16, rejection_weight=6.0),
    }
    head = made[kind].eval()
    torch.nn.init.normal_(head.output.weight, std=1.5)
    config = DecodeConfig(temperature=0.0, **parameters)
    decoder = SpeculativeDecoder.from_config(target, draft, config, head)
    compared = set[int]()
    for prompt in ([2, 5, 3], [4, 4], [7, 6, 8], [9, 2]):
        generator = torch.Generator().manual_seed(0)
        out = decoder.generate(torch.tensor(prompt), max_new_tokens=30, generator=generator)
        row = rollout(0, out.tokens.tolist(), prompt=tuple(prompt))
        labels = datasets.Dataset.from_list(labeller(target, draft, config.sampling)([row]))  # type: ignore[arg-type]
        traces = acceptance_traces(labels, draft=draft, sampling=config.sampling, head=head)
        lengths = recorded_lengths(config.stop, traces.tokens)
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


def simulated_traces(generator: torch.Generator) -> Traces:
    """60 sequences of 80 positions whose acceptance probability is .97 or .3."""
    accept = torch.where(torch.rand(60, 80, generator=generator) < 0.8, 0.97, 0.3).double().numpy()
    lengths = np.full(60, 80, dtype=np.int64)
    return Traces(RecordedTokens(lengths=lengths, q=accept, q_max=accept), accept)


TIMES = Times(draft_seconds=0.1, target_seconds=1.0)


def seconds(rule: StoppingRule, traces: Traces) -> float:
    """By a token."""
    counts = expected_counts(traces, recorded_lengths(rule, traces.tokens))
    return counts.seconds_per_token(TIMES)


def with_head(traces: Traces, lag: int = 0) -> Traces:
    """With the outputs of a head that knows the acceptance, `lag` tokens late."""
    recorded = RecordedHead(np.log(traces.accept / (1 - traces.accept)), lag)
    return replace(traces, tokens=replace(traces.tokens, head=recorded))


def test_no_rule_is_faster_than_the_oracle_and_a_perfect_head_beats_every_fixed_length() -> None:
    traces = simulated_traces(torch.Generator().manual_seed(0))
    fixed = min(seconds(Fixed(length=n), traces) for n in range(1, 21))
    heads = [HeadThreshold(threshold=step / 20) for step in range(20)]
    late, prompt = (min(seconds(head, with_head(traces, lag)) for head in heads) for lag in (1, 0))
    oracle = oracle_counts(traces).seconds_per_token(TIMES)
    assert oracle < prompt < late < fixed
