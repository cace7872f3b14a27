"""The inputs of heads are one value, in training, replay and decoding; what our own makes of it."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import AcceptanceHead, BaseHead, ConfidenceHead, ImmediateHead
from heads.config import DEFAULT_FEATURES
from heads.inputs import FEATURES, DraftedTokens, under_way
from tests.support.head_inputs import EMBEDDING, HIDDEN, IDS, Drawn, drafted_tokens


def by_definition(q: list[float], token: int) -> dict[str, float]:
    """The numbers of a distribution, written down once more."""
    entropy = -sum(value * math.log(value) for value in q if value)
    return {"log_q": math.log(max(q[token], 1e-30)), "entropy": entropy}


DISTRIBUTIONS = {
    "two tokens": [0.3, 0.7],
    "all different": [0.1, 0.5, 0.15, 0.25],
    "zeros, as top-k leaves": [0.0, 0.6, 0.0, 0.4],
    "one token, as greedy decoding has": [0.0, 1.0, 0.0],
    "nearly one token": [1e-14, 1.0, 0.0],
}


@pytest.mark.parametrize("q", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_numbers_follow_their_definitions(q: list[float]) -> None:
    names = ["log_q", "entropy"]
    for token in range(len(q)):
        expected = by_definition(q, token)
        for dtype in (torch.float32, torch.float64):
            drawn = Drawn(token, torch.tensor(q, dtype=dtype), None)
            found = {name: float(FEATURES[name].compute(under_way(drawn))) for name in names}
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
        rows = DraftedTokens(  # the same of many tokens at once
            tokens=torch.full((2, 3), token), distributions=lambda: torch.tensor(q).expand(2, 3, -1)
        )
        for name in names:
            values = FEATURES[name].compute(rows)
            assert values.shape == (2, 3)
            assert values.flatten().tolist() == pytest.approx(
                [expected[name]] * 6, rel=1e-4, abs=1e-6
            )


def test_only_what_a_head_reads_is_computed() -> None:
    tokens, states = torch.zeros(4, dtype=torch.long), torch.ones(4, HIDDEN)
    drafted = DraftedTokens(tokens=tokens, before=lambda: states)  # the rest is not to be had
    assert make_head(reads=["hidden_before"]).logits(drafted).shape == (4,)
    with pytest.raises(ValueError, match="a feature that is not known here"):
        make_head(reads=["hidden_before", "entropy"]).logits(drafted)
    uncaptured = Drawn(1, torch.ones(2) / 2, None)
    assert float(FEATURES["entropy"].compute(under_way(uncaptured))) == pytest.approx(math.log(2))
    for name in ("hidden_before", "embedding"):
        for ask in (make_head(reads=[name]).judge(), make_head(reads=[name])):
            with pytest.raises(ValueError, match=r"are needed and .*not captured"):
                ask.logit(uncaptured)


# --- our own head

SCALES = {
    "log_q": (-2.0, 1.5),
    "entropy": (1.0, 2.0),
    "hidden_before": (0.0, 1.5),
    "embedding": (0.0, 0.5),
}


def make_head(**settings: Any) -> ImmediateHead:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "embedding_size": EMBEDDING, "width": 16}
    head = ImmediateHead(**{**sizes, "reads": [*FEATURES], "scales": SCALES, **settings}).eval()
    for parameter in head.parameters():  # biases, too, must matter
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def batch(
    seed: int, ids: int = IDS, hidden: int = HIDDEN, embedding: int = EMBEDDING
) -> DraftedTokens:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(ids, (2, 5), generator=generator)
    before = torch.randn(2, 5, hidden, generator=generator)
    q = torch.randn(2, 5, ids, generator=generator).mul(2).softmax(-1)
    embeddings = torch.randn(ids, embedding, generator=generator)
    return DraftedTokens(
        tokens=tokens,
        before=lambda: before,
        distributions=lambda: q,
        embeddings=lambda: embeddings[tokens],
    )


def features_of(head: ImmediateHead, drafted: DraftedTokens) -> dict[str, Tensor]:
    return {name: FEATURES[name].compute(drafted) for name in head.reads}


def test_what_a_head_reads_is_divided_by_its_scales() -> None:
    plain, scaled = make_head(scales=None), make_head()
    features = features_of(plain, batch(2))
    expected = plain(*features.values())
    assert torch.equal(plain.logits(batch(2)), expected)
    for name, (mean, deviation) in SCALES.items():
        features[name] = features[name] * deviation + mean
    torch.testing.assert_close(scaled(*features.values()), expected)


def test_half_precision_inputs_and_autocast_leave_the_arithmetic_in_float32() -> None:
    head = make_head()
    half = [value.bfloat16() for value in features_of(head, batch(3)).values()]
    expected = head(*(value.float() for value in half))
    assert head(*half).dtype == torch.float32
    assert torch.equal(head(*half), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(head(*half), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 0}, "hidden_size >= 1"),
        ({"depth": -1}, "needs hidden_size"),
        ({"reads": ["log_q", "loq_q"]}, "unknown features loq_q"),
        ({"reads": ["hidden"]}, "unknown features hidden"),
        ({"scales": {"log_q": (0.0, 0.0)}}, "positive standard deviation of log_q"),
        ({"draft": "org/d"}, "embedding of width 8, got 9; it was trained for the draft org/d"),
    ],
)
def test_impossible_settings_and_another_width_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(**settings).logits(batch(5, embedding=EMBEDDING + 1))


# --- kept and loaded

READS = {
    "all": [*FEATURES],
    "default": [*DEFAULT_FEATURES],
    "numbers": ["log_q", "entropy"],
    "vectors": ["hidden_before", "embedding"],
}


@pytest.mark.parametrize("kind", [AcceptanceHead, ImmediateHead, ConfidenceHead])
def test_a_saved_head_loads_offline_with_its_weights_and_settings_by_any_class(
    kind: type[BaseHead], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sampling = {"temperature": 0.7, "top_k": 50, "top_p": 1.0}
    given: dict[str, Any] = {"hidden_size": HIDDEN, "draft": "org/draft"}
    given |= {"sampling": sampling, "probe": [0.5, -1.25]}
    given |= {} if kind is ConfidenceHead else {"depth": 2}
    given |= {"reads": [*READS["vectors"]]} if kind is ImmediateHead else {"rejection_weight": 3.0}
    head = make_head(**given) if kind is ImmediateHead else kind(**given)
    head.save_pretrained(tmp_path / "a")
    for loader in (BaseHead, ImmediateHead, AcceptanceHead, ConfidenceHead):
        loaded = loader.from_pretrained(tmp_path / "a")
        assert type(loaded) is kind
        assert not loaded.training
        weights = loaded.state_dict()
        assert all(weights[name].equal(value) for name, value in head.state_dict().items())
        assert [*loaded.probe] == given.pop("probe", [0.5, -1.25])
        assert all(getattr(loaded, name) == getattr(head, name) for name in given)
    loaded.save_pretrained(tmp_path / "b")
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert {"model.py", "inputs.py", "custom_generate"} < names
    for name in names - {"custom_generate"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert capsys.readouterr() == ("", "")


# --- one token at a time


@pytest.mark.parametrize(
    ("reads", "dtype"),
    [*((name, torch.float32) for name in READS), ("all", torch.float64), ("all", torch.bfloat16)],
)
@torch.inference_mode()
def test_a_draft_under_way_is_judged_as_the_head_does(reads: str, dtype: torch.dtype) -> None:
    with torch.inference_mode(False):
        head = make_head(reads=READS[reads], depth=2)
    fast, plain = head.judge(), head
    assert fast is not head
    for seed in range(6):
        for each in drafted_tokens(seed, dtype=dtype):
            expected, found = (judge.logit(each) for judge in (plain, fast))
            assert found == pytest.approx(expected, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("depth", [0, 2, None])
def test_heads_of_states_alone_are_judged_as_they_do(depth: int | None) -> None:
    """By the state that the last token was drawn from: of it, or the published of the one before"""
    torch.manual_seed(0)
    head: Any = ConfidenceHead(hidden_size=HIDDEN, rejection_weight=2.0)
    if depth is not None:
        head = AcceptanceHead(hidden_size=HIDDEN, depth=depth)
    drawn = drafted_tokens(3)
    expected = float(head(drawn[1].state).detach())
    judges = head.judge(), head
    assert judges[0] is not head
    for judge in judges:
        assert judge.logit(drawn[1]) == pytest.approx(expected, abs=1e-6)
