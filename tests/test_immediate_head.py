"""Our own head: what it knows at each moment, how it is kept, and one token at a time in NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import AcceptanceHead, BaseHead, ImmediateHead
from heads.inputs import FEATURES, DraftedTokens, Feature, HeadInputs, Moment
from heads.judge import NumpyJudge, TorchJudge, judge_of

HIDDEN, EMBEDDING, VOCABULARY = 12, 8, 20
SCALES = {"log_q": (-2.0, 1.5), "margin": (1.0, 2.0), "position": (3.0, 4.0)}


@dataclass(frozen=True, eq=False)
class Drawn:
    token: int
    distribution: Tensor
    state: Tensor | None
    embedding: Tensor | None
    position: int
    since_rejection: int


def make_head(**settings: Any) -> ImmediateHead:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "embedding_size": EMBEDDING, "width": 16}
    head = ImmediateHead(**{**sizes, "reads": [*FEATURES], "scales": SCALES, **settings}).eval()
    for parameter in head.parameters():  # norms and biases, too, must matter
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def drafted_tokens(seed: int, count: int = 4, dtype: torch.dtype = torch.float32) -> list[Drawn]:
    """Tokens of a draft; some of their distributions have ties and zeros."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(VOCABULARY, EMBEDDING, generator=torch.Generator().manual_seed(0))
    drawn = []
    for place in range(count):
        logits = torch.randn(VOCABULARY, generator=generator).mul(2).round(decimals=seed % 2)
        if seed % 3 == 0:
            logits[logits < logits.topk(1 + seed % 4).values[-1]] = -torch.inf
        q = logits.to(torch.promote_types(dtype, torch.float32)).softmax(-1)
        token = int(torch.multinomial(q, 1, generator=generator))
        state = torch.randn(HIDDEN, generator=generator).to(dtype)
        drawn.append(Drawn(token, q, state, embeddings[token].to(dtype), place, place + seed))
    return drawn


def batch(seed: int) -> DraftedTokens:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (2, 5), generator=generator)
    before, after = torch.randn(2, 2, 5, HIDDEN, generator=generator)
    q = torch.randn(2, 5, VOCABULARY, generator=generator).softmax(-1)
    embeddings = torch.randn(VOCABULARY, EMBEDDING, generator=generator)
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


def test_a_moment_changes_with_what_is_known_then_and_with_nothing_later() -> None:
    head, drafted = make_head(), batch(0)
    whole = HeadInputs.of(head.reads, drafted, Moment.CONSUMED)
    for moment in Moment:
        logits = head.logits(HeadInputs(whole.features, moment))
        assert logits.shape == (2, 5)
        # What is not known yet may be there, be missing, or be anything.
        known = HeadInputs.of(head.reads, drafted, moment)
        torch.testing.assert_close(head.logits(known), logits)
        for name, value in whole.features.items():
            changed = {**whole.features, name: torch.full_like(value, torch.nan, dtype=torch.float)}
            found = head.logits(HeadInputs(changed, moment))
            assert found.isnan().all() == (FEATURES[name].moment <= moment), (name, moment)


def test_all_moments_can_be_asked_in_one_call() -> None:
    head, drafted = make_head(), batch(1)
    features = HeadInputs.of(head.reads, drafted, Moment.CONSUMED)
    stacked = torch.tensor([0, 1, 2])[:, None, None]
    together = head(stacked, *(features[name] for name in head.reads))
    assert together.shape == (3, 2, 5)
    for moment in Moment:
        alone = head.logits(HeadInputs.of(head.reads, drafted, moment))
        torch.testing.assert_close(together[moment], alone)


def test_numbers_are_standardised_by_the_scales() -> None:
    plain, scaled = make_head(scales=None), make_head()
    features = dict(HeadInputs.of(plain.reads, batch(2), Moment.CONSUMED).features)
    expected = plain.logits(HeadInputs(features))
    for name, (mean, deviation) in SCALES.items():
        features[name] = features[name] * deviation + mean
    torch.testing.assert_close(scaled.logits(HeadInputs(features)), expected)


def test_half_precision_inputs_and_autocast_leave_the_arithmetic_in_float32() -> None:
    head = make_head()
    features = HeadInputs.of(head.reads, batch(3), Moment.CONSUMED).features
    half = {name: value.bfloat16() for name, value in features.items()}
    expected = head.logits(HeadInputs({name: value.float() for name, value in half.items()}))
    assert head.logits(HeadInputs(half)).dtype == torch.float32
    assert torch.equal(head.logits(HeadInputs(half)), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head.logits(HeadInputs(half)), expected)


def test_a_probability_is_the_sigmoid_of_the_logit() -> None:
    head = make_head()
    inputs = HeadInputs.of(head.reads, batch(4), Moment.DRAWN)
    assert torch.equal(head.probability(inputs), torch.sigmoid(head.logits(inputs)))


def test_what_is_known_at_none_of_its_moments_is_left_out() -> None:
    head = make_head(moments=["drawn"], reads=["hidden", "hidden_before", "log_q"])
    assert head.reads == ("hidden_before", "log_q")
    assert "hidden" not in head.norms
    with pytest.raises(ValueError, match="judges tokens drawn, not consumed"):
        head.logits(HeadInputs({}, Moment.CONSUMED))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size >= 1"),
        ({"width": 0}, "width >= 1"),
        ({"depth": -1}, "depth >= 0"),
        ({"reads": ["log_q", "loq_q"]}, "unknown features loq_q"),
        ({"moments": ["later"]}, "moments must name some of"),
        ({"moments": []}, "moments must name some of"),
        ({"reads": ["log_q"], "moments": ["before", "drawn"]}, "none is known at the moment 'bef"),
        ({"scales": {"log_q": (0.0, 0.0)}}, "positive standard deviation of log_q"),
        ({"scales": {"log_q": (float("nan"), 1.0)}}, "finite mean"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**settings)


