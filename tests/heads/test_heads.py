"""The acceptance head as an artefact, token mixing, the loss and the metrics."""

import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from heads import AcceptanceHead
from heads.inputs import DraftedTokens
from heads.loss import (
    binary_kl,
    calibration_error,
    head_metrics,
    loss_mass,
    soft_auroc,
    weighted_bce,
)
from heads.rows import mixed_row
from specdata.storage.schema import Label
from specdata.texts import text_length

HIDDEN = 8


def make_head(**settings: object) -> AcceptanceHead:
    torch.manual_seed(0)
    return AcceptanceHead(**{"hidden_size": HIDDEN, **settings})


def make_row(length: int = 400, example_id: str = "a", prompt: int = 3) -> Label:
    row = {
        "example_id": example_id,
        "sample": 0,
        "prompt_ids": list(range(prompt)),
        "completion_ids": [100] * length,
        "draft_ids": [200] * length,
        "accept_prob": np.linspace(0.0, 1.0, length).tolist(),
    }
    return cast(Label, row)


# --- model


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_head_of_depth_d_has_d_separate_blocks_and_keeps_leading_shapes(depth: int) -> None:
    head = make_head(depth=depth)
    assert sum(p.numel() for p in head.parameters()) == depth * (HIDDEN**2 + HIDDEN) + HIDDEN + 1
    assert len({id(block) for block in head.blocks}) == depth
    assert head(torch.zeros(2, 5, HIDDEN)).shape == (2, 5)
    assert head(torch.zeros(HIDDEN)).shape == ()


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        (None, None, r"no acceptance head at .*config\.json"),
        ({"hidden_size": 8, "model_type": "llama"}, None, "is not an acceptance head"),
        ({}, None, r"no acceptance head at .*model\.safetensors"),
        ({}, save({"lm_head.weight": torch.zeros(2)}), "no acceptance head at .*lm_head"),
        ({}, b"cut off", "no acceptance head at"),
        ({"kind": "oracle"}, None, r"must be one of confidence, immediate, specdec\+\+"),
        ({"kind": ["immediate"]}, None, r"must be one of confidence, immediate, specdec\+\+"),
        ({"hidden_size": "x"}, None, "no acceptance head at"),
        ("{", None, "no acceptance head at"),
        ("[]", None, r"no acceptance head at .*config\.json"),
    ],
)
def test_loading_what_is_no_head_says_so(
    config: Any, weights: bytes | None, message: str, tmp_path: Path
) -> None:
    if isinstance(config, dict) and "model_type" not in config:
        config = {"kind": "specdec++", "hidden_size": 8, "depth": 1} | config
    if config is not None:
        (tmp_path / "config.json").write_text(
            config if isinstance(config, str) else json.dumps(config)
        )
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=f"(?s){message}") as refused:
        AcceptanceHead.from_pretrained(tmp_path)
    assert str(tmp_path) in str(refused.value)
    with pytest.raises(ValueError, match="no acceptance head at"):
        AcceptanceHead.from_pretrained(tmp_path / "missing")


# --- mixing


def test_each_position_is_the_targets_token_without_label_or_the_drafts_with_its_label() -> None:
    row = make_row()
    mixed = mixed_row(row, rate=0.15, max_length=1000, key=("train", 0, 0))
    prompt, places = mixed.text["prompt_ids"], mixed.places
    tokens = torch.tensor([*prompt[3:], *mixed.text["completion_ids"][:-1]])
    assert prompt[:3] == [0, 1, 2]
    assert torch.equal((tokens == 200).nonzero().flatten(), places)
    assert bool(((tokens == 100) | (tokens == 200)).all())
    assert mixed.tokens.tolist() == [[200]] * len(places)
    accept = torch.tensor(row["accept_prob"], dtype=torch.float32)
    assert torch.equal(mixed.accept[:, 0], accept[places])
    assert len(mixed_row(row, rate=0.0, max_length=1000, key=()).places) == 400
    assert 0.85 - 0.06 < len(places) / 400 < 0.85 + 0.06  # 3.4 standard deviations of 400 draws


def test_mixing_depends_on_key_and_example_only() -> None:
    def places(row: Label, *key: str | int) -> list[int]:
        return list(mixed_row(row, rate=0.5, max_length=1000, key=key).places.tolist())

    assert places(make_row(), 0, 0) == places(make_row(), 0, 0)
    others = [
        places(make_row(), 0, 1),
        places(make_row(), 1, 0),
        places(make_row(example_id="b"), 0, 0),
        places({**make_row(), "sample": 1}, 0, 0),
    ]
    assert all(other != places(make_row(), 0, 0) for other in others)
    # A cut does not draw anew.
    cut = mixed_row(make_row(), rate=0.5, max_length=50, key=(0, 0))
    assert cut.places.tolist() == [place for place in places(make_row(), 0, 0) if place < 47]
    assert text_length(cut.text) == 50 + 1  # and a last one that nobody reads


