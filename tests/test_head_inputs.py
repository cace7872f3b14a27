"""The inputs of heads are one value, in training, replay and decoding; what our own makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import heads.train
from eval.analysis.traces import acceptance_traces
from eval.decoder import DecodeConfig, SpeculativeDecoder
from heads import AcceptanceHead, BaseHead, ImmediateHead
from heads.config import DEFAULT_FEATURES, HeadConfig
from heads.inputs import (
    FEATURES,
    DecisionPoint,
    DraftedTokens,
    Feature,
    HeadInputs,
    logits_of_states,
    token_embeddings,
)
from heads.judge import TorchJudge, judge_of
from specdata.lm_head import hidden_states
from specdata.sampling import SamplingConfig
from tests.drive_head import VOCABULARY, synthetic_rows, tiny_draft

SAMPLING = SamplingConfig(temperature=0.7, top_k=20)
PROMPT = [3, 14, 15]


@dataclass(frozen=True, eq=False)
class Drawn:
    """A drafted token, as stopping rules see it."""

    token: int
    distribution: Tensor
    state: Tensor | None
    embeddings: Tensor | None = None
    position: int = 0
    since_rejection: int = 0

    def embed(self, ids: Tensor) -> Tensor | None:
        return None if self.embeddings is None else self.embeddings[ids]


def chance(drafted: DraftedTokens) -> Tensor:
    """q of the token itself, (..., 1)."""
    return drafted.distributions().gather(-1, drafted.tokens.unsqueeze(-1))


class ToyHead(AcceptanceHead):
    """Reads the chance of the token only, and so judges the newest token without a lag."""

    reads: ClassVar[tuple[str, ...]] = ("chance",)
    decision_points: ClassVar[tuple[DecisionPoint, ...]] = (DecisionPoint.DRAWN,)
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
        embeddings = token_embeddings(draft, torch.arange(VOCABULARY))
        drawn.append(Drawn(token, distribution, state, embeddings, len(drawn), 7 + len(drawn)))
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
        lag = int(FEATURES[name].point is DecisionPoint.CONSUMED)
        whole = batch_inputs([name], draft, ids)[name][0]
        assert len(whole) == len(ids)
        for number, each in enumerate(drawn[: len(drawn) - lag]):
            inputs = HeadInputs.from_drawn([name], each, drawn[number + 1] if lag else None)
            torch.testing.assert_close(
                inputs[name], whole[len(PROMPT) + number], rtol=1e-4, atol=1e-5
            )
        if FEATURES[name].point is DecisionPoint.BEFORE:
            for number, each in enumerate(drawn):
                before = HeadInputs.from_next([name], each)
                assert before.point is DecisionPoint.BEFORE
                torch.testing.assert_close(
                    before[name], whole[len(PROMPT) + number], rtol=1e-4, atol=1e-5
                )


def test_places_in_a_draft_are_known_while_drafting_and_not_of_a_sequence() -> None:
    draft = tiny_draft().eval()
    drawn, reads = drawn_tokens(draft, 3), ["position", "since_rejection"]
    for count, each in enumerate(drawn):
        inputs = HeadInputs.from_drawn(reads, each)
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
            inputs = HeadInputs.from_drawn(names, drawn)
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
    assert set(HeadInputs.from_drawn(["entropy"], uncaptured).features) == {"entropy"}
    with pytest.raises(ValueError, match="hidden states are needed and were not captured"):
        HeadInputs.from_drawn(["hidden"], uncaptured, uncaptured)


def test_a_head_with_another_feature_goes_from_labels_to_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feature is named in FEATURES and in the model's `reads`, and nowhere else."""
    monkeypatch.setitem(FEATURES, "chance", Feature(chance))
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
    for position, token in enumerate(row["draft_ids"]):
        known = row["prompt_ids"] + row["completion_ids"][:position]
        inputs = batch_inputs(["chance"], draft, [*known, token])
        expected = float(head.logits(inputs)[0, -1].detach())
        assert traces.tokens.head.logits["drawn"][0, position] == pytest.approx(expected, abs=1e-4)

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


# --- our own head

HIDDEN, EMBEDDING, IDS = 12, 8, 20
SCALES = {
    "log_q": (-2.0, 1.5),
    "margin": (1.0, 2.0),
    "position": (3.0, 4.0),
    "hidden_before": (0.0, 1.5),
    "hidden": (0.0, 2.5),
    "embedding": (0.0, 0.5),
}