@pytest.mark.parametrize(("name", "size"), [("hidden_before", HIDDEN), ("embedding", EMBEDDING)])
def test_another_width_is_refused_with_both(name: str, size: int) -> None:
    head = make_head(draft="org/d")
    features = dict(HeadInputs.of(head.reads, batch(5), Moment.DRAWN).features)
    features[name] = torch.zeros(2, 5, size + 1)
    message = rf"reads {name} of width {size}, got {size + 1}; it was trained for the draft org/d"
    with pytest.raises(ValueError, match=message):
        head.logits(HeadInputs(features, Moment.DRAWN))


# --- kept and loaded


def test_a_saved_head_loads_with_equal_outputs_and_settings_by_any_class(tmp_path: Path) -> None:
    sampling = {"temperature": 0.7, "top_k": 50, "top_p": 1.0}
    head = make_head(draft="org/draft", sampling=sampling, probe=[0.5, -1.25], depth=1)
    head.save_pretrained(tmp_path / "a")
    assert json.loads((tmp_path / "a/config.json").read_text())["kind"] == "immediate"
    inputs = HeadInputs.of(head.reads, batch(6), Moment.CONSUMED)
    for loader in (BaseHead, ImmediateHead, AcceptanceHead):
        loaded = loader.from_pretrained(tmp_path / "a")
        assert type(loaded) is ImmediateHead
        assert not loaded.training
        assert torch.equal(loaded.logits(inputs), head.logits(inputs))
        for name in ("reads", "moments", "width", "depth", "draft", "sampling", "scales"):
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


@pytest.mark.parametrize(
    "reads",
    [
        [*FEATURES],
        ["log_q", "log_q_max", "margin", "entropy", "log_mass_above"],
        ["hidden_before", "embedding"],
        ["position", "hidden", "since_rejection"],
    ],
    ids=["all", "numbers", "vectors", "some"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.inference_mode()
def test_numpy_judges_as_the_head_does(reads: list[str], dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        head = make_head(reads=reads, depth=2)
    fast, plain = NumpyJudge(head), TorchJudge(head)
    compared = 0
    for seed in range(6):
        drawn = drafted_tokens(seed, dtype=dtype)
        for count in range(len(drawn) + 1):
            for moment in (Moment.CONSUMED, Moment.DRAWN):
                expected, found = (j.newest(drawn[:count], moment) for j in (plain, fast))
                assert (expected is None) == (found is None) == (count < moment)
                if expected is not None:
                    compared += 1
                    assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)
            if count < len(drawn):
                found = fast.upcoming(drawn[count])
                assert found == pytest.approx(plain.upcoming(drawn[count]), abs=1e-5, rel=1e-5)
    assert compared == 6 * (4 + 3)


def test_numpy_leaves_what_it_is_shown_as_it_was() -> None:
    head, drawn = make_head(), drafted_tokens(1)
    kept = [(each.distribution.clone(), each.state.clone()) for each in drawn]
    judge = judge_of(head)
    assert isinstance(judge, NumpyJudge)
    answers = [judge.newest(drawn, moment) for moment in (Moment.DRAWN, Moment.CONSUMED)]
    again = [judge.newest(drawn, moment) for moment in (Moment.DRAWN, Moment.CONSUMED)]
    assert answers == again
    for each, (q, state) in zip(drawn, kept, strict=True):
        assert torch.equal(each.distribution, q)
        assert torch.equal(each.state, state)


def test_numpy_refuses_what_the_head_refuses() -> None:
    drawn = drafted_tokens(2)
    with pytest.raises(ValueError, match="judges tokens drawn, not consumed"):
        judge_of(make_head(moments=["drawn"])).newest(drawn, Moment.CONSUMED)
    uncaptured = Drawn(1, torch.ones(3) / 3, None, None, 0, 0)
    for name in ("hidden_before", "embedding"):
        judge = judge_of(make_head(reads=[name], moments=["drawn"]))
        with pytest.raises(ValueError, match="not captured"):
            judge.newest([uncaptured], Moment.DRAWN)
    wide = Drawn(1, torch.ones(3) / 3, torch.zeros(HIDDEN + 1), torch.zeros(EMBEDDING), 0, 0)
    with pytest.raises(ValueError, match="not aligned"):
        judge_of(make_head()).newest([wide], Moment.DRAWN)


def test_a_feature_that_was_added_is_judged_by_the_head_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FEATURES, "even", Feature(lambda drafted: 1.0 - drafted.tokens % 2))
    head, drawn = make_head(reads=["even", "log_q"], moments=["drawn"]), drafted_tokens(1)
    inputs = HeadInputs.from_drafted(head.reads, drawn, Moment.DRAWN)
    found = judge_of(head).newest(drawn, Moment.DRAWN)
    assert found == pytest.approx(float(head.logits(inputs).detach()), abs=1e-5)


def test_other_heads_are_judged_by_themselves() -> None:
    torch.manual_seed(0)
    head, drawn = AcceptanceHead(hidden_size=HIDDEN).eval(), drafted_tokens(3)
    judge = judge_of(head)
    assert judge.newest(drawn[:1], Moment.CONSUMED) is None
    expected = float(head(drawn[1].state).detach())
    assert judge.newest(drawn[:2], Moment.CONSUMED) == pytest.approx(expected, abs=1e-6)
