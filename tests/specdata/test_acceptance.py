"""Labels: the right distributions, in any batch, piece and shard, of the sampler they name."""

import math
from collections import Counter
from pathlib import Path

import datasets
import pytest
import torch

from specdata import texts
from specdata.config import LabelsConfig
from specdata.errors import ConfigError, ManifestError
from specdata.labels.make import Labeller, are_greedy, load_labels, mean_overlap
from specdata.probability import SamplingConfig, probabilities
from specdata.storage.dataset import load_stored, of_split, read_manifest
from specdata.storage.schema import LABELS, MORE_DRAWS, ROLLOUTS, Label
from tests.support.acceptance import labelled, labeller, rollout, rollouts, stored
from tests.support.chi_square import p_value
from tests.support.families import tiny
from tests.support.tiny import tiny_llama

WARPED = SamplingConfig(temperature=0.8, top_k=3)


def close(labels: list[Label], others: list[Label]) -> None:
    """Equal up to rounding: batches of other shapes add up in another order."""
    for a, b in zip(labels, others, strict=True):
        assert a["example_id"] == b["example_id"]
        assert a["draft_ids"] == b["draft_ids"]
        for name in LABELS.names[len(ROLLOUTS) + 1 :]:
            assert a[name] == pytest.approx(b[name], abs=1e-5), name  # type: ignore[literal-required]


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARPED, SamplingConfig(0.0)], ids=str)
def test_labels_are_the_acceptance_of_tokens_drawn_from_the_draft_along_the_targets_text(
    sampling: SamplingConfig,
) -> None:
    """Of two independent draws at each position: their joint distribution is q x q."""
    target, draft = tiny_llama(0, vocab=12), tiny_llama(1, vocab=12)
    completion = [4, 5, 6, 7, 8]
    work = labeller(target, draft, sampling, draws=2)
    # Rows with one sequence and many names: every name has its own uniforms.
    labels = work([rollout(n, completion) for n in range(1500)])
    row = labels[-1]
    for index in range(len(completion)):
        context = torch.tensor([[2, 3, *completion[:index]]])
        with torch.inference_mode():
            p, q = (
                probabilities(model(input_ids=context).logits[0, -1], sampling)
                for model in (target, draft)
            )
        drafted = row["draft_ids"][index]
        expected = min(1.0, float(p[drafted] / q[drafted]))
        assert row["accept_prob"][index] == pytest.approx(expected, abs=1e-6)
        assert row["overlap"][index] == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-6)
        assert row["log_p"][index] == pytest.approx(float(p[drafted].log()), abs=1e-6)
        assert row["log_q"][index] == pytest.approx(float(q[drafted].log()), abs=1e-6)
        nats = -sum(chance * math.log(chance) for chance in q.tolist() if chance)
        assert row["entropy"][index] == pytest.approx(nats, abs=1e-5)
        assert row["log_q_max"][index] == pytest.approx(float(q.max().log()), abs=1e-6)
        other = row["more_draft_ids"][index]
        expected = min(1.0, float(p[other] / q[other]))
        assert row["more_accept_prob"][index] == pytest.approx(expected, abs=1e-6)
        joint = torch.outer(q, q).double()
        distribution = {(a, b): float(joint[a, b]) for a, b in joint.nonzero().tolist()}
        counts = Counter((row["draft_ids"][index], row["more_draft_ids"][index]) for row in labels)
        assert p_value(counts, distribution) > 1e-6


def test_the_size_of_a_batch_of_a_piece_and_of_a_forward_change_no_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, draft = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    rows, work = rollouts(12, vocab=40), labeller(target, draft, WARPED)
    whole = work(rows)
    close(whole, [work([row])[0] for row in rows])
    monkeypatch.setattr(texts, "VALUES_AT_ONCE", 1)
    monkeypatch.setattr(texts, "POSITIONS", {"cpu": 3})
    rows_of_logits: list[int] = []
    for model in (target, draft):
        model.lm_head.register_forward_hook(lambda *run: rows_of_logits.append(len(run[-1])))
    close(whole, work(rows))
    assert max(rows_of_logits) == 3, "no logits of all positions are made"
    close(whole, Labeller(work.source, work.draft, WARPED, 0, tokens_at_once=1)(rows))


def test_each_turn_of_a_conversation_has_its_own_draws_and_the_first_the_seed_of_one_turn() -> None:
    target, draft = tiny_llama(0, vocab=40), tiny_llama(1, vocab=40)
    completion = list(range(2, 22))
    work = labeller(target, draft, SamplingConfig())
    first, second = work([rollout(0, completion), rollout(0, completion, turn=1)])
    assert first["log_q_max"] == pytest.approx(second["log_q_max"])
    assert first["draft_ids"] != second["draft_ids"]
    # What seed 0 has always drawn for id0: stored labels stay what the same command makes.
    assert first["draft_ids"][:4] == [20, 35, 22, 2]


def test_rollouts_are_labelled_as_far_as_the_draft_reads() -> None:
    target, draft = tiny_llama(0, vocab=40), tiny("gpt2", 1, vocab=30, n_positions=8)
    long = [rollout(0, [3, 35, 2, 5, 7, 9, 4, 3]), rollout(1, [2], prompt=(2,) * 8)]
    rows = labeller(target, draft, SamplingConfig())(long)
    # An id that the draft has no row for is read as it is in decoding.
    assert [row["completion_ids"] for row in rows] == [[3, 35, 2, 5, 7, 9]]
    assert rows[0]["finish"] == "length"
    assert rows == labeller(target, draft, SamplingConfig())([rollout(0, [3, 35, 2, 5, 7, 9])])


def test_labels_of_another_sampler_are_refused_with_the_difference(tmp_path: Path) -> None:
    made = stored(tmp_path / "rollouts", [rollout(0, [2, 3])])
    models = tiny_llama(0), tiny_llama(1)
    labelled(tmp_path / "labels", *models, load_stored(made), LabelsConfig(), WARPED)
    assert load_labels(tmp_path / "labels", WARPED).num_rows == 1
    with pytest.raises(ManifestError, match=r"another sampler(.|\n)*top_k: 3 -> 0"):
        load_labels(tmp_path / "labels", SamplingConfig(temperature=0.8))
    with pytest.raises(ManifestError, match="another sampler"):
        load_labels(made, SamplingConfig())


# --- Several draws a position, and greedy ones: exact, whatever else is asked for.


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