def make_head(**settings: Any) -> ImmediateHead:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "embedding_size": EMBEDDING, "width": 16}
    head = ImmediateHead(**{**sizes, "reads": [*FEATURES], "scales": SCALES, **settings}).eval()
    for parameter in head.parameters():  # biases, too, must matter
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def drafted_tokens(seed: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Drawn]:
    """Tokens of a draft; some of their distributions have ties and zeros."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(IDS, EMBEDDING, generator=torch.Generator().manual_seed(0))
    drawn = []
    for place in range(count):
        logits = torch.randn(IDS, generator=generator).mul(2).round(decimals=seed % 2)
        if seed % 3 == 0:
            logits[logits < logits.topk(1 + seed % 4).values[-1]] = -torch.inf
        q = logits.to(torch.promote_types(dtype, torch.float32)).softmax(-1)
        token = int(torch.multinomial(q, 1, generator=generator))
        state = torch.randn(HIDDEN, generator=generator).to(dtype)
        drawn.append(Drawn(token, q, state, embeddings.to(dtype), place, place + seed))
    return drawn


def batch(seed: int) -> DraftedTokens:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(IDS, (2, 5), generator=generator)
    before, after = torch.randn(2, 2, 5, HIDDEN, generator=generator)
    q = torch.randn(2, 5, IDS, generator=generator).softmax(-1)
    embeddings = torch.randn(IDS, EMBEDDING, generator=generator)
    return DraftedTokens(
        tokens=tokens,
        before=lambda: before,
        after=lambda: after,
        distributions=lambda: q,
        embeddings=lambda: embeddings[tokens],
        position=lambda: torch.arange(5).expand(2, -1),
        since_rejection=lambda: torch.arange(5).expand(2, -1) + 9,
    )


# --- what is known when


def test_a_point_changes_with_what_is_known_then_and_with_nothing_later() -> None:
    head, drafted = make_head(), batch(0)
    whole = HeadInputs.of(head.reads, drafted, DecisionPoint.CONSUMED)
    for point in DecisionPoint:
        logits = head.logits(HeadInputs(whole.features, point))
        assert logits.shape == (2, 5)
        # What is not known yet may be there, be missing, or be anything.
        known = HeadInputs.of(head.reads, drafted, point)
        torch.testing.assert_close(head.logits(known), logits)
        for name, value in whole.features.items():
            changed = {**whole.features, name: torch.full_like(value, torch.nan, dtype=torch.float)}
            found = head.logits(HeadInputs(changed, point))
            assert found.isnan().all() == (FEATURES[name].point <= point), (name, point)
    # All can be asked in one call.
    stacked = torch.tensor([0, 1, 2])[:, None, None]
    together = head(stacked, *(whole[name] for name in head.reads))
    for point in DecisionPoint:
        alone = head.logits(HeadInputs.of(head.reads, drafted, point))
        torch.testing.assert_close(together[point], alone)


def test_what_a_head_reads_is_divided_by_its_scales() -> None:
    plain, scaled = make_head(scales=None), make_head()
    features = dict(HeadInputs.of(plain.reads, batch(2), DecisionPoint.CONSUMED).features)
    expected = plain.logits(HeadInputs(features))
    for name, (mean, deviation) in SCALES.items():
        features[name] = features[name] * deviation + mean
    torch.testing.assert_close(scaled.logits(HeadInputs(features)), expected)


def test_half_precision_inputs_and_autocast_leave_the_arithmetic_in_float32() -> None:
    head = make_head()
    features = HeadInputs.of(head.reads, batch(3), DecisionPoint.CONSUMED).features
    half = {name: value.bfloat16() for name, value in features.items()}
    expected = head.logits(HeadInputs({name: value.float() for name, value in half.items()}))
    assert head.logits(HeadInputs(half)).dtype == torch.float32
    assert torch.equal(head.logits(HeadInputs(half)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head.logits(HeadInputs(half)), expected)


def test_what_is_known_at_none_of_its_points_is_left_out() -> None:
    head = make_head(decision_points=["drawn"], reads=["hidden", "hidden_before", "log_q"])
    assert head.reads == ("hidden_before", "log_q")
    assert "hidden" not in head.vectors
    with pytest.raises(ValueError, match="judges tokens drawn, not consumed"):
        head.logits(HeadInputs({}, DecisionPoint.CONSUMED))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size >= 1"),
        ({"reads": ["log_q", "loq_q"]}, "unknown features loq_q"),
        ({"decision_points": ["later"]}, "decision_points must name some of"),
        ({"scales": {"log_q": (0.0, 0.0)}}, "positive standard deviation of log_q"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**settings)


def test_another_width_is_refused_with_both() -> None:
    head = make_head(draft="org/d")
    features = dict(HeadInputs.of(head.reads, batch(5), DecisionPoint.DRAWN).features)
    features["embedding"] = torch.zeros(2, 5, EMBEDDING + 1)
    message = r"reads embedding of width 8, got 9; it was trained for the draft org/d"
    with pytest.raises(ValueError, match=message):
        head.logits(HeadInputs(features, DecisionPoint.DRAWN))


# --- kept and loaded


def test_a_saved_head_loads_with_equal_outputs_and_settings_by_any_class(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "top_k": 50, "top_p": 1.0}
    head = make_head(draft="org/draft", sampling=sampling, probe=[0.5, -1.25], depth=1)
    head.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a/config.json").read_text())["kind"] == "immediate"
    inputs = HeadInputs.of(head.reads, batch(6), DecisionPoint.CONSUMED)
    for loader in (BaseHead, ImmediateHead, AcceptanceHead):
        loaded = loader.from_pretrained(tmp_path / "a")
        assert type(loaded) is ImmediateHead
        assert not loaded.training
        assert torch.equal(loaded.logits(inputs), head.logits(inputs))
        for name in ("reads", "decision_points", "width", "depth", "draft", "sampling", "scales"):
            assert getattr(loaded, name) == getattr(head, name)
        assert [*loaded.probe] == [0.5, -1.25]
    loaded.save_pretrained(tmp_path / "b")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_kind_in_the_configuration_decides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AcceptanceHead(hidden_size=HIDDEN, depth=1).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert written["kind"] == "specdec++"
    for loader in (BaseHead, ImmediateHead):
        assert type(loader.from_pretrained(tmp_path)) is AcceptanceHead
    for kind in ("oracle", None, ["immediate"]):
        path.write_text(json.dumps({**written, "kind": kind}))
        with pytest.raises(ValueError, match=r"must be one of specdec\+\+, immediate"):
            BaseHead.from_pretrained(tmp_path)


# --- one token at a time


READS = {
    "all": [*FEATURES],
    "default": [*DEFAULT_FEATURES],
    "numbers": ["log_q", "log_q_max", "margin", "entropy", "log_mass_above"],
    "vectors": ["hidden_before", "embedding"],
    "some": ["position", "hidden", "since_rejection"],
}


@pytest.mark.parametrize(
    ("reads", "dtype"),
    [*((name, torch.float32) for name in READS), ("all", torch.float64), ("all", torch.bfloat16)],
)
@torch.inference_mode()
def test_a_draft_under_way_is_judged_as_the_head_does(reads: str, dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        head = make_head(reads=READS[reads], depth=2)
    fast, plain = judge_of(head), TorchJudge(head)
    assert type(fast) is not TorchJudge
    for seed in range(6):
        drawn = drafted_tokens(seed, dtype=dtype)
        for number, each in enumerate(drawn):
            pairs = [(judge.upcoming(each), judge.drawn(each)) for judge in (plain, fast)]
            assert pairs[1] == pytest.approx(pairs[0], abs=1e-5, rel=1e-5)
            if number:  # what was kept of the last token, and a token of which nothing is
                for judged in (each, drawn[number - 1]):
                    expected, found = (judge.consumed(judged, each) for judge in (plain, fast))
                    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)


def test_a_judge_refuses_what_the_head_refuses() -> None:
    uncaptured = Drawn(1, torch.ones(3) / 3, None)
    for name in ("hidden_before", "embedding"):
        judge = judge_of(make_head(reads=[name], decision_points=["drawn"]))
        with pytest.raises(ValueError, match="not captured"):
            judge.drawn(uncaptured)


def test_a_feature_that_was_added_is_judged_by_its_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FEATURES, "even", Feature(lambda drafted: 1.0 - drafted.tokens % 2))
    head, drawn = make_head(reads=["even", "log_q"], decision_points=["drawn"]), drafted_tokens(1)
    expected = float(head.logits(HeadInputs.from_drawn(head.reads, drawn[-1])).detach())
    assert judge_of(head).drawn(drawn[-1]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_published_head_is_judged_as_it_does(depth: int) -> None:
    torch.manual_seed(0)
    head, drawn = AcceptanceHead(hidden_size=HIDDEN, depth=depth).eval(), drafted_tokens(3)
    expected = float(head(drawn[1].state).detach())
    judges = judge_of(head), TorchJudge(head)
    assert type(judges[0]) is not TorchJudge
    for judge in judges:
        assert judge.consumed(*drawn[:2]) == pytest.approx(expected, abs=1e-6)
