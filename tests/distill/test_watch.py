"""The watch on a draft while it trains: figures, best weights, history, reports."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedModel

from distill import watch
from distill.config import DistilConfig
from distill.distillation import DistilResult
from distill.watch import Figures, HeldOut, Measurement, best_step, store_best
from specdata import texts
from specdata.errors import ManifestError, TrainingDivergedError
from specdata.expected_tokens import expected_tokens, log_ratios
from specdata.lm_head import find_lm_head
from specdata.logits.make import ModelLogits
from specdata.models import load_model
from specdata.probability import overlap, probabilities
from specdata.sampling import SamplingConfig
from specdata.top_logits import TopLogits
from tests.support.random_pair import texts_of
from tests.support.trainings import assert_same_weights, changed, distilled, weights_of

WATCHED = DistilConfig(epochs=2, learning_rate=5e-3, save_steps=4, eval_steps=5, report_to=[])
"""12 steps: checkpoints after 4, 8, 12; measured after 0, 5, 10, 12; losses of 4, 8, 10, 12."""
TOO_FAST = changed(WATCHED, learning_rate=3.0, epochs=1)
"""The draft gets worse."""


@pytest.fixture(scope="module")
def models(trained_pair: Path) -> tuple[PreTrainedModel, PreTrainedModel]:
    return load_model(str(trained_pair / "target")), load_model(str(trained_pair / "draft"))


@pytest.fixture(scope="module")
def dev(trained_pair: Path) -> Dataset:
    """Nine rollouts of two prompt sets, unequally many."""
    sets = {"maths": texts_of(trained_pair, 6, seed=2), "sums": texts_of(trained_pair, 3, seed=3)}
    named = [rows.add_column("dataset", [name] * len(rows)) for name, rows in sets.items()]
    return concatenate_datasets(named)


@pytest.fixture(scope="module")
def whole(
    trained_pair: Path, dev: Dataset, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, DistilResult]:
    """An uninterrupted training: its folder and its result."""
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, trained(trained_pair, dev, out)


def by_hand(
    models: tuple[PreTrainedModel, PreTrainedModel], dev: Dataset, sampling: SamplingConfig
) -> list[dict[str, Any]]:
    """The figures of every position, row by row, with all of p and q in memory."""
    found = []
    for row in dev:
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        here = slice(len(row["prompt_ids"]) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            p_logits, q_logits = (model(ids).logits[0, here] for model in models)
        p, q = probabilities(p_logits, sampling), probabilities(q_logits, sampling)
        text = torch.tensor(row["completion_ids"]).unsqueeze(-1)
        ratios = log_ratios(p.gather(-1, text), q.gather(-1, text)).T
        rounds = {
            f"{how}_{k}": expected_tokens(ratios, torch.tensor([len(text)]), k, how)[0].tolist()
            for how in ("token", "block")
            for k in (4, 8)
        }
        log_q = (q_logits / (sampling.temperature or 1.0)).log_softmax(-1)  # not truncated
        kl = (torch.xlogy(p, p) - p * log_q).sum(-1).tolist()
        for place, acceptance in enumerate(overlap(p, q).tolist()):
            tokens = {name: values[place] for name, values in rounds.items()}
            figures = {"acceptance": acceptance, "kl": kl[place], "tokens": tokens}
            found.append({"set": row["dataset"], **figures})
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def assert_figures(figures: Figures, expected: list[dict[str, Any]]) -> None:
    assert figures.positions == len(expected)
    for name in ("acceptance", "kl"):
        value = mean([each[name] for each in expected])
        assert getattr(figures, name) == pytest.approx(value, rel=1e-4), name
    assert figures.expected_tokens.keys() == expected[0]["tokens"].keys()
    for name, value in figures.expected_tokens.items():
        assert value == pytest.approx(mean([each["tokens"][name] for each in expected]), abs=1e-4)


# --- figures


@pytest.mark.parametrize(
    "sampling",
    [SamplingConfig(temperature=0.7, top_p=0.9), SamplingConfig(temperature=0.0)],
    ids=["truncated", "greedy"],
)
def test_figures_are_those_of_whole_distributions_row_by_row(
    models: tuple[PreTrainedModel, PreTrainedModel],
    dev: Dataset,
    sampling: SamplingConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "VALUES_AT_ONCE", 7 * 400)  # pieces of 7 positions
    monkeypatch.setattr(texts, "POSITIONS", {"cpu": 1})
    expected = by_hand(models, dev, sampling)
    measured = HeldOut(models[0], dev, sampling).measure(models[1], step=5)
    assert (measured.step, measured.rollouts) == (5, 9)
    assert_figures(measured.overall, expected)
    assert list(measured.sets) == ["maths", "sums"]
    for name, figures in measured.sets.items():
        assert_figures(figures, [each for each in expected if each["set"] == name])


def test_rounds_that_reach_an_undecided_position_are_left_out(
    models: tuple[PreTrainedModel, PreTrainedModel], dev: Dataset
) -> None:
    """An equal logit outside the top 8 is planted at one position of the first rollout."""
    sampling, count, tied = SamplingConfig(top_k=8), 8, 9
    rows = ModelLogits(find_lm_head(models[0]), count)(dev.to_list())  # type: ignore[arg-type]
    rows[0]["next_logit"][tied] = rows[0]["top_logits"][(tied + 1) * count - 1]
    expected = by_hand(models, dev, sampling)  # rollout by rollout
    assert len(dev[0]["completion_ids"]) > tied + 1
    source = TopLogits(count, 400).distributions(sampling)
    figures = HeldOut(source, Dataset.from_list(rows), sampling).measure(models[1]).overall
    assert figures.positions == len(expected) - 1
    for name, value in figures.expected_tokens.items():
        drafted = int(name.rpartition("_")[2])
        left = [*expected[: tied - drafted + 1], *expected[tied + 1 :]]
        assert value == pytest.approx(mean([each["tokens"][name] for each in left]), abs=1e-4)


def test_watched_rollouts_are_as_many_of_each_set_and_spread_over_it(
    models: tuple[PreTrainedModel, PreTrainedModel], dev: Dataset
) -> None:
    watch = HeldOut(models[0], dev, SamplingConfig(), watched=4)
    expected = by_hand(models, dev.select([0, 3, 6, 7]), SamplingConfig())  # six and three rows
    assert_figures(watch.measure(models[1], watched_only=True).overall, expected)


# --- what is kept


def test_the_earliest_of_equally_good_weights_are_the_best() -> None:
    others = {"token_8": 1.0, "block_4": 1.0, "block_8": 9.0}
    measured = [
        Measurement(10 * step, 1, Figures(1, 0.5, 0.1, {"token_4": tokens, **others}), {})
        for step, tokens in enumerate([2.0, 3.5, 3.0, 3.5])
    ]
    assert best_step(measured) == 10


def test_weights_that_got_worse_are_not_kept(trained_pair: Path, tmp_path: Path) -> None:
    best = distilled(trained_pair, tmp_path / "best", TOO_FAST)
    assert (best.steps, best.best_step) == (6, 0)
    assert best.acceptance_after == best.acceptance_before
    assert_same_weights(tmp_path / "best", trained_pair / "draft")
    history = kept(tmp_path / "best")
    assert steps_of(history["measurements"]) == [0, 5, 6]
    first, *_, last = history["measurements"]
    assert last["overall"]["acceptance"] < first["overall"]["acceptance"]


def test_a_share_of_the_draft_is_as_training_began(
    trained_pair: Path, dev: Dataset, whole: tuple[Path, DistilResult], tmp_path: Path
) -> None:
    trained(trained_pair, dev, tmp_path / "out", changed(WATCHED, start_share=0.25))
    begun, learnt = weights_of(trained_pair / "draft"), weights_of(whole[0])
    for name, weight in weights_of(tmp_path / "out").items():
        expected = 0.25 * begun[name] + 0.75 * learnt[name]
        torch.testing.assert_close(weight, expected, msg=name)


def test_a_draft_gets_better_and_its_result_tells_of_every_prompt_set_and_is_stored(
    trained_pair: Path, dev: Dataset, whole: tuple[Path, DistilResult]
) -> None:
    out, result = whole
    before, after = result.before, result.after
    assert before is not None
    assert after is not None
    assert result.best_step == after.step == kept(out)["best_step"] > 0
    assert result.acceptance_before == before.overall.acceptance
    assert result.acceptance_after > result.acceptance_before + 0.02
    assert result.positions == sum(map(len, dev["completion_ids"]))
    assert set(after.sets) == {"maths", "sums"}
    assert after.rollouts == 9
    target, draft = load_model(str(trained_pair / "target")), load_model(str(out))
    stored = HeldOut(target, dev, SamplingConfig()).measure(draft).overall.acceptance
    assert stored == pytest.approx(result.acceptance_after, abs=1e-6)
    assert draft.config.use_cache
    for path in (trained_pair / "target").glob("tokenizer*"):
        assert (out / path.name).read_bytes() == path.read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    # A finished one is read, not made again.
    written = (out / "model.safetensors").stat()
    assert trained(trained_pair, dev, out) == result
    assert (out / "model.safetensors").stat() == written


# --- history and resume


def trained(
    trained_pair: Path, dev: Dataset, out: Path, config: DistilConfig = WATCHED
) -> DistilResult:
    train = texts_of(trained_pair, 48, seed=1)
    return distilled(trained_pair, out, changed(config, eval_rollouts=4), train=train, dev=dev)


def kept(folder: Path) -> dict[str, Any]:
    """The history in a model's folder."""
    history: dict[str, Any] = json.loads((folder / "history.json").read_text())
    return history