# --- loss


def test_weighted_bce_by_hand() -> None:
    # phat = 1/2: each token costs (a + 6 (1 - a)) log 2; the third one is masked out.
    accept, mask = torch.tensor([1.0, 0.25, 0.5]), torch.tensor([True, True, False])
    numerator = weighted_bce(torch.zeros(3), accept, mask, 6.0)
    assert float(numerator) == pytest.approx((1.0 + 0.25 + 4.5) * math.log(2.0))
    assert float(loss_mass(accept[mask], 6.0)) == pytest.approx(5.75)
    # phat = 3/4, a = 1/2, w = 2: -(1/2) log(3/4) - 2 (1/2) log(1/4)
    weighted = weighted_bce(torch.tensor([math.log(3.0)]), torch.tensor([0.5]), mask[:1], 2.0)
    assert float(weighted) == pytest.approx(-0.5 * math.log(0.75) - math.log(0.25))


@settings(deadline=None)
@given(accept=st.floats(0.01, 0.99), weight=st.floats(0.2, 20.0))
def test_the_weighted_loss_biases_its_optimum_and_the_probability_is_the_label(
    accept: float, weight: float
) -> None:
    best = accept / (accept + weight * (1.0 - accept))
    logits = torch.tensor([math.log(best / (1 - best))], dtype=torch.float64, requires_grad=True)
    label = torch.tensor([accept], dtype=torch.float64)
    weighted_bce(logits, label, torch.tensor([True]), weight).backward()
    assert logits.grad is not None
    assert float(logits.grad.abs()) < 1e-9 * max(1.0, weight)
    head = make_head(depth=0, rejection_weight=weight)
    torch.nn.init.zeros_(head.output.weight)
    torch.nn.init.constant_(head.output.bias, float(logits.detach()))
    drafted = DraftedTokens(tokens=torch.tensor(0), after=lambda: torch.zeros(HIDDEN))
    assert float(head.probability(drafted).detach()) == pytest.approx(accept, abs=1e-6)


@pytest.mark.parametrize("logit", [-200.0, 200.0])
def test_extreme_logits_give_finite_loss_and_divergence(logit: float) -> None:
    half, quarter = torch.tensor([0.5]), torch.tensor([-math.log(3.0)])
    by_hand = 0.5 * math.log(2.0) + 0.5 * math.log(2.0 / 3.0)  # KL(1/2 || 1/4)
    assert float(binary_kl(quarter, half)) == pytest.approx(by_hand)
    logits, accept = torch.tensor([logit, logit]), torch.tensor([0.0, 1.0])
    assert weighted_bce(logits, accept, torch.tensor([True, True]), 6.0).isfinite()
    assert binary_kl(logits, accept).isfinite().all()


# --- metrics


def test_a_perfect_predictor_scores_zero_divergence_error_and_brier() -> None:
    accept = torch.tensor([0.0, 0.1, 0.5, 0.93, 1.0], dtype=torch.float64)
    biased = accept / (accept + 6.0 * (1.0 - accept))
    metrics = head_metrics(torch.logit(biased, eps=1e-15), accept, 6.0)
    assert metrics.kl == pytest.approx(0.0, abs=1e-12)
    assert metrics.ece == pytest.approx(0.0, abs=1e-12)
    assert metrics.brier == pytest.approx(0.0, abs=1e-12)
    assert metrics.kl_raw > 0.1  # the uncorrected output is biased
    assert metrics.kl_constant > 0.1
    assert metrics.mean_predicted == pytest.approx(metrics.mean_accept)
    with pytest.raises(ValueError, match="no drafted token"):
        head_metrics(torch.zeros(0), torch.zeros(0), 1.0)


def test_soft_auroc_equals_the_double_sum_over_weighted_pairs() -> None:
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(0, 6, (40,), generator=generator).double()
    accept = torch.rand(40, generator=generator, dtype=torch.float64)
    pairs = accept[:, None] * (1.0 - accept[None, :])
    ordered = (scores[:, None] > scores[None, :]) + 0.5 * (scores[:, None] == scores[None, :])
    expected = float((pairs * ordered).sum() / pairs.sum())
    assert soft_auroc(scores, accept) == pytest.approx(expected)
    assert soft_auroc(scores, torch.ones(40)) is None


def test_calibration_error_by_hand() -> None:
    # Bin [0, 1/2): prediction .2 .4 against 0 and 1; bin [1/2, 1]: .9 against 1.
    predicted, accept = torch.tensor([0.2, 0.4, 0.9]), torch.tensor([0.0, 1.0, 1.0])
    expected = (abs(0.6 - 1.0) + abs(0.9 - 1.0)) / 3
    assert calibration_error(predicted, accept, bins=2) == pytest.approx(expected)
