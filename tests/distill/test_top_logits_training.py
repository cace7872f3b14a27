"""Distillation from stored logits: the target's own losses and figures, or bounds of them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill.distillation import DistilResult
from distill.losses import LOSSES, Loss, bucketed
from distill.watch import HeldOut
from specdata.errors import ConfigError
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.models import load_model
from specdata.probability import SamplingConfig
from specdata.top_logits import TopLogits
from tests.support.losses import gradient, random_logits
from tests.support.random_pair import texts_of
from tests.support.trainings import PLAIN, QUICK, changed, distilled, trainer_of

NAMES = sorted(LOSSES)
ALL = 400  # the pair's vocabulary


def columns_of(logits: Tensor, count: int) -> dict[str, Tensor]:
    """The top logits of logits (n, V), in their own precision."""
    values, ids = logits.sort(dim=-1, descending=True)
    rest = values[:, count:].logsumexp(dim=-1, keepdim=True)
    return {"top_ids": ids[:, :count], "top_logits": values[:, :count], "rest_logit": rest}


def with_one_bucket(loss: Loss, kept: Mapping[str, Tensor]) -> Loss:
    """A loss on the kept tokens and the tail."""

    def of_all(draft: Tensor, _target: Tensor, mask: Tensor) -> Tensor:
        return loss(*bucketed(draft, kept), mask)

    return of_all


def kept_of(target: PreTrainedModel, rows: Dataset, count: int) -> Dataset:
    """Rollouts with the columns of stage logits."""
    head = find_lm_head(target)
    return Dataset.from_list(ModelLogits(head, min(count, head.vocabulary))(rows.to_list()))  # type: ignore[arg-type]


# --- losses


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_loss_is_the_plain_one_of_distributions_in_which_the_tail_is_one_token(
    name: str, count: int
) -> None:
    draft, target = random_logits(6, 9, seed=3), random_logits(6, 9, seed=4)
    kept, ones = columns_of(target, count), torch.ones(6)
    p, q = target.softmax(-1), draft.softmax(-1)
    p, q = (each.gather(-1, target.argsort(dim=-1, descending=True)) for each in (p, q))
    merged = [torch.cat([x[:, :count], x[:, count:].sum(-1, keepdim=True)], -1) for x in (q, p)]
    value = with_one_bucket(LOSSES[name], kept)(draft, target, ones)
    expected = LOSSES[name](merged[0].log(), merged[1].log(), ones)
    torch.testing.assert_close(value, expected, rtol=0.0, atol=1e-13)
    if name not in ("tvd++", "lk_hybrid"):  # which hold a weight constant
        draft.requires_grad_()
        assert torch.autograd.gradcheck(
            lambda logits: with_one_bucket(LOSSES[name], kept)(logits, target, ones), draft
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_tail_that_the_draft_cannot_propose_has_a_finite_gradient(name: str) -> None:
    draft, target = random_logits(5, 9, seed=7), random_logits(5, 9, seed=8)
    kept = columns_of(target, 4)
    outside = torch.ones_like(draft, dtype=torch.bool).scatter(-1, kept["top_ids"], False)
    found = gradient(with_one_bucket(LOSSES[name], kept), draft.masked_fill(outside, -1e38), target)
    assert bool(found.isfinite().all())
    narrow = draft.masked_fill(outside, -torch.inf)
    found = gradient(with_one_bucket(LOSSES[name], kept), narrow, target)
    assert bool(found.isfinite().all())
    assert bool((found[outside] == 0).all())


@pytest.fixture(scope="module")
def models(trained_pair: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    return load_model(str(trained_pair / "target")), load_model(str(trained_pair / "draft"))


# --- measurements


def test_measured_with_one_bucket_acceptance_and_kl_are_bounds_and_expected_tokens_exact(
    models: tuple[PreTrainedModel, PreTrainedModel], trained_pair: Path
) -> None:
    target, draft = models
    rows = texts_of(trained_pair, 6, seed=2)
    expected = HeldOut(target, rows, PLAIN).measure(draft).overall
    for count in (2, 20):
        kept = kept_of(target, rows, count)
        known = TopLogits(count, ALL).distributions(PLAIN, bound=True)
        found = HeldOut(known, kept, PLAIN).measure(draft).overall
        assert found.acceptance > expected.acceptance
        assert found.kl < expected.kl
        assert found.expected_tokens == pytest.approx(expected.expected_tokens, abs=1e-4)


# --- whole distillations


# --- refusals


def test_logits_that_do_not_give_what_serving_draws_from_are_refused_before_a_model_is_loaded(
    trained_pair: Path,
    models: tuple[PreTrainedModel, PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distill.distillation.load_student", None)  # would not load
    rows, top = kept_of(models[0], texts_of(trained_pair, 8, seed=2), 8), TopLogits(8, ALL)
    sampling = SamplingConfig(temperature=0.7)
    with pytest.raises(ConfigError, match=r"at temperature 0.7, .*min_p 0.0: run the target"):
        distilled(
            trained_pair, tmp_path / "out", QUICK, sampling, train=rows, dev=rows, top_logits=top
        )
    assert not (tmp_path / "out").exists()


TIED = SamplingConfig(top_k=8)


def with_ties(kept: Dataset, every: int, count: int = 8) -> Dataset:
    """Rows with an equal logit outside planted at every so many positions."""
    rows, place = kept.to_list(), 0
    for row in rows:
        for index in range(len(row["next_logit"])):
            place += 1
            if place % every == 0:
                row["next_logit"][index] = row["top_logits"][(index + 1) * count - 1]
    return Dataset.from_list(rows)


def positions_of(rows: Dataset) -> int:
    return sum(map(len, rows["completion_ids"]))


def test_undecided_positions_are_left_out_of_a_distillation_and_counted(
    trained_pair: Path, models: tuple[PreTrainedModel, PreTrainedModel], tmp_path: Path
) -> None:
    train, dev = (kept_of(models[0], texts_of(trained_pair, n, seed=n), 8) for n in (16, 8))
    measured = changed(QUICK, epochs=0)

    def of(every: int, name: str) -> DistilResult:
        rows = {"train": with_ties(train, every), "dev": with_ties(dev, every)}
        top = TopLogits(8, ALL)
        return distilled(trained_pair, tmp_path / name, measured, TIED, **rows, top_logits=top)

    none, some = of(10**9, "none"), of(25, "some")
    planted = positions_of(train) // 25 + positions_of(dev) // 25
    # Others were tied before; those of them that the planted ones hit are counted once.
    assert planted <= some.undecided <= none.undecided + planted
    assert planted > 10
    assert not none.is_bound
    assert some.positions < none.positions <= positions_of(dev)
    assert some.acceptance_after != none.acceptance_after
    with pytest.raises(ConfigError, match=r"equal logit is outside.*more than a share of 0\.05"):
        of(10, "many")
    assert not (tmp_path / "many").exists()


def test_figures_that_top_logits_decide_nowhere_are_null_and_said(
    trained_pair: Path,
    models: tuple[PreTrainedModel, PreTrainedModel],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = kept_of(models[0], texts_of(trained_pair, 16, seed=2), 8).to_list()
    dev = [{**row, "dataset": "maths"} for row in rows]
    (short,) = kept_of(
        models[0],
        Dataset.from_list(
            [{"prompt_ids": rows[0]["prompt_ids"], "completion_ids": rows[0]["completion_ids"][:2]}]
        ),
        8,
    ).to_list()
    short["next_logit"] = short["top_logits"][7::8]  # tied with the last that is kept
    given = {"train": Dataset.from_list(rows), "top_logits": TopLogits(8, ALL)}
    given["dev"] = Dataset.from_list([*dev, {**short, "dataset": "tied"}])
    result = distilled(trained_pair, tmp_path / "out", QUICK, TIED, **given)
    tied = result.after.sets["tied"]
    assert (tied.positions, tied.acceptance, tied.kl) == (0, None, None)
    assert {*tied.expected_tokens.values()} == {None}
    assert None not in result.after.sets["maths"].expected_tokens.values()
    assert "acceptance, kl, expected_tokens_token_4" in caplog.text
    stored = json.loads((tmp_path / "out" / "result.json").read_text())
    assert stored["after"]["sets"]["tied"]["acceptance"] is None
    assert distilled(trained_pair, tmp_path / "out", QUICK, TIED, **given) == result
    given["dev"] = Dataset.from_list([{**short, "dataset": "maths"}, *dev])
    with pytest.raises(ConfigError, match=r"top logits decide none in the 1 held-out"):
        distilled(trained_pair, tmp_path / "one", changed(QUICK, eval_rollouts=1), TIED, **given)


def test_an_undecided_position_adds_nothing_to_the_loss(trained_pair: Path, tmp_path: Path) -> None:
    target, student = (
        load_model(str(trained_pair / "target")),
        load_model(str(trained_pair / "draft")),
    )
    kept = kept_of(target, texts_of(trained_pair, 4, seed=3), 8)
    known = TopLogits(8, ALL).distributions(TIED)
    tied = with_ties(kept, 7)
    config = changed(QUICK, batch_size=len(tied))
    trainer = trainer_of(known, student, tied, tmp_path, config, TIED)
    batch = next(iter(trainer.get_train_dataloader()))
    columns = trainer.objective.teacher.columns(batch)
    decided = known.decided(columns)
    assert 0 < int((~decided).sum()) < len(decided)
    q = torch.randn(len(decided), ALL, generator=torch.Generator().manual_seed(0))

    def divergence(some: Tensor) -> Tensor:
        rows = {name: values[some] for name, values in columns.items()}
        q_logits, p_logits, counted = trainer.objective.teacher.compared(q[some], rows)
        return LOSSES["forward_kl"](q_logits, p_logits, counted) * counted.sum()

    torch.testing.assert_close(divergence(decided | ~decided), divergence(decided))
    assert float(divergence(~decided)) == 0.0
