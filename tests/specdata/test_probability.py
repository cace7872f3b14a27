"""Distributions: warping, drawing, comparing; streams of draws, which stored artefacts fix."""

from collections import Counter

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdata.errors import NotFiniteError
from specdata.probability import (
    NO_TOKEN,
    SamplingConfig,
    accept_probability,
    draw,
    draw_one,
    draw_several,
    drawn_tokens,
    entropy,
    inverse_cdf,
    overlap,
    probabilities,
    residual,
    to_vocabulary,
)
from specdata.sampling import generator_for, numpy_generator_for, seed_for
from tests.support.chi_square import LEVEL, p_value, power_of_shift


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.8), (7, 0.6)])
def test_the_warp_is_the_one_of_generate(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3
    logits[0] = torch.linspace(0.0, 0.01, 40)  # most of the mass is in small shares
    logits[0, 3] = 4.2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(50, 1, dtype=torch.long), logits.clone()).softmax(-1)
    got = probabilities(logits, SamplingConfig(temperature, top_k, top_p, min_p))
    assert torch.equal(got > 0, expected > 0)
    torch.testing.assert_close(got, expected)


def test_temperature_zero_is_one_hot_at_the_first_largest_logit() -> None:
    distribution = probabilities(torch.tensor([[1.0, 3.0, 3.0]]), SamplingConfig(temperature=0.0))
    assert distribution.tolist() == [[0.0, 1.0, 0.0]]


def test_half_precision_logits_and_tiny_temperatures_give_finite_float32_distributions() -> None:
    logits = torch.tensor([[60000.0, -60000.0, 59000.0]], dtype=torch.float16)
    distribution = probabilities(logits, SamplingConfig(temperature=1e-3))
    assert distribution.dtype == torch.float32
    torch.testing.assert_close(distribution, torch.tensor([[1.0, 0.0, 0.0]]))


def test_inverse_cdf_never_returns_a_token_of_probability_zero() -> None:
    probs = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    edges = torch.tensor([0.0, 0.2499999, 0.25, 0.5, 1 - 1e-17, 0.999999999])
    tokens = inverse_cdf(probs.expand(len(edges), -1), edges)
    assert tokens.tolist() == [1, 1, 3, 3, 3, 3]


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(0.2, 0, 0.9)], ids=str)
def test_tokens_of_many_rows_are_those_of_each_row_by_itself(sampling: SamplingConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(7, 50_000, generator=generator)).bfloat16()
    uniform = torch.rand(7, generator=generator, dtype=torch.float64)
    expected = [
        int(inverse_cdf(probabilities(row, sampling), chosen))
        for row, chosen in zip(logits, uniform, strict=True)
    ]
    assert drawn_tokens(logits, sampling, uniform).tolist() == expected
    assert len(set(expected)) > 1
    assert drawn_tokens(logits[:0], sampling, uniform[:0]).shape == (0,)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(t, k, p, m)
        for t in (0.0, 0.5, 1.0)
        for k in (0, 2)
        for p, m in ((0.9, 0), (1, 0), (1, 0.1))
    ],
)
def test_a_row_that_is_not_finite_has_no_token_and_spoils_no_other(
    sampling: SamplingConfig, value: float
) -> None:
    logits = torch.tensor([[1.0, 2.0, -torch.inf, 0.0]]).repeat(3, 1)
    logits[1, 3] = value
    good, bad, same = drawn_tokens(logits, sampling, torch.tensor([0.3, 0.3, 0.3])).tolist()
    assert bad == NO_TOKEN
    assert good == same == int(drawn_tokens(logits[:1], sampling, torch.tensor([0.3])))
    with pytest.raises(NotFiniteError):
        draw_one(probabilities(logits[1], sampling), torch.Generator())


def test_draws_follow_the_distribution() -> None:
    """40,000 draws; a shift of 0.02 between any two tokens is found with power > .99."""
    distribution = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    draws = draw(distribution.expand(40_000, -1), torch.Generator().manual_seed(1))
    exact = {token: float(mass) for token, mass in enumerate(distribution)}
    assert power_of_shift(exact, 0.02, 40_000) > 0.99
    assert p_value(Counter(draws.tolist()), exact) > LEVEL


def test_comparisons_of_p_and_q_by_hand() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert accept_probability(p, q).tolist() == pytest.approx([1.0, 1.0, 0.4])
    assert float(overlap(p, q)) == pytest.approx(0.7)
    assert residual(p, q).tolist() == pytest.approx([1.0, 0.0, 0.0])
    assert residual(p, p).tolist() == pytest.approx(p.tolist())
    assert float(entropy(torch.tensor([0.5, 0.5, 0.0]))) == pytest.approx(0.6931472)


def test_logits_fit_another_vocabulary_without_changing_the_distribution_on_shared_ids() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    wide = probabilities(to_vocabulary(logits, 5), SamplingConfig())
    torch.testing.assert_close(wide[:, :3], logits.softmax(-1))
    assert wide[:, 3:].tolist() == [[0.0, 0.0]]
    torch.testing.assert_close(
        probabilities(to_vocabulary(logits, 2), SamplingConfig()), logits[:, :2].softmax(-1)
    )


@pytest.mark.parametrize("size", [2, 40, 8193, 8192, 32768])
def test_drawing_one_token_is_drawing_a_row(size: int) -> None:
    """With blocks and without; zeros at both ends and all mass on one token included."""
    maker = torch.Generator().manual_seed(size)
    distributions = [torch.rand(size, generator=maker) ** 8, torch.zeros(size), torch.zeros(size)]
    distributions[0][: size // 3] = 0.0
    distributions[0][-1] = 0.0
    distributions[0][-2] += 1e-3
    distributions[1][-1] = 1.0
    distributions[2][0] = 1e-30
    for distribution in distributions:
        first, other = (torch.Generator().manual_seed(5) for _ in range(2))
        for count in (1, 1, 3, 200):
            rows = draw(distribution.expand(count, -1), other).tolist()
            assert draw_several(distribution, count, first) == rows
            assert all(distribution[token] > 0 for token in rows)
        assert draw_one(distribution, first) == int(draw(distribution, other))


def test_the_streams_of_a_key_never_change() -> None:
    assert seed_for(3, "eval", "x") == 3499306883368770211
    drawn = torch.rand(2, generator=generator_for(3, "eval", "x"))
    assert drawn.tolist() == [0.4623185396194458, 0.79582679271698]
    mixing = numpy_generator_for("train", 0, 1, "a", 2).random(3)
    assert mixing.tolist() == [0.6329750427028136, 0.15412029921126247, 0.5664571168477873]


def test_keys_do_not_run_into_each_other() -> None:
    assert seed_for(0, "a", "b") != seed_for(0, "ab")
    assert seed_for(0, 1, 2) != seed_for(0, 12)
    assert seed_for(1, "a") != seed_for(0, "a")
