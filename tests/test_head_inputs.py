"""What a head reads is one value: the same in training, replay and decoding, with any feature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import heads.train
from eval.analysis.traces import acceptance_traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from heads import AcceptanceHead
from heads.config import HeadConfig
from heads.inputs import (
    FEATURES,
    DraftedTokens,
    Feature,
    HeadInputs,
    Moment,
    logits_of_states,
    token_embeddings,
)
from specdata.lm_head import hidden_states
from specdata.sampling import SamplingConfig
from tests.drive_head import VOCABULARY, synthetic_rows, tiny_draft

SAMPLING = SamplingConfig(temperature=0.7, top_k=20)
PROMPT = [3, 14, 15]


@dataclass(frozen=True)
class Drawn:
    """A drafted token, as stopping rules see it."""

    token: int
    distribution: Tensor
    state: Tensor | None
    embedding: Tensor | None = None
    position: int = 0
    since_rejection: int = 0


def chance(drafted: DraftedTokens) -> Tensor:
    """q of the token itself, (..., 1)."""
    return drafted.distributions().gather(-1, drafted.tokens.unsqueeze(-1))


TOY = {
    "chance": Feature(chance),
    "before": Feature(lambda drafted: drafted.before()),
    "token": Feature(lambda drafted: drafted.tokens),
}


@pytest.fixture(autouse=True)
def toy_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in FEATURES for each toy feature: all that a feature takes besides the model."""
    for name, feature in TOY.items():
        monkeypatch.setitem(FEATURES, name, feature)


class ToyHead(AcceptanceHead):
    """Reads the chance of the token only, and so judges the newest token without a lag."""

    reads: ClassVar[tuple[str, ...]] = ("chance",)
    moments: ClassVar[tuple[Moment, ...]] = (Moment.DRAWN,)
    seen: ClassVar[list[Tensor]] = []

    def forward(self, chance: Tensor) -> Tensor:
        self.seen.append(chance.detach().cpu())
        return super().forward(chance.expand(*chance.shape[:-1], self.hidden_size))


@torch.inference_mode()
def drawn_tokens(draft: PreTrainedModel, count: int) -> list[Drawn]:
    """Draft tokens one by one with a cache, as decoding does."""
    generator = torch.Generator().manual_seed(0)
    logits, cache = logits_of_states(draft), DynamicCache(config=draft.config)
    state = hidden_states(draft, torch.tensor([PROMPT]), past_key_values=cache)[0, -1]
    drawn = []
    for _ in range(count):
        distribution = (logits(state).float() / SAMPLING.temperature).softmax(-1)
        cut = distribution < distribution.topk(SAMPLING.top_k).values[-1]
        distribution = distribution.masked_fill(cut, 0.0)
        distribution = distribution / distribution.sum()
        token = int(torch.multinomial(distribution, 1, generator=generator))
        embedding = token_embeddings(draft, torch.tensor(token))
        drawn.append(Drawn(token, distribution, state, embedding, len(drawn), 7 + len(drawn)))
        state = hidden_states(draft, torch.tensor([[token]]), past_key_values=cache)[0, -1]
    return drawn


def batch_inputs(reads: list[str], draft: PreTrainedModel, ids: list[int]) -> HeadInputs:
    tokens = torch.tensor([ids])
    return HeadInputs.from_batch(
        reads,
        input_ids=tokens,
        states=hidden_states(draft, tokens),
        logits=logits_of_states(draft),
        sampling=SAMPLING,
        embeddings=lambda: token_embeddings(draft, tokens),
    )


def test_a_feature_is_the_same_of_a_batch_and_of_a_draft_under_way() -> None:
    draft = tiny_draft().eval()
    drawn = drawn_tokens(draft, 5)
    ids = PROMPT + [each.token for each in drawn]
    for name in FEATURES.keys() - {"position", "since_rejection"}:
        lag = int(FEATURES[name].moment is Moment.CONSUMED)
        whole = batch_inputs([name], draft, ids)[name][0]
        assert len(whole) == len(ids)
        for count in range(1, len(drawn) + 1):
            inputs = HeadInputs.from_drafted([name], drawn[:count])
            if count <= lag:
                assert inputs is None
                continue
            assert inputs is not None
            torch.testing.assert_close(
                inputs[name], whole[len(PROMPT) + count - 1 - lag], rtol=1e-4, atol=1e-5
            )
        if FEATURES[name].moment is Moment.BEFORE:
            for number, each in enumerate(drawn):
                before = HeadInputs.from_next([name], each)
                assert before.moment is Moment.BEFORE
                torch.testing.assert_close(
                    before[name], whole[len(PROMPT) + number], rtol=1e-4, atol=1e-5
                )


def test_places_in_a_draft_are_known_while_drafting_and_not_of_a_sequence() -> None:
    draft = tiny_draft().eval()
    drawn, reads = drawn_tokens(draft, 3), ["position", "since_rejection"]
    for count, each in enumerate(drawn):
        inputs = HeadInputs.from_drafted(reads, drawn[: count + 1])
        assert inputs is not None
        assert (int(inputs["position"]), int(inputs["since_rejection"])) == (count, count + 7)
        assert HeadInputs.from_next(reads, each).features == inputs.features
    with pytest.raises(ValueError, match="not known here"):
        batch_inputs(reads, draft, PROMPT)


def by_definition(q: list[float], token: int) -> dict[str, float]:
    """The numbers of a distribution, written down once more."""
    ordered = sorted(q, reverse=True)
    ratio = math.log(ordered[0] / ordered[1]) if ordered[1] else math.inf
    return {
        "log_q": math.log(max(q[token], 1e-30)),
        "log_q_max": math.log(ordered[0]),
        "margin": min(30.0, ratio),
        "entropy": -sum(value * math.log(value) for value in q if value),
        "log_mass_above": math.log(sum(value for value in q if value > q[token]) + 1e-6),
    }


