"""Labels from top target logits: equal to full labels where that is claimed, else refused."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from specdata.config import LabelsConfig
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.probability import SamplingConfig, probabilities
from specdata.storage.schema import Label
from specdata.top_logits import TopLogitDistributions, TopLogits, top_logits
from tests.support.acceptance import labelled, rollouts
from tests.support.tiny import tiny_llama

V, N = 40, 12
TOO_FEW = "12 top logits of 40 do not give"
REFUSED = [
    (SamplingConfig(), TOO_FEW),
    (SamplingConfig(temperature=0.9), TOO_FEW),
    (SamplingConfig(temperature=0.9, top_p=0.3), TOO_FEW),
    (SamplingConfig(top_k=N + 1), TOO_FEW),
    (SamplingConfig(top_p=0.999), r"at \d+ of \d+ positions.*nucleus keep is outside"),
]


def label(
    out: Path,
    target: PreTrainedModel | TopLogits,
    rows: Dataset,
    sampling: SamplingConfig,
    *,
    bound: bool = False,
) -> list[Label]:
    config = LabelsConfig(shard_size=4, bound=bound, draws=3)
    return labelled(out, target, tiny_llama(2, vocab=V), rows, config, sampling)


def target() -> PreTrainedModel:
    return tiny_llama(0, vocab=V, layers=2)


def with_logits() -> Dataset:
    """Rollouts with the columns of stage logits."""
    source = ModelLogits(find_lm_head(target()), N)
    return Dataset.from_list(source(rollouts(9, vocab=V)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("sampling", "message"), REFUSED, ids=str)
def test_a_sampler_that_the_top_logits_do_not_decide_is_refused(
    sampling: SamplingConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        label(tmp_path / "top", TopLogits(N, V), with_logits(), sampling)
    assert not (tmp_path / "top").exists()


def test_a_bound_is_exact_inside_and_an_upper_bound_of_the_overlap(tmp_path: Path) -> None:
    cache, plain = with_logits(), SamplingConfig()
    again = label(tmp_path / "top", TopLogits(N, V), cache, plain, bound=True)
    full = label(tmp_path / "full", target(), cache, plain)
    inside = outside = 0
    for row, true, source in zip(again, full, cache, strict=True):
        assert row["draft_ids"] == true["draft_ids"]
        assert row["log_q"] == pytest.approx(true["log_q"], abs=1e-5)
        for index, token in enumerate(row["draft_ids"]):
            assert row["overlap"][index] >= true["overlap"][index] - 1e-6
            if token in source["top_ids"][index * N : (index + 1) * N]:
                assert row["log_p"][index] == pytest.approx(true["log_p"][index], abs=1e-5)
                inside += 1
            else:
                outside += 1
    assert inside > 10
    assert outside > 10


def test_what_is_kept_of_the_logits_sums_up_to_all_of_them() -> None:
    logits = torch.randn(50, V, generator=torch.Generator().manual_seed(0))
    kept = top_logits(logits, N)
    assert torch.equal(kept["top_logits"], logits.sort(descending=True).values[:, :N])
    assert torch.equal(logits.gather(-1, kept["top_ids"]), kept["top_logits"])
    assert torch.equal(kept["next_logit"], logits.sort(descending=True).values[:, N])
    total = torch.logaddexp(kept["top_logits"].logsumexp(-1), kept["rest_logit"])
    assert torch.allclose(total, logits.logsumexp(-1))


def test_labels_of_rollouts_with_undecided_positions_are_those_of_the_parts_between(
    tmp_path: Path,
) -> None:
    source = with_logits()
    rows = source.to_list()
    tied = [(1, 1), (1, 2), (2, len(rows[2]["next_logit"]) - 1)]
    for row, index in tied:
        rows[row]["next_logit"][index] = rows[row]["top_logits"][(index + 1) * N - 1]
    positions = sum(len(row["completion_ids"]) for row in rows)
    assert len(tied) <= 0.05 * positions

    whole, parts = (
        label(tmp_path / name, TopLogits(N, V), given, SamplingConfig(top_k=N))
        for name, given in (("whole", source), ("parts", Dataset.from_list(rows)))
    )
    values, found = (
        {
            (*row["prompt_ids"], *row["completion_ids"][:index]): told
            for row in rows
            for index, told in enumerate(zip(row["draft_ids"], row["accept_prob"], strict=True))
        }
        for rows in (whole, parts)
    )
    assert len(found) == len(values) - len(tied)
    assert found.items() <= values.items()
    assert {row["example_id"] for row in parts} == {row["example_id"] for row in whole}


@pytest.mark.parametrize(
    ("sampling", "count"),
    [
        (SamplingConfig(top_k=3), 3),
        (SamplingConfig(top_p=0.9), 3),
        (SamplingConfig(temperature=0.0), 1),
    ],
)
def test_an_equal_logit_outside_is_not_decided_because_it_would_be_kept_too(
    sampling: SamplingConfig, count: int
) -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 3.0, 1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    logits[0, 1:3] = logits[0, 0] if count == 1 else logits[0, 1:3]
    columns = {name: value.view(2, -1) for name, value in top_logits(logits, count).items()}
    decided = TopLogitDistributions(count, 5, sampling).decided(columns)
    assert decided.tolist() == [False, True]


def test_equal_logits_inside_are_decided_as_the_whole_row_decides_them() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0, 3.0]])
    columns = {name: value.view(1, -1) for name, value in top_logits(logits, 3).items()}
    assert columns["top_ids"].tolist() == [[1, 2, 4]]
    for sampling in (SamplingConfig(temperature=0.0), SamplingConfig(top_k=1)):
        distribution = TopLogitDistributions(3, 5, sampling).distribution(
            columns, torch.full((1, 5), 0.2)
        )
        assert torch.equal(distribution, probabilities(logits, sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(0.7, min_p=0.1),
        SamplingConfig(1.3, N + 9, min_p=0.2),
        SamplingConfig(top_p=0.98, min_p=0.1),
        SamplingConfig(0.9, N, 0.8, 0.1),
    ],
    ids=str,
)
def test_min_p_is_decided_where_no_logit_outside_reaches_it(sampling: SamplingConfig) -> None:
    logits = 2 * torch.randn(400, V, generator=torch.Generator().manual_seed(0))
    logits[::2] *= 3
    columns = {name: value.view(400, -1) for name, value in top_logits(logits, N).items()}
    law = TopLogitDistributions(N, V, sampling)
    decided, whole = law.decided(columns), probabilities(logits, sampling)
    found = law.distribution(columns, torch.full((400, V), 1 / V))
    torch.testing.assert_close(found[decided], whole[decided])
    assert torch.equal(decided, (whole > 0).sum(-1) <= N)
    assert decided.sum() > 100
    assert sampling.top_k == N or not decided.all()