def steps_of(measured: list[dict[str, Any]]) -> list[int]:
    return [each["step"] for each in measured]


def test_history_has_every_step_that_was_logged_and_every_measurement(
    whole: tuple[Path, DistilResult],
) -> None:
    history = kept(whole[0])
    assert steps_of(history["steps"]) == [4, 8, 10, 12]
    assert all(step["loss"] > 0 and step["grad_norm"] > 0 for step in history["steps"])
    assert steps_of(history["measurements"]) == [0, 5, 10, 12]
    assert {each["rollouts"] for each in history["measurements"]} == {4}
    assert all({*each["sets"]} == {"maths", "sums"} for each in history["measurements"])
    assert history["before"]["rollouts"] == 9


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


@pytest.mark.slow
def test_a_training_killed_after_it_stored_weights_goes_on_to_the_same_result(
    trained_pair: Path,
    dev: Dataset,
    whole: tuple[Path, DistilResult],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights of a step beyond the last checkpoint lie there then, and those before it as well.

    Those that the checkpoint goes on with: without them the training is refused.
    """
    times = []

    def store_and_die(*given: Any) -> None:
        store_best(*given)
        times.append(given[1])
        if len(times) == 2:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(watch, "store_best", store_and_die)
        with pytest.raises(Killed):
            trained(trained_pair, dev, tmp_path / "out")
    assert times == [0, 5]  # it gets better all the time
    best = tmp_path / "out.training" / "best-0"
    best.rename(tmp_path / "elsewhere")
    with pytest.raises(ManifestError, match=r"best-0/weights.safetensors, the best weights so far"):
        trained(trained_pair, dev, tmp_path / "out")
    (tmp_path / "elsewhere").rename(best)
    assert trained(trained_pair, dev, tmp_path / "out") == whole[1]
    assert_same_weights(tmp_path / "out", whole[0])
    assert kept(tmp_path / "out") == kept(whole[0])
    assert not (tmp_path / "out.training").exists()


def test_figures_that_are_not_finite_end_a_training(trained_pair: Path, tmp_path: Path) -> None:
    config = changed(WATCHED, epochs=1, learning_rate=1e6, save_steps=100, eval_steps=2)
    with pytest.raises(TrainingDivergedError, match="acceptance on held-out rollouts is nan after"):
        distilled(trained_pair, tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