DISTRIBUTIONS = {
    "two tokens": [0.3, 0.7],
    "all different": [0.1, 0.5, 0.15, 0.25],
    "ties at the top": [0.4, 0.2, 0.4],
    "all equal": [0.25, 0.25, 0.25, 0.25],
    "zeros, as top-k leaves": [0.0, 0.6, 0.0, 0.4],
    "one token, as greedy decoding has": [0.0, 1.0, 0.0],
    "nearly one token": [1e-14, 1.0, 0.0],
}


@pytest.mark.parametrize("q", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_numbers_follow_their_definitions(q: list[float]) -> None:
    names = ["log_q", "log_q_max", "margin", "entropy", "log_mass_above"]
    for token in range(len(q)):
        expected = by_definition(q, token)
        for dtype in (torch.float32, torch.float64):
            drawn = Drawn(token, torch.tensor(q, dtype=dtype), None)
            inputs = HeadInputs.from_drafted(names, [drawn])
            assert inputs is not None
            found = {name: float(inputs[name]) for name in names}
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        rows = DraftedTokens(  # the same of many tokens at once
            tokens=torch.full((2, 3), token),
            before=torch.Tensor,
            after=torch.Tensor,
            distributions=lambda: torch.tensor(q).expand(2, 3, -1),
        )
        for name in names:
            values = HeadInputs.of([name], rows)[name]
            assert values.shape == (2, 3)
            assert values.flatten().tolist() == pytest.approx(
                [expected[name]] * 6, rel=1e-4, abs=1e-6
            )


def test_one_feature_of_the_state_after_a_token_makes_all_wait_for_the_next_token() -> None:
    drawn = drawn_tokens(tiny_draft().eval(), 3)
    inputs = HeadInputs.from_drafted(["token", "hidden"], drawn)
    assert inputs is not None
    assert int(inputs["token"]) == drawn[1].token
    assert inputs["hidden"] is drawn[2].state
    assert HeadInputs.from_drafted(["token", "hidden"], drawn[:1]) is None


def test_only_what_a_head_reads_is_computed() -> None:
    def never(_: Tensor) -> Tensor:
        raise AssertionError("no feature that is read needs logits")

    states = torch.randn(1, 4, 32)
    inputs = HeadInputs.from_batch(
        AcceptanceHead.reads,
        input_ids=torch.zeros(1, 4, dtype=torch.long),
        states=states,
        logits=never,
        sampling=SAMPLING,
    )
    assert set(inputs.features) == {"hidden"}
    assert inputs["hidden"] is states
    uncaptured = Drawn(1, torch.ones(2) / 2, None)
    assert HeadInputs.from_drafted(["chance"], [uncaptured]) is not None
    with pytest.raises(ValueError, match="hidden states are needed and were not captured"):
        HeadInputs.from_drafted(["hidden"], [uncaptured, uncaptured])


def test_a_head_with_another_feature_goes_from_labels_to_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature is named in FEATURES and in the model's `reads`, and nowhere else."""
    draft, rows = tiny_draft().eval(), synthetic_rows(24, seed=1)
    monkeypatch.setattr(heads.train, "AcceptanceHead", ToyHead)
    config = HeadConfig(depth=1, batch_size=8, learning_rate=1e-2, epochs=2, mixing=0.0)
    result = heads.train.train_head(
        draft=draft,
        train=rows,
        dev=synthetic_rows(8, seed=2),
        out=tmp_path,
        config=config,
        seed=0,
        sampling=SAMPLING,
    )
    assert result.losses[-1] < result.losses[0]
    trained = {len(chances.shape) for chances in ToyHead.seen}
    assert trained == {3}  # (B, T, 1)
    head = ToyHead.from_pretrained(tmp_path)

    # Replay: its outputs are those of the chances that the draft gave to the drafted tokens.
    row = rows[0]
    unread = [[0.0] * len(row["draft_ids"])]
    labels = rows.select([0])
    for name in ("log_q", "log_q_max", "log_q_second", "entropy", "log_mass_above"):
        labels = labels.add_column(name, unread)
    traces = acceptance_traces(labels, draft=draft, sampling=SAMPLING, head=head)
    assert traces.tokens.head is not None
    assert traces.tokens.head.drawn is not None
    for position, token in enumerate(row["draft_ids"]):
        known = row["prompt_ids"] + row["completion_ids"][:position]
        inputs = batch_inputs(["chance"], draft, [*known, token])
        expected = float(head.logits(inputs)[0, -1].detach())
        assert traces.tokens.head.drawn[0, position] == pytest.approx(expected, abs=1e-4)

    # Decoding: asked once for each drafted token, from the distribution that it was drawn from.
    ToyHead.seen.clear()
    settings = DecodeConfig(
        stop="head", threshold=0.999, limit=4, temperature=0.7, top_k=20, verifier="token"
    )
    decoder = SpeculativeDecoder.from_config(tiny_draft(1).eval(), draft, settings, head)
    out = decoder.generate(
        torch.tensor(PROMPT), max_new_tokens=12, generator=torch.Generator().manual_seed(0)
    )
    assert len(ToyHead.seen) == sum(step.drafted for step in out.rounds)
    assert all(chances.shape == (1,) and 0 < float(chances) <= 1 for chances in ToyHead.seen)
    assert max(out.tokens.tolist()) < VOCABULARY
