"""Several draws a position, and greedy ones: exact, whatever else is asked for."""

from pathlib import Path

import datasets
import pytest
import torch

from specdata.config import LabelsConfig
from specdata.errors import ConfigError
from specdata.labels.make import are_greedy, mean_overlap
from specdata.probability import SamplingConfig
from specdata.storage.dataset import load_stored, of_split, read_manifest
from specdata.storage.schema import LABELS, MORE_DRAWS, Label
from tests.support.acceptance import labelled, rollout, rollouts, stored
from tests.support.tiny import tiny_llama

V, PLAIN = 40, SamplingConfig()


def label(
    folder: Path, name: str, config: LabelsConfig, sampling: SamplingConfig = PLAIN
) -> list[Label]:
    """Labels of a few rows, of which every third is not trained on."""
    if not (folder / "rollouts").exists():
        rows = rollouts(9, vocab=V)
        for row in rows[::3]:
            row["split"] = "dev"
        stored(folder / "rollouts", rows)
    models = tiny_llama(0, vocab=V), tiny_llama(1, vocab=V)
    rows = load_stored(folder / "rollouts")
    return labelled(folder / name, *models, rows, config, sampling)


def test_a_greedy_label_is_the_likeliest_token_and_the_targets_chance_of_it(tmp_path: Path) -> None:
    target, draft = tiny_llama(0, vocab=V), tiny_llama(1, vocab=V)
    for row in label(tmp_path, "greedy", LabelsConfig(greedy=True, draws=3)):
        ids, first = [*row["prompt_ids"], *row["completion_ids"]], len(row["prompt_ids"]) - 1
        with torch.inference_mode():
            p, q = (
                model(input_ids=torch.tensor([ids])).logits[0, first:-1].softmax(-1)
                for model in (target, draft)
            )
        assert row["draft_ids"] == q.argmax(-1).tolist()
        chances = p.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1)
        assert row["accept_prob"] == pytest.approx(chances.tolist(), abs=1e-5)
        assert row["log_q"] == pytest.approx(q.amax(-1).log().tolist(), abs=1e-5)
    assert are_greedy(tmp_path / "greedy")


def test_the_mean_overlap_is_over_the_positions_of_a_split_however_long_its_texts() -> None:
    texts = [("train", [0.5, 1.0, 0.75]), ("dev", [0.25]), ("train", [0.0])]
    rows = [{"dataset": "d", "split": split, "overlap": values} for split, values in texts]
    assert mean_overlap(datasets.Dataset.from_list(rows)) == {"d/train": 0.5625, "d/dev": 0.25}


def test_draws_do_not_depend_on_how_many_there_are_nor_on_the_shards(tmp_path: Path) -> None:
    one = label(tmp_path, "one", LabelsConfig(shard_size=4))
    assert not {*MORE_DRAWS.names} & one[0].keys()
    by_count = {
        count: label(tmp_path, f"{count}", LabelsConfig(shard_size=size, draws=count))
        for count, size in ((3, 4), (5, 2))
    }
    trained = 0
    rolled_out = load_stored(tmp_path / "rollouts").to_list()
    for row, *rows in zip(rolled_out, one, by_count[3], by_count[5], strict=True):
        plain, three, five = rows
        assert {name: plain[name] for name in row} == row  # type: ignore[literal-required]
        for several in (three, five):
            assert {name: several[name] for name in plain} == plain
        length = len(plain["draft_ids"])
        for name in MORE_DRAWS.names:
            few, many = (torch.tensor(row[name]) for row in (three, five))  # type: ignore[literal-required]
            if plain["split"] != "train":
                assert len(few) == len(many) == 0
                continue
            assert torch.equal(few.view(length, 2), many.view(length, 4)[:, :2])
            trained += 1
    assert trained == 12


def test_at_temperature_0_there_is_one_draw_because_all_are_equal(tmp_path: Path) -> None:
    greedy = SamplingConfig(temperature=0.0)
    several = label(tmp_path, "labels", LabelsConfig(draws=4), greedy)
    assert several[0].keys() == {*LABELS.names}
    assert read_manifest(tmp_path / "labels")["settings"]["draws"] == 1


def test_a_split_without_rows_is_refused() -> None:
    table = datasets.Dataset.from_list([rollout(n, [2]) for n in range(5)])
    assert len(of_split(table, "train", Path("here"))) == 5
    with pytest.raises(ConfigError, match="here has no rows of split 'dev'"):
        of_split(table, "dev", Path("here"))
    with pytest.raises(ConfigError, match=r"share 1e-09 .* or a larger draft\.held_out_share"):
        of_split(table, "train", Path("here"), held_out_share=1e-9, wants_held_out=True)
